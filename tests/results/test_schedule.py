"""Two cells at a time; a failure takes along what needs it and nothing else."""

import threading
import time

from dev.results import schedule
from dev.results.budget import Kind, Price
from dev.results.cells import Cell

SHORT, LONG = Price(Kind.PRUNE), Price(Kind.PRETRAIN, 100, 2)


class Diary:
    """What ran beside what."""

    def __init__(self):
        self.lock, self.running, self.most, self.order, self.beside = threading.Lock(), set(), 0, [], {}

    def cell(self, name, *needs, price=SHORT, alone=False, error=None):
        def work():
            with self.lock:
                self.running.add(name)
                self.most = max(self.most, len(self.running))
                self.order.append(name)
            time.sleep(0.02)
            with self.lock:
                self.beside[name] = self.running - {name}
                self.running.remove(name)
            if error:
                raise error

        return Cell(name, price, work, needs, alone)


def cells(*each):
    return {cell.name: cell for cell in each}


def run(*each):
    return schedule.run(cells(*each), lambda _: None)


def test_two_run_at_a_time_and_each_after_what_it_needs():
    diary = Diary()
    ended = run(diary.cell("a"), diary.cell("b"), diary.cell("c"), diary.cell("d", "a", "c"))
    assert diary.most == 2
    assert diary.order.index("d") > max(diary.order.index("a"), diary.order.index("c"))
    assert set(ended.seconds) == {"a", "b", "c", "d"}


def test_what_a_long_cell_waits_for_is_begun_first():
    diary = Diary()
    each = [diary.cell(name) for name in ("a", "b", "z")]
    run(*each, diary.cell("long", "z", price=LONG))
    assert diary.order[0] == "z"


def test_what_measures_time_runs_alone_and_last():
    diary = Diary()
    run(diary.cell("timed", alone=True), diary.cell("timed too", alone=True), *(diary.cell(name) for name in "abc"))
    assert diary.beside["timed"] == diary.beside["timed too"] == set()
    assert set(diary.order[3:]) == {"timed", "timed too"}


def test_a_failure_takes_along_what_needs_it_and_nothing_else():
    diary = Diary()
    ended = run(
        diary.cell("a", error=RuntimeError("no memory")),
        diary.cell("b", "a"),
        diary.cell("c", "b"),
        diary.cell("d"),
        diary.cell("e", "d", error=SystemExit("ended")),
    )
    assert ended.failed == {"a": "RuntimeError: no memory", "e": "SystemExit: ended"}
    assert ended.skipped == {"b": "a", "c": "b"}
    assert set(ended.seconds) == {"d"}


def test_the_estimate_is_of_two_at_a_time_and_of_one_where_a_cell_is_alone():
    diary = Diary()
    one = SHORT.seconds
    each = [diary.cell(name) for name in "abcd"]
    assert schedule.estimate(cells(*each)) == 2 * one
    assert schedule.estimate(cells(*each, diary.cell("t", alone=True), diary.cell("u", alone=True))) == 4 * one
    assert schedule.estimate(cells(each[0], diary.cell("x", "a"), diary.cell("y", "x"))) == 3 * one
