"""What is asked of the API server in a pass, and what is made of its events."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from osprey_operator import observe
from osprey_operator.cache import Cache
from osprey_operator.live import LiveMonitor
from osprey_operator.observe import FEW, Observer

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RESOURCE = {
    "kind": "OspreyDrafter",
    "metadata": {"name": "small", "namespace": "ns", "uid": "small"},
    "spec": {},
    "status": {"stages": [{"name": "distil", "state": "Succeeded", "job": "done"}]},
}


class Answers:
    """Stands for the API server: it gives these events, and remembers the questions."""

    def __init__(self, *events):
        self.events = events
        self.asked = []

    async def list(self, kind, _namespace, **selectors):
        self.asked.append((kind, *selectors.values()))
        return list(self.events) if kind == "Event" else []


def stamp(seconds):
    return (NOW + timedelta(seconds=seconds)).isoformat()


def event(kind, message, **times):
    return {"metadata": {"creationTimestamp": stamp(-60)}, "type": kind, "message": message, **times}


def child(kind, name, *, owner="small", labels=None, **more):
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": name,
        "creationTimestamp": stamp(-60),
        "ownerReferences": [{"uid": owner}],
        "labels": labels or {},
    }
    return {"kind": kind, "metadata": metadata, **more}


def pod(name, *, scheduled="True", **more):
    status = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": scheduled}]}
    return child("Pod", name, owner="job", status=status, **more)


def seen(answers, *children):
    cache = Cache()
    for each in children:
        cache.put(each)
    observer = Observer(answers, cache, LiveMonitor(), resync_seconds=300)
    return asyncio.run(observer.observe(RESOURCE, {}, NOW))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event("Warning", "no room", eventTime=stamp(-50))], "no room"),
        (
            [event("Warning", "no room", eventTime=stamp(-50)), event("Normal", "Pulling", lastTimestamp=stamp(-9))],
            None,
        ),
        (
            [event("Normal", "Scheduled", eventTime=stamp(-50)), event("Warning", "disk", lastTimestamp=stamp(-9))],
            "disk",
        ),
        (
            [
                event("Warning", "no room", eventTime=stamp(-50), series={"lastObservedTime": stamp(-5)}),
                event("Normal", "Created", lastTimestamp=stamp(-9)),
            ],
            "no room",
        ),
        ([], None),
    ],
)
def test_a_warning_counts_while_nothing_newer_is_said(events, message):
    observed = seen(Answers(*events), child("Job", "job", spec={}), pod("p"))
    assert observed.warnings.get("p") == message


def test_a_pod_that_no_node_takes_is_not_asked_about_and_of_many_only_a_few_are():
    answers = Answers(event("Warning", "disk"))
    waiting = [pod(f"w{index}", scheduled="False") for index in range(9)]
    mounting = [pod(f"m{index}") for index in range(9)]
    seen(answers, child("Job", "job", spec={}), *waiting, *mounting)
    assert answers.asked == [("Event", f"involvedObject.uid=m{index}") for index in range(FEW)]


def test_pods_are_looked_for_only_where_a_jobs_end_is_news(monkeypatch):
    looked = []
    monkeypatch.setattr(observe, "pods_of", lambda job, _pods: looked.append(job["metadata"]["name"]) or ())
    answers = Answers()

    def ended(name, owner, seconds):
        done = {"type": "Complete", "status": "True", "lastTransitionTime": stamp(-seconds)}
        return child("Job", name, owner=owner, spec={}, status={"conditions": [done]})

    seen(
        answers,
        ended("done", "small", 9),
        ended("new", "small", 900),
        ended("theirs", "other", 900),
        ended("theirs-now", "other", 9),
    )
    assert looked == ["new", "theirs-now"]
    assert len(answers.asked) == 2
