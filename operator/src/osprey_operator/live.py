"""What running pods say of themselves: progress of stages, tokens and verify steps of servers.

The pods are asked in the background, so that neither a pass nor a scrape waits for one. A pod that does not answer
leaves what is known as it is; what it does not tell is unknown, never 0.

SGLang's counters of tokens and verify steps move when a request finishes; acceptance length is the ratio of their
growth over a window, all servers of the drafter together. Where a counter fell, or a pod is new, counting begins
anew: what lies before the first answer belongs to no window.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from osprey_api import progress
from osprey_api.naming import LABEL_COMPONENT, METRICS_PORT, SERVER_PORT
from osprey_operator.children import condition
from osprey_operator.manifests.metadata import LABEL_DRAFTER, LABEL_OWNER_UID, Component
from osprey_operator.manifests.stage_job import JOB_UID_LABEL
from osprey_operator.state import KubernetesObject, StageProgress, Traffic

logger = logging.getLogger(__name__)

GENERATED_TOKENS = "sglang_generation_tokens_total"
VERIFY_STEPS = "sglang_spec_verify_calls_total"
REALTIME_TOKENS = "sglang_realtime_tokens_total"
"""SGLang writes a colon after its name; what escapes names for a scraper makes it an underscore. Both are read."""

DEFAULT_WINDOW_SECONDS = 1800.0
"""As `adaptation.windowSeconds` has it, for drafters without `adaptation`."""
LONGEST_WINDOW_SECONDS = 604800.0
"""As `adaptation.windowSeconds` is bounded."""
RESOLUTION_SECONDS = 10.0
"""Growth within so long a time is kept as one entry."""
RATE_SECONDS = 60.0
"""Tokens per second are those of the last minute."""
CONCURRENT_REQUESTS = 32
ANSWER_LIMIT_BYTES = 8 << 20
_SHARING_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_JOB_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class _Count:
    """A server's counters at a time; None: it has no such series."""

    at: float
    tokens: float | None
    verify_steps: float | None
    realtime_tokens: float | None


@dataclass(frozen=True)
class _Rate:
    """Tokens that a server decoded in the `seconds` before `at`."""

    at: float
    tokens: float
    seconds: float


@dataclass
class _Growth:
    """Tokens and verify steps of the requests that finished from `at` on."""

    at: float
    tokens: float
    verify_steps: float


@dataclass
class _Fleet:
    """The servers of one OspreyDrafter."""

    drafter: str = ""
    """Label of the drafter that the newest server was made for: acceptance is counted for it alone."""
    counts: dict[str, _Count] = field(default_factory=dict)
    rates: dict[str, deque[_Rate]] = field(default_factory=dict)
    finished: deque[_Growth] = field(default_factory=deque)
    silent: bool = False
    """That no server answers was said in the log."""


