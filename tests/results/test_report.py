"""From figures to the page."""

import json

import pytest

from dev import markdown
from dev.results.__main__ import figures, part
from dev.results.bench import Bench
from dev.results.experiments import EXPERIMENTS
from dev.results.finding import above
from dev.results.recipe import WHOLE
from dev.results.report import Report
from dev.results.schedule import Ended
from dev.results.specs import Judged, eagle3, osprey
from dev.results.statistics import Interval


def report(bench, **ended):
    return Report([part(each, bench) for each in EXPERIMENTS], WHOLE, Ended(**ended), [], "a machine", bench.costs())


@pytest.mark.parametrize("full", [False, True])
def test_every_experiment_finds_its_claims_in_what_it_wanted(fill, full):
    for experiment in EXPERIMENTS:
        wanted = experiment.wanted(full=full)
        if not wanted:
            continue  # a full run's alone
        finding = experiment.found(fill(wanted))
        assert finding.claims or experiment.number == 10  # of which the paper says nothing
        assert finding.tables
        assert bool(finding.missing) <= (not full)


def test_osprey_ahead_on_every_prompt_is_the_papers_direction(fill, everything):
    found = report(fill(everything))
    (domains,) = (each.finding for each in found.parts if each.experiment.number == 1)
    assert [claim.holds for claim in domains.claims] == [True] * 4
    assert domains.claims[0].ours.value > 1


def test_what_is_missing_is_said_and_the_others_are_there(fill, everything):
    lost = osprey("maths")
    kept = [figure for figure in everything if figure.drafter not in {lost, eagle3(seed=1), eagle3(seed=2)}]
    found = report(fill(kept), failed={f"drafter/{lost.name}": "no memory"})
    text = found.markdown()
    assert "Not measured: not one seed was trained on all domains." in text
    assert json.loads(found.json())["failed"] == {f"drafter/{lost.name}": "no memory"}
    assert {each.experiment.number for each in found.parts if each.finding} == set(range(2, 12))


def test_nothing_measured_is_a_page_too():
    text = report(Bench()).markdown()
    assert text.count("Not measured") == len(EXPERIMENTS)


def test_the_page_and_its_pictures_are_the_same_every_time(fill, everything, tmp_path):
    first, second = report(fill(everything)), report(fill(everything))
    assert first.markdown() == second.markdown()
    assert first.json() == second.json()
    first.write_pictures(tmp_path / "a")
    second.write_pictures(tmp_path / "b")
    (tmp_path / "a" / "shown-no-more.svg").touch()
    first.write_pictures(tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["amount.svg", "blocks.svg", "chains.svg", "serving.svg", "stage2.svg", "time.svg"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert f"results/{name}" in first.markdown()


def test_a_direction_is_decided_by_the_whole_interval():
    assert above(Interval(1.2, 1.1, 1.3, 8), 1) is True
    assert above(Interval(0.8, 0.7, 0.9, 8), 1) is False
    assert above(Interval(1.2, 0.9, 1.3, 8), 1) is None


def test_a_table_of_markdown():
    assert markdown.table([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_figures_are_wanted_once():
    wanted = figures(EXPERIMENTS, full=False)
    assert len(wanted) == len(set(wanted))
    assert Judged(osprey()) in wanted
