import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from osprey_operator.queue import Key, WorkQueue

A, B, C = (Key("Kind", "ns", name) for name in "abc")


@asynccontextmanager
async def running(work, **options):
    queue = WorkQueue(work, **{"workers": 4, "base_delay": 0.01, "max_delay": 0.05, **options})
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_key_that_is_added_often_is_worked_on_once():
    seen = []

    async def work(key):
        seen.append(key)

    async with running(work) as queue:
        for _ in range(5):
            queue.add(A)
        queue.add(B)
        assert queue.depth() == 2
        await asyncio.sleep(0.05)
    assert seen == [A, B]


async def test_a_key_has_one_worker_at_a_time_and_is_not_forgotten():
    active, most, count = 0, 0, 0

    async def work(_):
        nonlocal active, most, count
        active += 1
        most = max(most, active)
        count += 1
        await asyncio.sleep(0.02)
        active -= 1

    async with running(work) as queue:
        queue.add(A)
        await asyncio.sleep(0.01)
        queue.add(A)
        queue.add(A)
        await asyncio.sleep(0.1)
    assert (most, count) == (1, 2)


async def test_keys_run_side_by_side_as_far_as_there_are_workers():
    started = []
    release = asyncio.Event()

    async def work(key):
        started.append(key)
        await release.wait()

    async with running(work, workers=2) as queue:
        for key in (A, B, C):
            queue.add(key)
        await asyncio.sleep(0.02)
        assert started == [A, B]
        assert queue.longest_pass() > 0.01
        release.set()
        await asyncio.sleep(0.02)
        assert started == [A, B, C]
        assert queue.longest_pass() == 0
        assert queue.last_pass_age() < 1


async def test_work_can_ask_to_be_done_again_and_events_make_it_sooner():
    times = []
    loop = asyncio.get_running_loop()

    async def work(_):
        times.append(loop.time())
        return 0.05 if len(times) == 1 else None

    async with running(work) as queue:
        queue.add(A)
        await asyncio.sleep(0.1)
        assert len(times) == 2
        assert times[1] - times[0] >= 0.045
        queue.add_after(A, 60)
        queue.add(A)
        await asyncio.sleep(0.02)
        assert len(times) == 3


async def test_errors_slow_a_key_down_and_a_success_forgives(caplog):
    times = []
    loop = asyncio.get_running_loop()

    async def work(_):
        times.append(loop.time())
        if len(times) < 5:
            raise ValueError("no")

    async with running(work) as queue:
        queue.add(A)
        await asyncio.sleep(0.3)
        assert len(times) == 5
        waits = [after - before for before, after in pairwise(times)]
        for wait, least in zip(waits, (0.01, 0.02, 0.04, 0.05), strict=True):
            assert wait >= least * 0.9
        queue.add(A)
        await asyncio.sleep(0.02)
        assert len(times) == 6
    assert all(record.exc_info for record in caplog.records)


async def test_an_expected_error_is_one_line(caplog):
    async def work(_):
        raise TimeoutError("the API server is away")

    async with running(work, expected=(TimeoutError,)) as queue:
        queue.add(A)
        await asyncio.sleep(0.005)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].exc_info is None


async def test_an_event_during_a_failing_pass_does_not_hurry_it():
    count = 0

    async def work(key):
        nonlocal count
        count += 1
        queue.add(key)
        raise ValueError("no")

    async with running(work, base_delay=10, max_delay=10) as queue:
        queue.add(A)
        await asyncio.sleep(0.05)
    assert count == 1