class LiveMonitor:
    """Asks the pods that it was last told of.

    Args:
        interval_seconds: between two rounds.
        timeout_seconds: for one pod's answer.
        stage_port: where stages serve metrics.
        server_port: where servers do.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        interval_seconds: float = 10.0,
        timeout_seconds: float = 10.0,
        stage_port: int = METRICS_PORT,
        server_port: int = SERVER_PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._stage_port = stage_port
        self._server_port = server_port
        self._clock = clock
        self._stages: dict[str, KubernetesObject] = {}
        self._servers: dict[str, KubernetesObject] = {}
        self._progress: dict[str, StageProgress] = {}
        self._fleets: dict[str, _Fleet] = {}

    def observe(self, pods: Iterable[KubernetesObject]) -> None:
        """Take these pods, of stages and servers, for all there are, and forget what belonged to others."""
        self._stages, self._servers = {}, {}
        newest: dict[str, tuple[str, str]] = {}
        for pod in pods:
            labels = _labels(pod)
            component = labels.get(LABEL_COMPONENT)
            if component == Component.STAGE and labels.get(_JOB_INDEX, "0") == "0" and JOB_UID_LABEL in labels:
                if pod.get("status", {}).get("phase") == "Running":
                    self._stages[labels[JOB_UID_LABEL]] = pod
            elif component == Component.SERVER and LABEL_OWNER_UID in labels:
                self._servers[pod["metadata"]["uid"]] = pod
                owner = labels[LABEL_OWNER_UID]
                made = (pod["metadata"].get("creationTimestamp") or "", labels.get(LABEL_DRAFTER, ""))
                newest[owner] = max(made, newest.get(owner, made))
        self._progress = {uid: said for uid, said in self._progress.items() if uid in self._stages}
        self._fleets = {owner: self._fleets.get(owner, _Fleet()) for owner in newest}
        for owner, fleet in self._fleets.items():
            _, drafter = newest[owner]
            if fleet.drafter != drafter:
                fleet.drafter = drafter
                fleet.finished.clear()
            fleet.counts = {uid: count for uid, count in fleet.counts.items() if uid in self._servers}
            fleet.rates = {uid: rates for uid, rates in fleet.rates.items() if uid in self._servers}

    async def run(self, pods: Callable[[], Iterable[KubernetesObject]]) -> None:
        """Ask the pods that `pods` returns, round by round, until cancelled."""
        while True:
            self.observe(pods())
            await self.poll()
            await asyncio.sleep(self._interval_seconds)

    async def poll(self) -> None:
        """Ask every pod once."""
        gate = asyncio.Semaphore(CONCURRENT_REQUESTS)
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            stages = [self._poll_stage(session, gate, uid, pod) for uid, pod in self._stages.items()]
            servers = [self._poll_server(session, gate, uid, pod) for uid, pod in self._servers.items()]
            await asyncio.gather(*stages, *servers)
        self._tell_of_silence()

    def _tell_of_silence(self) -> None:
        """Say once of each drafter that its servers are ready and yet do not tell their metrics."""
        for owner, fleet in self._fleets.items():
            ready = [pod for pod in self._servers.values() if _labels(pod)[LABEL_OWNER_UID] == owner and _is_ready(pod)]
            silent = bool(ready) and not fleet.counts
            if silent and not fleet.silent:
                pod = ready[0]["metadata"]
                logger.warning(
                    "%s/%s: no server tells its metrics on port %d: is there a network policy that keeps the operator "
                    "out?",
                    pod.get("namespace"),
                    pod["name"],
                    self._server_port,
                )
            fleet.silent = silent

    def stage_progress(self, job_uid: str) -> StageProgress | None:
        """Return what the running pod of a Job said last; None: nothing yet."""
        return self._progress.get(job_uid)

    def traffic_of(self, drafter: KubernetesObject) -> Traffic | None:
        """Return what the servers of an OspreyDrafter did in the window that it asks for."""
        adaptation = drafter["spec"].get("adaptation") or {}
        return self.traffic(drafter["metadata"]["uid"], adaptation.get("windowSeconds", DEFAULT_WINDOW_SECONDS))

    def traffic(self, drafter_uid: str, window_seconds: float = DEFAULT_WINDOW_SECONDS) -> Traffic | None:
        """Return what the servers of an OspreyDrafter did of late; None: none of them has answered yet."""
        fleet = self._fleets.get(drafter_uid)
        if fleet is None or not fleet.counts:
            return None
        now = self._clock()
        tokens = steps = 0.0
        for growth in reversed(fleet.finished):
            if growth.at <= now - window_seconds:
                break
            tokens += growth.tokens
            steps += growth.verify_steps
        return Traffic(
            verify_steps=int(steps),
            acceptance_length=tokens / steps if steps else None,
            tokens_per_second=_tokens_per_second(fleet, now - max(RATE_SECONDS, 3 * self._interval_seconds)),
        )

    async def _poll_stage(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, uid: str, pod: KubernetesObject
    ) -> None:
        samples = await _scrape(session, gate, pod, self._stage_port, "osprey_stage_")
        if samples is not None and uid in self._stages:
            self._progress[uid] = _stage_progress({sample.name: sample.value for sample in samples})

    async def _poll_server(
        self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, uid: str, pod: KubernetesObject
    ) -> None:
        samples = await _scrape(session, gate, pod, self._server_port, "sglang")
        labels = _labels(pod)
        fleet = self._fleets.get(labels[LABEL_OWNER_UID])
        if not samples or fleet is None or uid not in self._servers:
            return
        count = _count(samples, self._clock())
        before = fleet.counts.get(uid)
        fleet.counts[uid] = count
        if before is None:
            return
        # SGLang has no series before a first request finished: then all that it counted since is growth.
        unused = before.tokens is None and before.verify_steps is None
        tokens = _difference(0.0 if unused else before.tokens, count.tokens)
        steps = _difference(0.0 if unused else before.verify_steps, count.verify_steps)
        if tokens is not None and steps and labels.get(LABEL_DRAFTER, "") == fleet.drafter:
            _remember(fleet.finished, _Growth(count.at, tokens, steps))
        realtime = _difference(before.realtime_tokens or 0.0, count.realtime_tokens)
        if realtime is not None and count.at > before.at:
            rates = fleet.rates.setdefault(uid, deque(maxlen=64))
            rates.append(_Rate(count.at, realtime, count.at - before.at))


def _remember(finished: deque[_Growth], growth: _Growth) -> None:
    if finished and growth.at - finished[-1].at < RESOLUTION_SECONDS:
        finished[-1].tokens += growth.tokens
        finished[-1].verify_steps += growth.verify_steps
    else:
        finished.append(growth)
    while finished[0].at <= growth.at - LONGEST_WINDOW_SECONDS:
        finished.popleft()


def _tokens_per_second(fleet: _Fleet, since: float) -> float | None:
    """Return the sum of the servers' rates; None: no server has told its own."""
    speeds = []
    for rates in fleet.rates.values():
        recent = [rate for rate in rates if rate.at > since]
        if recent:
            speeds.append(sum(rate.tokens for rate in recent) / sum(rate.seconds for rate in recent))
    return sum(speeds) if speeds else None


