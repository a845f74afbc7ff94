"""The demonstration's arithmetic."""

import random

import pytest

from dev.demo.prompts import DOMAINS, prompts
from dev.demo.report import Request, acceptance_ratio, table


def request(number, steps, tokens=96):
    return Request("maths", (number,), tokens, steps)


def test_the_ratio_is_of_means_over_requests():
    ours = [request(0, 32), request(1, 48)]  # 3 and 2
    theirs = [request(0, 48), request(1, 96)]  # 2 and 1
    assert acceptance_ratio(ours, theirs).value == pytest.approx(2.5 / 1.5)


def test_a_request_without_a_verify_step_is_left_out_of_both():
    ratio = acceptance_ratio([request(0, 48), request(1, 0, 1)], [request(0, 48), request(1, 96)])
    assert (ratio.value, ratio.prompts) == (1, 1)


def test_other_prompts_are_refused():
    with pytest.raises(ValueError, match="different prompts"):
        acceptance_ratio([request(0, 48)], [request(1, 48)])


def test_the_interval_holds_the_truth_and_pairs_prompts():
    # Prompts differ far more than drafters do: unpaired, the interval would be wider than the effect.
    rng = random.Random(1)
    steps = [rng.randint(20, 90) for _ in range(100)]
    ours = [request(i, s) for i, s in enumerate(steps)]
    theirs = [request(i, round(s * 1.1)) for i, s in enumerate(steps)]
    ratio = acceptance_ratio(ours, theirs)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.value == pytest.approx(1.1, abs=0.01)
    assert ratio.high - ratio.low < 0.02
    assert acceptance_ratio(ours, theirs) == ratio


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_are_different_and_the_same_every_time(domain):
    some = prompts(domain, 200)
    assert len(set(some)) == 200
    assert some == prompts(domain, 200)
    assert some != prompts(domain, 200, seed=1)


def test_more_prompts_than_the_templates_give_are_refused():
    with pytest.raises(ValueError, match="has only"):
        prompts("letters", 100_000)


def test_a_table_is_aligned():
    assert table([["a", "b"], ["long", "1.0"]]).splitlines() == ["a       b", "---------", "long  1.0"]
