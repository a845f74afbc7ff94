"""Real HTTP servers on loopback addresses stand for pods: what is tested is what is asked and what becomes of it."""

import asyncio
import math
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from osprey_operator.live import LiveMonitor
from osprey_operator.state import StageProgress

DRAFTER = "drafter-uid"


class Pods:
    """Pods, each at a loopback address of its own with one port for all; `tell` sets what one answers."""

    def __init__(self):
        self.port = 0
        self._stack = AsyncExitStack()
        self._answers = {}
        self.asked = []
        self.asked_thrice = asyncio.Event()

    async def start(self, count):
        for index in range(count):
            address = f"127.77.0.{index + 1}"
            app = web.Application()
            app.router.add_get("/metrics", self._answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            self._stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, address, self.port)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self):
        await self._stack.aclose()

    async def _answer(self, request):
        address = request.transport.get_extra_info("sockname")[0]
        self.asked.append(address)
        if len(self.asked) == 3:
            self.asked_thrice.set()
        answer = self._answers.get(address)
        if answer is None:
            raise web.HTTPServiceUnavailable
        if callable(answer):
            return await answer(request)
        return web.Response(text=answer)

    def tell(self, index, text):
        self._answers[f"127.77.0.{index + 1}"] = text

    def server(self, index=0, *, owner=DRAFTER, drafter="d1", uid=None, created="2026-01-01T00:00:00Z"):
        labels = {"app.kubernetes.io/component": "server", "osprey.dev/owner-uid": owner, "osprey.dev/drafter": drafter}
        return self._pod(index, labels, uid, created)

    def stage(self, job_uid, index=0, *, completion=None, phase="Running"):
        labels = {"app.kubernetes.io/component": "stage", "batch.kubernetes.io/controller-uid": job_uid}
        if completion is not None:
            labels["batch.kubernetes.io/job-completion-index"] = str(completion)
        return self._pod(index, labels, None, "2026-01-01T00:00:00Z", phase)

    def _pod(self, index, labels, uid, created, phase="Running"):
        return {
            "metadata": {
                "name": f"pod-{index}",
                "uid": uid or f"pod-{index}",
                "labels": labels,
                "creationTimestamp": created,
            },
            "status": {"podIP": f"127.77.0.{index + 1}", "phase": phase},
        }


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
async def pods():
    pods = Pods()
    await pods.start(3)
    yield pods
    await pods.stop()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def monitor(pods, clock):
    return LiveMonitor(timeout_seconds=2, stage_port=pods.port, server_port=pods.port, clock=clock)


@pytest.fixture
def step(monitor, clock):
    """Ten seconds later, ask these pods."""

    async def step(*found, seconds=10):
        clock.now += seconds
        monitor.observe(found)
        await monitor.poll()

    return step


def counters(tokens=None, steps=None, realtime=None, *, prefix="sglang:", extra=""):
    """What SGLang writes; the shape is that of a scrape of version 0.5.23."""
    labels = f'engine_type="unified",model_name="/osprey/model"{extra}'
    lines = [
        f"# HELP {prefix}generation_tokens_total Number of generation tokens processed.",
        f"# TYPE {prefix}generation_tokens_total counter",
    ]
    if tokens is not None:
        lines.append(f'{prefix}generation_tokens_total{{{labels},is_streaming="false"}} {float(tokens)}')
    if steps is not None:
        lines.append(f"{prefix}spec_verify_calls_total{{{labels}}} {float(steps)}")
    if realtime is not None:
        lines.append(
            f'{prefix}realtime_tokens_total{{{labels},mode="decode",pp_rank="0",tp_rank="0"}} {float(realtime)}'
        )
        lines.append(f'{prefix}realtime_tokens_total{{{labels},mode="prefill_compute",pp_rank="0",tp_rank="0"}} 99.0')
    return "\n".join([*lines, f"{prefix}spec_accept_length{{{labels}}} 7.5", ""])


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
async def test_acceptance_is_the_growth_of_tokens_over_that_of_verify_steps(monitor, pods, step, prefix):
    pods.tell(0, counters(1000, 900, 5000, prefix=prefix))
    await step(pods.server())
    pods.tell(0, counters(1300, 1000, 5600, prefix=prefix))
    await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length == pytest.approx(3.0)
    assert traffic.verify_steps == 100
    assert traffic.tokens_per_second == pytest.approx(60.0)


