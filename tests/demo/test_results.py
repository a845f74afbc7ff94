"""What the demonstration reads from the resources."""

from dev.demo.results import costs


def resource(name, **stages):
    metrics = {"seconds": 3.0, "peak_memory_bytes": 2**30}
    entries = [{"name": stage, "fingerprint": mark, "metrics": metrics} for stage, mark in stages.items()]
    return {"metadata": {"name": name}, "status": {"stages": entries}}


def test_a_shared_stage_is_listed_once_as_of_all_that_share_it():
    listed = costs([resource("one", capture="a", distil="b"), resource("other", capture="a", distil="c")])
    assert [(cost.stage, cost.resources) for cost in listed] == [
        ("capture", ("one", "other")),
        ("distil", ("one",)),
        ("distil", ("other",)),
    ]
    assert listed[0].peak_memory_gib == 1
