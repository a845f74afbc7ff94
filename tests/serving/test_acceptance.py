"""Acceptance length and its parts, from histograms made by hand."""

import pytest

from osprey_serving.acceptance import (
    Counted,
    acceptance_by_position,
    corpus_acceptance_length,
    first_divergence,
    mean_acceptance_length,
)


def test_the_mean_is_over_answers_and_the_corpus_ratio_over_tokens():
    answers = [Counted(10, 5), Counted(90, 30)]
    assert mean_acceptance_length(answers) == pytest.approx((2 + 3) / 2)
    assert corpus_acceptance_length(answers) == pytest.approx(100 / 35)


def test_an_answer_without_a_verify_step_is_no_acceptance_length_of_one():
    answers = [Counted(9, 3), Counted(1, 0)]
    assert mean_acceptance_length(answers) == 3
    assert corpus_acceptance_length(answers) == pytest.approx(10 / 3)  # as the server's own counters give it


@pytest.mark.parametrize("length", [mean_acceptance_length, corpus_acceptance_length])
@pytest.mark.parametrize("answers", [[], [Counted(1, 0)]])
def test_without_any_verify_step_there_is_no_figure(length, answers):
    with pytest.raises(ValueError, match="no answer has a verify step"):
        length(answers)


def test_a_position_counts_the_steps_that_accepted_at_least_so_many():
    # 4 steps accepted nothing, 3 one draft, 2 two, 1 three.
    assert acceptance_by_position([[4, 3, 2, 1]], 3) == pytest.approx((6 / 10, 3 / 10, 1 / 10))


def test_histograms_of_answers_are_added_whatever_their_length():
    histograms = [[1], [0, 1], [0, 0, 0, 0, 0, 2]]
    assert acceptance_by_position(histograms, 5) == pytest.approx((3 / 4, 2 / 4, 2 / 4, 2 / 4, 2 / 4))


def test_the_share_of_positions_and_the_acceptance_length_tell_the_same():
    """Without the prefill's token, and where no answer was cut: accepted drafts and a bonus token a step."""
    histogram = [4, 3, 2, 1]
    steps, tokens = sum(histogram), sum((accepted + 1) * count for accepted, count in enumerate(histogram))
    shares = acceptance_by_position([histogram], 3)
    assert corpus_acceptance_length([Counted(tokens, steps)]) == pytest.approx(1 + sum(shares))


def test_no_verify_step_has_no_shares():
    with pytest.raises(ValueError, match="no answer has a verify step"):
        acceptance_by_position([[], [0, 0]], 5)


@pytest.mark.parametrize(
    ("output", "reference", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2, 3], 3),
        ([], [1], 0),
    ],
)
def test_the_first_divergence(output, reference, position):
    assert first_divergence(output, reference) == position
