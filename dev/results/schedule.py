"""Runs cells two at a time, those that the most depends on first; what measures time runs alone, last.

A cell that fails takes along what needs it, and nothing else.
"""

import heapq
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from dev.results.cells import Cell

WORKERS = 2


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        seconds: by cell, those that went well.
        failed: by cell, why.
        skipped: by cell, the one that it needed.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def tails(cells: Mapping[str, Cell]) -> dict[str, float]:
    """Return for each cell the seconds of the longest chain of cells that begins with it."""
    found: dict[str, float] = {}
    # Cells stand behind those that they need, so backwards each comes before them.
    for name, cell in reversed(list(cells.items())):
        found[name] = max(found.get(name, 0.0), 0.0) + cell.price.seconds
        for need in cell.needs:
            found[need] = max(found.get(need, 0.0), found[name])
    return found


def ready(cells: Mapping[str, Cell], waiting: set[str], done: set[str], tail: Mapping[str, float]) -> list[str]:
    """Return the cells that may begin, in the order in which they should; those that run alone are last."""
    free = [name for name in waiting if all(need in done for need in cells[name].needs)]
    return sorted(free, key=lambda name: (cells[name].alone, -tail[name], name))


def estimate(cells: Mapping[str, Cell], *, workers: int = WORKERS) -> float:
    """Return the seconds from nothing."""
    tail = tails(cells)
    waiting, done = set(cells), set[str]()
    running: list[tuple[float, str]] = []
    now = 0.0
    while waiting or running:
        for name in ready(cells, waiting, done, tail):
            if len(running) == workers or (cells[name].alone and running):
                break
            waiting.remove(name)
            heapq.heappush(running, (now + cells[name].price.seconds, name))
            if cells[name].alone:
                break
        now, name = heapq.heappop(running)
        done.add(name)
    return now


def run(cells: Mapping[str, Cell], say: Callable[[str], None], *, workers: int = WORKERS) -> Ended:
    """Run all cells, and return how they ended.

    Raises:
        KeyboardInterrupt: the run was stopped; whoever catches it ends the processes.
    """
    ended = Ended()
    tail = tails(cells)
    waiting, done = set(cells), set[str]()
    running: dict[Future[float], str] = {}
    pool = ThreadPoolExecutor(workers)
    try:
        while waiting or running:
            for name in ready(cells, waiting, done, tail):
                alone = any(cells[each].alone for each in running.values())
                if len(running) == workers or alone or (cells[name].alone and running):
                    break
                waiting.remove(name)
                running[pool.submit(_timed, cells[name])] = name
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                name = running.pop(future)
                error = future.exception()
                if error is None:
                    done.add(name)
                    ended.seconds[name] = future.result()
                    say(f"{name}: {future.result():.0f} s ({len(done)} of {len(cells)})")
                else:
                    ended.failed[name] = f"{type(error).__name__}: {error}"
                    say(f"{name} FAILED: {error}")
                    _skip(cells, name, waiting, ended)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return ended


def _timed(cell: Cell) -> float:
    began = time.monotonic()
    cell.work()
    return time.monotonic() - began


def _skip(cells: Mapping[str, Cell], lost: str, waiting: set[str], ended: Ended) -> None:
    for name in [name for name in waiting if lost in cells[name].needs]:
        if name in waiting:
            waiting.remove(name)
            ended.skipped[name] = lost
            _skip(cells, name, waiting, ended)
