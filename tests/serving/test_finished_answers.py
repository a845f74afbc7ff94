"""Answers that survive their container."""

from osprey_api.stages import StorageLocation
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.store import open_store
from osprey_serving.client import Completion
from osprey_serving.stages.regenerate import FinishedAnswers


def completion(token: int) -> Completion:
    return Completion((token,), "length", 1, 0, (), started_s=0.0, latency_s=1.0)


def test_a_container_that_was_killed_while_it_saved_is_no_obstacle(tmp_path):
    store = open_store(StorageLocation(uri=f"file://{tmp_path}/storage"))

    def begin() -> FinishedAnswers:
        return FinishedAnswers(tmp_path / "answers", Checkpoints(store, "stage", "one", keep=1), save_every=100)

    first = begin()
    first.add(1, (5,), completion(11))
    first.save()
    (tmp_path / "answers.snapshot").mkdir()
    (tmp_path / "answers.open").write_text("half a li")
    second = begin()
    assert second.finished == {1}
    second.add(0, (4,), completion(10))
    second.save()
    assert [line["answer_ids"] for line in second.in_order()] == [[10], [11]]
