import pytest

from osprey_operator.cache import Cache
from osprey_operator.handlers import Wakes
from tests.operator.world import drafter, finished_backbone


class Added(list):
    """Stands where the queue does and writes down what is added."""

    def add(self, key):
        self.append(key.name)


@pytest.fixture
def added():
    return Added()


@pytest.fixture
def cache():
    return Cache()


@pytest.fixture
def wakes(cache, added):
    return Wakes(cache, added)


def resource(name="small", **spec):
    world = drafter(**spec)
    world.resource["metadata"].update(name=name, uid=name)
    return world.resource


def child(kind, **metadata):
    return {"kind": kind, "metadata": {"name": "x", "namespace": "ns", "uid": f"{kind}-uid", **metadata}}


def owned(uid):
    return {"ownerReferences": [{"uid": uid}]}


def test_a_resource_is_no_news_to_itself_unless_its_user_wants_something(wakes, added):
    one = resource()
    wakes.resource(one, gone=False)
    wakes.resource({**one, "status": {"observedGeneration": 1}}, gone=False)
    assert added == ["small"]
    wakes.resource({**one, "metadata": {**one["metadata"], "generation": 2}}, gone=False)
    assert added == ["small"] * 2
    annotations = {"osprey.dev/retry": "1"}
    wakes.resource({**one, "metadata": {**one["metadata"], "generation": 2, "annotations": annotations}}, gone=False)
    assert added == ["small"] * 3
    wakes.resource(one, gone=True)
    assert added == ["small"] * 4


def test_a_backbone_wakes_the_drafters_that_name_it(wakes, added, cache):
    for each in (resource("one"), resource("two", backbone="another")):
        cache.put(each)
    body = finished_backbone()
    wakes.resource(body, gone=False)
    wakes.resource({**body, "status": {}}, gone=False)
    assert added == ["body", "one", "one"]


def test_a_child_wakes_its_owner(wakes, added, cache):
    cache.put(resource("one"))
    cache.put(resource("two"))
    wakes.child(child("Job", **owned("one")))
    wakes.child(child("Pod", labels={"osprey.dev/owner-uid": "two"}))
    cache.put(child("Job", **owned("two")))
    wakes.child(child("Pod", **owned("Job-uid")))
    wakes.child(child("Pod", **owned("somebody")))
    assert added == ["one", "two", "two"]


def test_a_job_wakes_whoever_waits_for_a_result(wakes, added, cache):
    waiting = resource("waiting")
    waiting["status"] = {"stages": [{"name": "regenerate", "reason": "WaitingForSharedStage"}]}
    cache.put(waiting)
    cache.put(resource("other"))
    wakes.child(child("Job", **owned("somebody")))
    assert added == ["waiting"]
