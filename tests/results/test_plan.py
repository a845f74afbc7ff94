"""Which cells a run has, and whether they fit their time."""

from dataclasses import replace

import pytest

from dev.results import schedule
from dev.results.__main__ import figures, left
from dev.results.bench import Bench
from dev.results.budget import LIMIT_SECONDS
from dev.results.cells import Plan
from dev.results.experiments import EXPERIMENTS
from dev.results.lab import FailedError, Lab
from dev.results.recipe import TRIAL, WHOLE
from dev.results.specs import SMOLLM2, TARGETS, Judged, osprey


@pytest.fixture
def plan(tmp_path, pins):
    def of(wanted, recipe=WHOLE):
        return Plan.of(wanted, Lab(tmp_path / "lab", recipe), Bench(), pins, TARGETS[0])

    return of


def test_a_default_run_fits_its_time_on_two_cores(plan):
    assert schedule.estimate(plan(figures(EXPERIMENTS, full=False)).cells) <= LIMIT_SECONDS


def test_a_trial_takes_minutes(plan):
    cells = plan(figures(EXPERIMENTS, full=False), TRIAL).cells
    assert schedule.estimate(cells) < LIMIT_SECONDS / 2


def test_a_full_run_has_all_of_a_default_one_and_says_what_is_more(plan):
    default, full = (figures(EXPERIMENTS, full=full) for full in (False, True))
    assert set(default) < set(full)
    assert set(plan(default).cells) < set(plan(full).cells)
    lines = left(EXPERIMENTS)
    assert any("smollm2-maths-eagle3-e5-s2" in line for line in lines)
    assert any("the target alone at batch 8" in line for line in lines)


@pytest.mark.parametrize("full", [False, True])
def test_every_cell_stands_behind_what_it_needs(plan, full):
    seen = set()
    for name, cell in plan(figures(EXPERIMENTS, full=full)).cells.items():
        assert set(cell.needs) <= seen
        assert cell.price.seconds > 0
        seen.add(name)


def test_drafters_that_share_share_their_cells(plan):
    one = plan([Judged(osprey())]).cells
    two = plan([Judged(osprey()), Judged(replace(osprey(), slower=10)), Judged(osprey(), chain=8)]).cells
    assert set(two) - set(one) == {f"{kind}/{replace(osprey(), slower=10).name}" for kind in ("drafter", "judged")}
    assert f"answers/{SMOLLM2.name}" in one


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    lab = Lab(tmp_path / "lab", WHOLE)
    with lab.alone(), pytest.raises(FailedError, match="another run"), lab.alone():
        pass
    with lab.alone():  # and the first one's end lets others in
        pass
