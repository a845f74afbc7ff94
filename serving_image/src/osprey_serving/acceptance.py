"""How much a drafter's proposals are worth, counted as SGLang counts.

A verify step gives the accepted drafts and one bonus token; the first token of an answer comes from the prefill
and is counted too. So acceptance length is completion tokens / verify steps, as in SGLang's own figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Counted:
    """One answer: its tokens, and the verify steps that it took (0 when its first token was its last)."""

    completion_tokens: int
    verify_steps: int


def mean_acceptance_length(answers: Sequence[Counted]) -> float:
    """Return the unweighted mean over answers of completion tokens / verify steps.

    Answers without a verify step are left out: no draft was judged, which is not an acceptance length of 1.

    Raises:
        ValueError: no answer has a verify step.
    """
    lengths = [answer.completion_tokens / answer.verify_steps for answer in answers if answer.verify_steps]
    if not lengths:
        raise ValueError("no answer has a verify step")
    return sum(lengths) / len(lengths)


def corpus_acceptance_length(answers: Sequence[Counted]) -> float:
    """Return all completion tokens / all verify steps, as a server's lifetime counters give it.

    Raises:
        ValueError: no answer has a verify step.
    """
    steps = sum(answer.verify_steps for answer in answers)
    if not steps:
        raise ValueError("no answer has a verify step")
    return sum(answer.completion_tokens for answer in answers) / steps


def acceptance_by_position(histograms: Sequence[Sequence[int]], positions: int) -> tuple[float, ...]:
    """Return the share of verify steps that accepted at least 1, 2, … `positions` drafts.

    Args:
        histograms: for each answer, the number of verify steps that accepted exactly 0, 1, 2, … drafts.
        positions: drafts in a row that a step can accept.

    Raises:
        ValueError: there is no verify step.
    """
    exactly = [0] * (positions + 1)
    for histogram in histograms:
        for accepted, steps in enumerate(histogram):
            exactly[min(accepted, positions)] += steps
    total = sum(exactly)
    if not total:
        raise ValueError("no answer has a verify step")
    return tuple(sum(exactly[position:]) / total for position in range(1, positions + 1))


def first_divergence(output: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ, or None when they are equal."""
    if list(output) == list(reference):
        return None
    same = (index for index, (a, b) in enumerate(zip(output, reference, strict=False)) if a != b)
    return next(same, min(len(output), len(reference)))
