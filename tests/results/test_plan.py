"""Which cells a run has, and whether they fit their time."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from dev.results import schedule
from dev.results.__main__ import figures, find, left
from dev.results.bench import Bench
from dev.results.budget import LIMIT_SECONDS
from dev.results.cells import Plan
from dev.results.data import HELD_OUT
from dev.results.experiments import EXPERIMENTS
from dev.results.lab import FailedError, Lab
from dev.results.recipe import TRIAL, WHOLE
from dev.results.specs import SMOLLM2, TARGETS, Backbone, Judged, osprey
from osprey_api.stages import ArtifactRef, ConvertConfig, DistilConfig, Outcome, PretrainConfig


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
    lines = left(EXPERIMENTS, Bench())
    assert any("smollm2-maths-eagle3-e7-s2" in line for line in lines)
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


def test_an_option_shapes_the_config_that_has_it(plan, monkeypatch):
    configs = []

    def found(_self, _name, config, inputs):
        del inputs
        configs.append(config)
        return Outcome(artifact=ArtifactRef(uri="file:///x", digest="sha256:" + "0" * 64))

    monkeypatch.setattr(Lab, "run", found)
    backbone = Backbone(options=(("loss_vocab_size", None), ("warmup_ratio", 0.3)))
    drafter = replace(osprey(), backbone=backbone, options=(("loss", "LKLambda"), ("draft_vocab_size", None)))
    made = plan([Judged(drafter)])
    made.bench.answers |= {(SMOLLM2, name): found(None, "", None, {}) for name in (drafter.domain, HELD_OUT)}
    for name in made.cells:
        if not name.startswith(("answers", "judged")):
            made.cells[name].work()
    pretrain, convert, distil = (
        next(config for config in configs if isinstance(config, kind))
        for kind in (PretrainConfig, ConvertConfig, DistilConfig)
    )
    assert (pretrain.loss_vocab_size, pretrain.optimization.warmup_ratio) == (None, 0.3)
    assert (convert.draft_vocab_size, distil.loss, distil.optimization.warmup_ratio) == (None, "LKLambda", 0.04)
    with pytest.raises(ValidationError, match="no_such_field"):
        plan([Judged(replace(drafter, options=(("no_such_field", 1),)))])


def test_what_was_not_made_before_is_not_made_where_figures_are_only_found(tmp_path, pins):
    lab = Lab(tmp_path / "lab", WHOLE)
    bench = Bench()
    with lab.alone():
        assert find(EXPERIMENTS, lab, bench, pins) == {}
    assert bench == Bench()
    assert not list((tmp_path / "lab").rglob("log"))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    lab = Lab(tmp_path / "lab", WHOLE)
    with lab.alone(), pytest.raises(FailedError, match="another run"), lab.alone():
        pass
    with lab.alone():  # and the first one's end lets others in
        pass
