"""The operator's `/metrics`: figures of the resources that there are, and of its own work.

Figures of resources are computed at each scrape from the live objects, so no series outlives its resource. They are
computed on the event loop, where nothing changes meanwhile.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from osprey_api import backbone, drafter
from osprey_api.status import StageState
from osprey_operator.live import LiveMonitor
from osprey_operator.queue import Key, Work
from osprey_operator.state import KubernetesObject

RESOURCE = ("namespace", "name")
STATUSES = ("True", "False", "Unknown")
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class ResourceCollector(Collector):
    """Figures of the resources that `resources` returns, from their status and from live traffic."""

    def __init__(self, resources: Callable[[str], Iterable[KubernetesObject]], live: LiveMonitor) -> None:
        self._resources = resources
        self._live = live

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is depends on the resources, and registering must not ask for them."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all resources."""
        drafters = list(self._resources(drafter.KIND))
        yield from self._drafters(drafters)
        yield from _stages_and_conditions([*self._resources(backbone.KIND), *drafters])

    def _drafters(self, resources: Iterable[KubernetesObject]) -> Iterator[Metric]:
        live_length = _gauge(
            "osprey_drafter_acceptance_length",
            "Tokens over verify steps of the servers' recent traffic; absent without any.",
        )
        live_steps = _gauge("osprey_drafter_verify_steps", "Verify steps that the live acceptance length is made of.")
        live_speed = _gauge("osprey_drafter_tokens_per_second", "Decoded tokens per second of all servers, now.")
        by_domain = _gauge(
            "osprey_drafter_evaluated_acceptance_length",
            "Mean acceptance length over the held-out requests of a domain, by the last evaluation.",
            "domain",
        )
        overall = _gauge(
            "osprey_drafter_evaluated_acceptance_length_overall",
            "Mean acceptance length over all held-out requests, by the last evaluation.",
        )
        speedup = _gauge(
            "osprey_drafter_evaluated_speedup",
            "Tokens per second of a domain relative to no drafter, by the last evaluation.",
            "domain",
        )
        for resource in resources:
            labels = _labels(resource)
            traffic = self._live.traffic_of(resource)
            if traffic is not None:
                live_steps.add_metric(labels, traffic.verify_steps)
                _add(live_length, labels, traffic.acceptance_length)
                _add(live_speed, labels, traffic.tokens_per_second)
            acceptance = _status(resource).get("acceptanceLength") or {}
            _add(overall, labels, acceptance.get("evaluated"))
            for domain in acceptance.get("byDomain") or ():
                _add(by_domain, [*labels, domain["name"]], domain.get("evaluated"))
                _add(speedup, [*labels, domain["name"]], domain.get("speedup"))
        yield from (live_length, live_steps, live_speed, by_domain, overall, speedup)


def _stages_and_conditions(resources: Iterable[KubernetesObject]) -> Iterator[Metric]:
    ratio = _gauge("osprey_stage_progress_ratio", "Share of a stage that is done, 0 to 1.", "kind", "stage")
    attempts = _gauge("osprey_stage_attempts", "Jobs started for a stage's present inputs.", "kind", "stage")
    conditions = _gauge(
        "osprey_condition", "1 for the status that a condition has, 0 for the others.", "kind", "type", "status"
    )
    for resource in resources:
        labels = [*_labels(resource), resource["kind"]]
        for stage in _status(resource).get("stages") or ():
            _add(ratio, [*labels, stage["name"]], _progress(stage))
            _add(attempts, [*labels, stage["name"]], stage.get("attempts"))
        for condition in _status(resource).get("conditions") or ():
            for status in STATUSES:
                conditions.add_metric([*labels, condition["type"], status], condition["status"] == status)
    yield from (ratio, attempts, conditions)


class Metrics:
    """What the operator tells Prometheus.

    Args:
        resources: kind -> the resources of that kind that there are.
        live: what running pods say.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        resources: Callable[[str], Iterable[KubernetesObject]],
        live: LiveMonitor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._passes = Counter(
            "osprey_operator_reconcile", "Passes over a resource.", ("kind", "result"), registry=self.registry
        )
        self._seconds = Histogram(
            "osprey_operator_reconcile_seconds",
            "Duration of a pass.",
            ("kind",),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(ResourceCollector(resources, live))

    def counted(self, work: Work) -> Work:
        """Return `work`, counted and timed."""

        async def counted(key: Key) -> float | None:
            began = self._clock()
            result = "error"
            try:
                delay = await work(key)
                result = "success"
            finally:
                self._passes.labels(key.kind, result).inc()
                self._seconds.labels(key.kind).observe(self._clock() - began)
            return delay

        return counted

    def watch_queue(self, *, depth: Callable[[], int], last_pass_age: Callable[[], float | None]) -> None:
        """Tell how many resources wait for a pass, and how many seconds ago the last pass ended."""
        waiting = Gauge("osprey_operator_queue_depth", "Resources that wait for a pass.", registry=self.registry)
        waiting.set_function(depth)
        age = Gauge(
            "osprey_operator_last_pass_age_seconds",
            "Seconds since the last pass ended; NaN before the first one.",
            registry=self.registry,
        )
        age.set_function(lambda: _or_nan(last_pass_age()))

    async def serve(self, port: int) -> web.AppRunner:
        """Answer `/metrics` on `port`, until `cleanup` of what is returned."""
        application = web.Application()
        application.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await runner.setup()
        await web.TCPSite(runner, port=port).start()
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self.registry), headers={"Content-Type": content_type})


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=[*RESOURCE, *labels])


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    """Add a sample, unless its value is unknown: what is not there is not 0."""
    if value is not None:
        family.add_metric(labels, value)


def _labels(resource: KubernetesObject) -> list[str]:
    return [resource["metadata"]["namespace"], resource["metadata"]["name"]]


def _status(resource: KubernetesObject) -> Mapping[str, Any]:
    status: Mapping[str, Any] = resource.get("status") or {}
    return status


def _progress(stage: Mapping[str, Any]) -> float:
    if stage.get("state") == StageState.SUCCEEDED:
        return 1.0
    step, total = stage.get("step"), stage.get("totalSteps")
    if step is None or not total:
        return 0.0
    return float(min(step / total, 1.0))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
