"""What the operator's own client makes of the API server's answers."""

import asyncio
from datetime import timedelta

import pytest
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from osprey_operator.api import Api, ApiError
from osprey_operator.cache import Cache
from osprey_operator.execute import Executor
from osprey_operator.live import LiveMonitor
from osprey_operator.observe import Observer
from osprey_operator.plan.common import owner_of
from osprey_operator.state import Plan
from tests.operator.world import BACKBONE_SPEC, DRAFTER_SPEC, START

pytestmark = pytest.mark.cluster


@pytest.fixture
def ask(place):
    """Run a coroutine function with a client of the API server."""

    async def run(question):
        configuration = Configuration()
        await config.load_kube_config(str(place.cluster.kubeconfig), client_configuration=configuration)
        async with ApiClient(configuration) as client:
            return await question(Api(client))

    return lambda question: asyncio.run(run(question))


def test_a_status_is_replaced_as_a_whole(place, ask):
    place.apply("OspreyBackbone", "test", BACKBONE_SPEC)
    found = place.get("OspreyBackbone", "test")
    stage = {"name": "prune", "state": "Succeeded", "metrics": {"seconds": 1.5}}
    for status in ({"stages": [stage]}, {"stages": [{**stage, "metrics": {}}]}, {"observedGeneration": 1}):
        written = ask(lambda api, status=status: api.replace_status(found, status))
        assert written["status"] == place.get("OspreyBackbone", "test")["status"]
        metrics = [entry["metrics"] for entry in written["status"].get("stages", [])]
        assert metrics == [entry["metrics"] for entry in status.get("stages", [])]


def test_a_status_is_written_to_no_namesake_and_the_resource_is_forgotten(place, ask):
    place.apply("OspreyBackbone", "test", BACKBONE_SPEC)
    former = place.get("OspreyBackbone", "test")
    place.delete("OspreyBackbone", "test")
    cache = Cache()

    def written(api):
        cache.put(former)
        return Executor(api, cache).write_status(former, {"observedGeneration": 7})

    assert ask(written) is False
    assert cache.of("OspreyBackbone", place.namespace) == ()
    place.apply("OspreyBackbone", "test", BACKBONE_SPEC)
    assert ask(written) is False
    assert cache.of("OspreyBackbone", place.namespace) == ()
    assert "status" not in place.get("OspreyBackbone", "test")


def test_a_status_that_the_schema_refuses_is_an_error(place, ask):
    place.apply("OspreyBackbone", "test", BACKBONE_SPEC)
    found = place.get("OspreyBackbone", "test")
    with pytest.raises(ApiError, match="422"):
        ask(lambda api: api.replace_status(found, {"stages": [{"name": "test", "state": "Succeeded"}]}))


def test_a_known_object_of_somebody_else_is_not_applied_to(place, ask):
    place.apply("OspreyDrafter", "small", DRAFTER_SPEC)
    owner = owner_of(place.get("OspreyDrafter", "small"))
    mine = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "small"}}
    place.create("ConfigMap", {**mine, "data": {"whose": "theirs"}})
    wanted = {**mine, "metadata": {"name": "small", "namespace": place.namespace}, "data": {"whose": "ours"}}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "small"}}
    place.create("Service", {**service, "spec": {"ports": [{"port": 80}]}})
    cache = Cache()
    cache.put({**place.get("ConfigMap", "small"), "kind": "ConfigMap"})
    plan = Plan(apply=(wanted, {**service, "metadata": wanted["metadata"]}))
    done = ask(lambda api: Executor(api, cache).act(plan, owner, ()))
    assert {refused.child: refused.reason for refused in done.refused} == {
        "ConfigMap small": "NameTaken",
        "Service small": "NameTaken",
    }
    assert place.get("ConfigMap", "small")["data"] == {"whose": "theirs"}


def test_what_was_deleted_unheard_is_noticed_in_time(place, ask):
    place.apply("OspreyDrafter", "small", DRAFTER_SPEC)
    found = {**place.get("OspreyDrafter", "small"), "kind": "OspreyDrafter"}
    meta = {"name": "ghost", "namespace": place.namespace}
    ghosts = [
        {"kind": kind, "metadata": {**meta, "uid": f"{kind}-ghost", "labels": {"osprey.dev/kind": "OspreyDrafter"}}}
        for kind in ("OspreyBackbone", "Job", "Pod", "Deployment", "Service", "ConfigMap")
    ]
    cache = Cache()
    for each in (found, *ghosts):
        cache.put(each)

    async def look(api):
        observer = Observer(api, cache, LiveMonitor(), resync_seconds=300)
        for seconds in (0, 299, 300):
            seen = await observer.observe(found, {}, START + timedelta(seconds=seconds))
            yield len(seen.jobs), len(seen.pods)

    async def looks(api):
        return [each async for each in look(api)]

    assert ask(looks) == [(1, 1), (1, 1), (0, 0)]
    assert not any(cache.of(each["kind"], place.namespace) for each in ghosts)
    assert cache.get("OspreyDrafter", place.namespace, "small")
