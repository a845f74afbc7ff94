"""A work queue: every key once, one worker a key, several keys at once, later again, and more slowly after errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Key:
    """A resource to look at."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        """Write it as kubectl does."""
        return f"{self.kind.lower()}/{self.name} in {self.namespace}"


Work = Callable[[Key], Awaitable[float | None]]
"""Looks at a resource; returns the seconds after which to look again, or None."""


class WorkQueue:
    """Runs `work` for every key that is added.

    A key that is added while it is worked on is worked on once more afterwards. An exception is logged, and the key
    comes back after `base_delay` seconds, doubling with each exception in a row up to `max_delay`. An `expected` one,
    such as an API server that is away, is logged in one line.
    """

    def __init__(
        self,
        work: Work,
        *,
        workers: int,
        base_delay: float = 1.0,
        max_delay: float = 300.0,
        expected: tuple[type[Exception], ...] = (),
    ) -> None:
        self._work = work
        self._workers = workers
        self._base_delay = base_delay
        self._max_delay = max_delay
        self._expected = expected
        self._ready: dict[Key, None] = {}  # a set that keeps its order
        self._running: dict[Key, float] = {}  # when each began
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._ended_at: float | None = None
        self._wake = asyncio.Condition()
        self._wakers: set[asyncio.Task[None]] = set()

    def add(self, key: Key) -> None:
        """Look at a key as soon as a worker is free."""
        self._cancel_timer(key)
        if key in self._running:
            self._again.add(key)
            return
        self._ready[key] = None
        waker = asyncio.ensure_future(self._notify())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    def add_after(self, key: Key, seconds: float) -> None:
        """Look at a key later, unless something makes it sooner."""
        self._cancel_timer(key)
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    def depth(self) -> int:
        """Return how many keys wait for a worker."""
        return len(self._ready)

    def longest_pass(self) -> float:
        """Return for how many seconds the oldest pass has been running; 0 where none is."""
        now = asyncio.get_running_loop().time()
        return max((now - began for began in self._running.values()), default=0.0)

    def last_pass_age(self) -> float | None:
        """Return how many seconds ago a pass ended; None: none did yet."""
        now = asyncio.get_running_loop().time()
        return None if self._ended_at is None else round(now - self._ended_at, 1)

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _worker(self) -> None:
        while True:
            async with self._wake:
                await self._wake.wait_for(lambda: self._ready)
                key = next(iter(self._ready))
                del self._ready[key]
                self._running[key] = asyncio.get_running_loop().time()
            failed = False
            delay: float | None = None
            try:
                delay = await self._work(key)
                self._failures.pop(key, None)
            except Exception as error:
                failed = True
                count = self._failures.get(key, 0)
                self._failures[key] = count + 1
                delay = min(self._base_delay * 2.0 ** min(count, 30), self._max_delay)
                logger.log(
                    logging.WARNING if isinstance(error, self._expected) else logging.ERROR,
                    "%s: the pass failed, the next one is in %.0f s: %r",
                    key,
                    delay,
                    error,
                    exc_info=None if isinstance(error, self._expected) else error,
                )
            finally:
                del self._running[key]
                self._ended_at = asyncio.get_running_loop().time()
            again = key in self._again
            self._again.discard(key)
            if again and not failed:
                self.add(key)
            elif delay is not None and key not in self._ready:
                self.add_after(key, delay)

    async def _notify(self) -> None:
        async with self._wake:
            self._wake.notify()

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