def _difference(before: float | None, after: float | None) -> float | None:
    """Return how much a counter grew; None where it is unknown or began anew."""
    if before is None or after is None or after < before:
        return None
    return after - before


def _count(samples: Iterable[Sample], at: float) -> _Count:
    tokens: list[float] = []
    steps: list[float] = []
    realtime: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        name = sample.name.replace("sglang:", "sglang_", 1)
        if name == GENERATED_TOKENS:
            tokens.append(sample.value)
        elif name == VERIFY_STEPS:
            steps.append(sample.value)
        elif name == REALTIME_TOKENS and sample.labels.get("mode") == "decode":
            # Ranks that share a model decode the same tokens; data-parallel ones do not.
            rank = {key: value for key, value in sample.labels.items() if key not in _SHARING_RANKS}
            group = tuple(sorted(rank.items()))
            realtime[group] = max(sample.value, realtime.get(group, 0.0))
    return _Count(
        at,
        tokens=sum(tokens) if tokens else None,
        verify_steps=sum(steps) if steps else None,
        realtime_tokens=sum(realtime.values()) if realtime else None,
    )


def _stage_progress(values: Mapping[str, float]) -> StageProgress:
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    step, total = known.get(progress.STEP), known.get(progress.TOTAL_STEPS)
    return StageProgress(
        step=None if step is None else int(step),
        total_steps=None if total is None else int(total),
        eta_seconds=known.get(progress.ETA_SECONDS),
        loss=known.get(progress.LOSS),
        tokens_per_second=known.get(progress.TOKENS_PER_SECOND),
        simulated_acceptance_length=known.get(progress.SIMULATED_ACCEPTANCE_LENGTH),
    )


def _labels(pod: KubernetesObject) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"].get("labels") or {}
    return labels


def _is_ready(pod: KubernetesObject) -> bool:
    return condition(pod, "Ready") is not None


async def _scrape(
    session: aiohttp.ClientSession, gate: asyncio.Semaphore, pod: KubernetesObject, port: int, prefix: str
) -> list[Sample] | None:
    """Return the samples whose names begin with `prefix`; None: the pod does not answer, or not with metrics."""
    address = pod.get("status", {}).get("podIP")
    if not address:
        return None
    host = f"[{address}]" if ":" in address else address
    try:
        async with gate, session.get(f"http://{host}:{port}/metrics", allow_redirects=False) as response:
            response.raise_for_status()
            text = await _body(response)
        lines = "\n".join(line for line in text.splitlines() if line.startswith(prefix))
        return [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        logger.debug("%s does not tell its metrics: %r", pod["metadata"]["name"], error)
        return None


async def _body(response: aiohttp.ClientResponse) -> str:
    """Return an answer's text.

    Raises:
        ValueError: it is too long, or no UTF-8.
    """
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > ANSWER_LIMIT_BYTES:
            raise ValueError(f"its answer has more than {ANSWER_LIMIT_BYTES} bytes")
    return body.decode()