async def test_all_servers_count_together(monitor, pods, step):
    both = (pods.server(0), pods.server(1))
    pods.tell(0, counters(0, 0, 0))
    pods.tell(1, counters(0, 0, 0))
    await step(*both)
    pods.tell(0, counters(100, 100, 100))
    pods.tell(1, counters(900, 300, 900))
    await step(*both)
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length == pytest.approx(2.5), "the ratio of sums, not the mean of ratios"
    assert traffic.tokens_per_second == pytest.approx(100.0)


async def test_drafters_do_not_mix(monitor, pods, step):
    both = (pods.server(0, owner="a"), pods.server(1, owner="b"))
    for index in (0, 1):
        pods.tell(index, counters(0, 0, 0))
    await step(*both)
    pods.tell(0, counters(30, 10, 0))
    pods.tell(1, counters(20, 10, 0))
    await step(*both)
    assert monitor.traffic("a").acceptance_length == pytest.approx(3.0)
    assert monitor.traffic("b").acceptance_length == pytest.approx(2.0)


async def test_what_was_counted_before_the_first_answer_is_not_traffic(monitor, pods, step):
    pods.tell(0, counters(1_000_000, 10, 1_000_000))
    await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert (traffic.verify_steps, traffic.acceptance_length, traffic.tokens_per_second) == (0, None, None)


async def test_a_server_that_restarts_begins_anew(monitor, pods, step):
    pods.tell(0, counters(1000, 400, 1000))
    await step(pods.server())
    pods.tell(0, counters(50, 400, 10))  # a restart: tokens fell, and the verify steps just reached their old value
    await step(pods.server())
    assert monitor.traffic(DRAFTER).verify_steps == 0
    assert monitor.traffic(DRAFTER).tokens_per_second is None
    pods.tell(0, counters(150, 450, 110))
    await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length == pytest.approx(2.0)
    assert traffic.tokens_per_second == pytest.approx(10.0)


async def test_a_new_pod_begins_anew(monitor, pods, step):
    pods.tell(0, counters(1000, 400, 1000))
    await step(pods.server(uid="old"))
    pods.tell(0, counters(5000, 600, 5000))
    await step(pods.server(uid="new"))
    assert monitor.traffic(DRAFTER).verify_steps == 0


async def test_a_missing_series_is_unknown_and_not_zero(monitor, pods, step):
    for tokens in (100, 300):  # a server without a drafter: no verify steps at all
        pods.tell(0, counters(tokens, None, None))
        await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length is None
    assert traffic.tokens_per_second is None
    pods.tell(0, counters(500, 100, None))  # the first verify steps appear: how many before is not known
    await step(pods.server())
    assert monitor.traffic(DRAFTER).acceptance_length is None


async def test_the_first_requests_of_a_server_count_in_full(monitor, pods, step):
    pods.tell(0, counters(None, None, None))  # SGLang has no such series until a request has finished
    await step(pods.server())
    pods.tell(0, counters(200, 100, 250))
    await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert (traffic.acceptance_length, traffic.verify_steps) == (pytest.approx(2.0), 100)
    assert traffic.tokens_per_second == pytest.approx(25.0)


async def test_an_answer_without_any_series_of_sglang_is_none(monitor, pods, step):
    pods.tell(0, "process_cpu_seconds_total 1.0\n")
    await step(pods.server())
    pods.tell(0, counters(200, 100, 250))
    await step(pods.server())
    assert monitor.traffic(DRAFTER).verify_steps == 0


async def test_an_idle_server_has_no_acceptance_and_no_speed(monitor, pods, step):
    for _ in range(3):
        pods.tell(0, counters(100, 50, 100))
        await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length is None
    assert traffic.tokens_per_second == 0.0


