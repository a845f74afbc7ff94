import math

import aiohttp
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from osprey_operator.live import LiveMonitor
from osprey_operator.metrics import Metrics
from osprey_operator.queue import Key
from osprey_operator.state import Traffic


class Live(LiveMonitor):
    """What the servers did, by the UID of the drafter; remembers the window that it was asked for."""

    def __init__(self, **traffic):
        super().__init__()
        self._told = traffic
        self.windows = []

    def traffic(self, uid, window_seconds):
        self.windows.append(window_seconds)
        return self._told.get(uid)


def resource(kind="OspreyDrafter", name="a", uid="u1", spec=None, **status):
    metadata = {"namespace": "ml", "name": name, "uid": uid}
    return {"kind": kind, "metadata": metadata, "spec": spec or {}, "status": status}


def exposed(*resources, live=None):
    """Sample name and labels -> value."""
    metrics = Metrics(resources=lambda kind: [each for each in resources if each["kind"] == kind], live=live or Live())
    return samples(metrics)


def samples(metrics):
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_live_figures_come_from_traffic():
    found = exposed(resource(), live=Live(u1=Traffic(verify_steps=500, acceptance_length=2.5, tokens_per_second=80.0)))
    assert found["osprey_drafter_acceptance_length", "a", "ml"] == 2.5
    assert found["osprey_drafter_tokens_per_second", "a", "ml"] == 80.0
    assert found["osprey_drafter_verify_steps", "a", "ml"] == 500


def test_what_is_unknown_has_no_series():
    found = exposed(resource(), live=Live(u1=Traffic(verify_steps=0, acceptance_length=None, tokens_per_second=None)))
    names = {name for name, *_ in found}
    assert "osprey_drafter_acceptance_length" not in names
    assert "osprey_drafter_tokens_per_second" not in names
    assert not {name for name, *_ in exposed(resource()) if name.startswith("osprey_drafter")}


def test_the_window_is_the_resources_own():
    live = Live()
    exposed(resource(spec={"adaptation": {"windowSeconds": 60}}), resource(uid="u2", name="b"), live=live)
    assert live.windows == [60.0, 1800.0]


def test_evaluated_figures_come_from_status():
    found = exposed(
        resource(
            acceptanceLength={
                "evaluated": 2.0,
                "byDomain": [
                    {"name": "code", "evaluated": 2.5, "evaluatedCorpus": 2.4, "speedup": 1.3},
                    {"name": "math", "evaluated": 1.5, "evaluatedCorpus": 1.4, "speedup": 1.1},
                ],
            }
        )
    )
    assert found["osprey_drafter_evaluated_acceptance_length", "code", "a", "ml"] == 2.5
    assert found["osprey_drafter_evaluated_acceptance_length", "math", "a", "ml"] == 1.5
    assert found["osprey_drafter_evaluated_acceptance_length_overall", "a", "ml"] == 2.0
    assert found["osprey_drafter_evaluated_speedup", "code", "a", "ml"] == 1.3


@pytest.mark.parametrize(
    ("stage", "ratio"),
    [
        ({"state": "Succeeded", "step": 3, "totalSteps": 10}, 1.0),
        ({"state": "Running", "step": 3, "totalSteps": 10}, 0.3),
        ({"state": "Running", "step": 12, "totalSteps": 10}, 1.0),
        ({"state": "Running", "step": 3, "totalSteps": 0}, 0.0),
        ({"state": "Pending"}, 0.0),
    ],
)
def test_progress_of_a_stage(stage, ratio):
    found = exposed(resource("OspreyBackbone", stages=[{"name": "pretrain", "attempts": 2, **stage}]))
    assert found["osprey_stage_progress_ratio", "OspreyBackbone", "a", "ml", "pretrain"] == pytest.approx(ratio)
    assert found["osprey_stage_attempts", "OspreyBackbone", "a", "ml", "pretrain"] == 2


def test_conditions():
    found = exposed(resource(conditions=[{"type": "Ready", "status": "Unknown", "reason": "Resolving"}]))
    values = {
        status: found["osprey_condition", "OspreyDrafter", "a", "ml", status, "Ready"]
        for status in ("True", "False", "Unknown")
    }
    assert values == {"True": 0, "False": 0, "Unknown": 1}


def test_no_series_outlives_its_resource():
    present = [resource(name="a", conditions=[{"type": "Ready", "status": "True"}]), resource(name="b", uid="u2")]
    live = Live(u1=Traffic(verify_steps=1, acceptance_length=2.0, tokens_per_second=1.0))
    metrics = Metrics(resources=lambda kind: [each for each in present if each["kind"] == kind], live=live)
    assert [key for key in samples(metrics) if "a" in key]
    del present[0]
    assert not [key for key in samples(metrics) if "a" in key]


def test_a_resource_that_was_never_looked_at_has_no_status():
    bare = resource()
    del bare["status"]
    exposed(bare)


async def test_passes_are_counted_and_timed():
    now = [0.0]
    metrics = Metrics(resources=lambda _: [], live=Live(), clock=lambda: now[0])

    async def work(key):
        now[0] += 2.0
        if key.name == "bad":
            raise RuntimeError(key.name)
        return 5.0

    counted = metrics.counted(work)
    assert await counted(Key("OspreyDrafter", "ml", "good")) == 5.0
    with pytest.raises(RuntimeError, match="bad"):
        await counted(Key("OspreyDrafter", "ml", "bad"))
    found = samples(metrics)
    assert found["osprey_operator_reconcile_total", "OspreyDrafter", "success"] == 1
    assert found["osprey_operator_reconcile_total", "OspreyDrafter", "error"] == 1
    assert found["osprey_operator_reconcile_seconds_sum", "OspreyDrafter"] == pytest.approx(4.0)


def test_the_queue():
    ages = iter([None, 12.5])
    metrics = Metrics(resources=lambda _: [], live=Live())
    metrics.watch_queue(depth=lambda: 3, last_pass_age=lambda: next(ages))
    found = samples(metrics)
    assert found["osprey_operator_queue_depth",] == 3
    assert math.isnan(found["osprey_operator_last_pass_age_seconds",])
    assert samples(metrics)["osprey_operator_last_pass_age_seconds",] == 12.5


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text;version=1.0.0"])
async def test_prometheus_is_answered(accept):
    metrics = Metrics(
        resources=lambda kind: [resource()] if kind == "OspreyDrafter" else [],
        live=Live(u1=Traffic(verify_steps=1, acceptance_length=2.0, tokens_per_second=1.0)),
    )
    runner = await metrics.serve(0)
    try:
        port = next(address[1] for address in runner.addresses if address[0] == "0.0.0.0")  # noqa: S104 - compared
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept}) as response,
        ):
            assert response.status == 200
            assert response.headers["Content-Type"].startswith(accept.split(";", maxsplit=1)[0])
            assert 'osprey_drafter_acceptance_length{name="a",namespace="ml"} 2.0' in await response.text()
    finally:
        await runner.cleanup()
