"""The arithmetic behind every interval."""

import math

import numpy as np
import pytest

from dev.results import statistics
from dev.results.bench import Answer, MissingError


def run(*steps, tokens=96):
    return [Answer("maths", tokens, each) for each in steps]


def test_several_runs_are_averaged_prompt_by_prompt():
    found = statistics.lengths([run(96, 48), run(48, 0)])
    assert found.tolist() == [1.5, 2.0]  # the second prompt's other run made no verify step


def test_a_prompt_without_a_verify_step_in_any_run_is_left_out():
    ours, theirs = statistics.lengths([run(32, 0)]), statistics.lengths([run(48, 48)])
    assert math.isnan(ours[1])
    found = statistics.ratio(ours, theirs)
    assert (found.value, found.prompts) == (pytest.approx(1.5), 1)


def test_figures_are_of_means():
    ours, theirs = np.array([3.0, 2.0]), np.array([2.0, 1.0])
    assert statistics.mean(ours).value == 2.5
    assert statistics.ratio(ours, theirs).value == pytest.approx(2.5 / 1.5)
    assert statistics.difference(ours, theirs).value == 1
    assert statistics.difference_of_differences(ours, theirs, ours, ours).value == 1


def test_the_interval_pairs_prompts_and_is_the_same_every_time():
    rng = np.random.default_rng(1)
    theirs = rng.uniform(1, 4, 100)
    found = statistics.ratio(theirs * rng.uniform(1.05, 1.15, 100), theirs)
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.02  # unpaired it would be wider than the effect
    assert statistics.ratio(theirs, theirs) == statistics.Interval(1, 1, 1, 100)


def test_other_prompts_are_refused():
    with pytest.raises(ValueError, match="not the same prompts"):
        statistics.ratio(np.ones(3), np.ones(4))
    with pytest.raises(MissingError, match="no prompt"):
        statistics.mean(np.array([math.nan]))