async def test_the_window_slides(monitor, pods, step, clock):
    pods.tell(0, counters(0, 0, 0))
    await step(pods.server())
    pods.tell(0, counters(100, 100, 100))
    await step(pods.server())
    pods.tell(0, counters(400, 200, 400))
    await step(pods.server(), seconds=100)
    assert monitor.traffic(DRAFTER, window_seconds=1000).acceptance_length == pytest.approx(2.0)
    assert monitor.traffic(DRAFTER, window_seconds=50).acceptance_length == pytest.approx(3.0)
    clock.now += 2000
    traffic = monitor.traffic(DRAFTER, window_seconds=1000)
    assert (traffic.acceptance_length, traffic.tokens_per_second) == (None, None)


async def test_a_pod_that_does_not_answer_loses_nothing(monitor, pods, step):
    pods.tell(0, counters(0, 0, 0))
    await step(pods.server())
    pods.tell(0, None)  # 503
    await step(pods.server())
    pods.tell(0, counters(300, 100, 300))
    await step(pods.server())
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length == pytest.approx(3.0)
    assert traffic.tokens_per_second == pytest.approx(15.0), "300 tokens in the 20 s since the last answer"


async def test_traffic_of_the_drafter_before_is_not_counted_for_the_next(monitor, pods, step):
    old = pods.server(0, drafter="d1")
    pods.tell(0, counters(0, 0, 0))
    await step(old)
    pods.tell(0, counters(110, 100, 110))  # the old drafter's acceptance is 1.1
    await step(old)
    assert monitor.traffic(DRAFTER).acceptance_length == pytest.approx(1.1)

    new = pods.server(1, drafter="d2", created="2026-01-01T01:00:00Z")
    pods.tell(0, counters(220, 200, 220))
    pods.tell(1, counters(0, 0, 0))
    await step(old, new)
    assert monitor.traffic(DRAFTER).acceptance_length is None
    pods.tell(0, counters(330, 300, 330))
    pods.tell(1, counters(300, 100, 300))
    await step(old, new)
    traffic = monitor.traffic(DRAFTER)
    assert traffic.acceptance_length == pytest.approx(3.0)
    assert traffic.tokens_per_second == pytest.approx(11 + 30), "the old servers still speak"


async def test_parallel_ranks_tell_the_same_tokens_and_data_parallel_ones_do_not(monitor, pods, step):
    def ranks(tokens):
        line = 'sglang:realtime_tokens_total{{mode="decode",dp_rank="{}",tp_rank="{}"}} {}'
        return "\n".join(line.format(dp, tp, tokens) for dp in (0, 1) for tp in (0, 1)) + "\n"

    pods.tell(0, ranks(0.0))
    await step(pods.server())
    pods.tell(0, ranks(100.0))
    await step(pods.server())
    assert monitor.traffic(DRAFTER).tokens_per_second == pytest.approx(20.0)


async def test_ready_servers_that_nobody_hears_are_told_of_once(pods, step, caplog):
    server = pods.server()
    await step(server)
    assert not caplog.messages
    server["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    await step(server)
    await step(server)
    [message] = caplog.messages
    assert "network policy" in message
    pods.tell(0, counters(1, 1, 1))
    await step(server)
    await step(server)
    assert len(caplog.messages) == 1


async def test_nothing_outlives_its_pods(monitor, pods, step):
    pods.tell(0, counters(1, 1, 1))
    pods.tell(1, "osprey_stage_step 3\n")
    await step(pods.server(0), pods.stage("job", 1))
    assert monitor.traffic(DRAFTER) is not None
    assert monitor.stage_progress("job") is not None
    await step()
    assert monitor.traffic(DRAFTER) is None
    assert monitor.stage_progress("job") is None


STAGE = """\
# HELP osprey_stage_step Steps done.
# TYPE osprey_stage_step gauge
osprey_stage_step 120.0
osprey_stage_total_steps 400.0
osprey_stage_loss 2.5
osprey_stage_tokens_per_second 1234.5
osprey_stage_eta_seconds 33.0
osprey_stage_simulated_acceptance_length 1.7
process_cpu_seconds_total 3.0
"""


async def test_progress_of_a_stage(monitor, pods, step):
    pods.tell(0, STAGE)
    await step(pods.stage("job"))
    assert monitor.stage_progress("job") == StageProgress(120, 400, 33.0, 2.5, 1234.5, 1.7)


async def test_progress_that_a_stage_does_not_tell_is_unknown(monitor, pods, step):
    pods.tell(0, "osprey_stage_step 0\nosprey_stage_loss NaN\nosprey_stage_eta_seconds +Inf\n")
    await step(pods.stage("job"))
    assert monitor.stage_progress("job") == StageProgress(step=0)


async def test_only_the_first_pod_of_a_job_is_asked(monitor, pods, step):
    pods.tell(0, "osprey_stage_step 1\n")
    pods.tell(1, "osprey_stage_step 2\n")
    await step(pods.stage("job", 1, completion=1), pods.stage("job", 0, completion=0))
    assert monitor.stage_progress("job").step == 1
    assert pods.asked == ["127.77.0.1"]


async def test_a_pod_that_ended_is_not_asked(monitor, pods, step):
    pods.tell(0, "osprey_stage_step 1\n")
    await step(pods.stage("job", phase="Succeeded"))
    assert monitor.stage_progress("job") is None
    assert pods.asked == []


@pytest.mark.parametrize(
    "answer",
    ["osprey_stage_step {{{\n", "osprey_stage_step not-a-number\n", "\x00\x01", ""],
    ids=["broken", "no number", "binary", "empty"],
)
async def test_nonsense_is_no_progress(monitor, pods, step, answer):
    pods.tell(0, answer)
    await step(pods.stage("job"))
    told = monitor.stage_progress("job")
    assert told is None or told == StageProgress()


async def test_a_slow_pod_does_not_hold_the_others(pods, clock):
    monitor = LiveMonitor(timeout_seconds=0.3, stage_port=pods.port, server_port=pods.port, clock=clock)

    async def never(_):
        await asyncio.sleep(60)

    pods.tell(0, never)
    pods.tell(1, "osprey_stage_step 5\n")
    monitor.observe([pods.stage("slow", 0), pods.stage("quick", 1)])
    await asyncio.wait_for(monitor.poll(), timeout=10)
    assert monitor.stage_progress("quick").step == 5
    assert monitor.stage_progress("slow") is None


async def test_an_endless_answer_is_cut(monitor, pods, step):
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"osprey_stage_step 1\n" * 5000)
        return response

    pods.tell(0, endless)
    await step(pods.stage("job"))
    assert monitor.stage_progress("job") is None


async def test_pods_without_an_address_or_labels_are_left_alone(monitor, pods, step):
    pending = pods.server(0)
    del pending["status"]["podIP"]
    await step(pending, {"metadata": {"name": "x", "uid": "x"}, "status": {}})
    assert monitor.traffic(DRAFTER) is None
    assert pods.asked == []


async def test_run_asks_again_and_again(pods):
    monitor = LiveMonitor(interval_seconds=0.01, stage_port=pods.port, server_port=pods.port)
    pods.tell(0, "osprey_stage_step 1\n")
    task = asyncio.create_task(monitor.run(lambda: [pods.stage("job")]))
    await asyncio.wait_for(pods.asked_thrice.wait(), timeout=30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert monitor.stage_progress("job").step == 1


async def test_a_long_window_stays_small(monitor, pods, step):
    for index in range(200):
        pods.tell(0, counters(index * 3, index, index))
        await step(pods.server(), seconds=1)
    assert len(monitor._fleets[DRAFTER].finished) <= 21
    assert monitor.traffic(DRAFTER).acceptance_length == pytest.approx(3.0)
    assert not math.isnan(monitor.traffic(DRAFTER).tokens_per_second)
