"""Means over prompts, compared by a paired bootstrap over prompts.

Several runs (seeds, domains that were trained on) are averaged prompt by prompt first: what is drawn again is the
prompt, on which all of them were measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dev.results.bench import Answer, MissingError

SAMPLES = 10_000
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with the 95 % interval of a bootstrap over prompts."""

    value: float
    low: float
    high: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def lengths(runs: Sequence[Sequence[Answer]]) -> Values:
    """Return each prompt's acceptance length as the mean over runs; not a number where no run made a verify step.

    Args:
        runs: of the same prompts in the same order.
    """
    rows = np.array([[answer.acceptance_length for answer in run] for run in runs])
    counted = ~np.isnan(rows)
    with np.errstate(invalid="ignore"):
        found: Values = np.where(counted, rows, 0).sum(0) / counted.sum(0)
    return found


def mean(values: Values) -> Interval:
    """Return the mean over prompts."""
    return _interval([values], lambda each: each[0])


def ratio(ours: Values, theirs: Values) -> Interval:
    """Return the mean of the first over that of the second."""
    return _interval([ours, theirs], lambda each: each[0] / each[1])


def difference(ours: Values, theirs: Values) -> Interval:
    """Return the mean of the first less that of the second."""
    return _interval([ours, theirs], lambda each: each[0] - each[1])


def difference_of_differences(a: Values, b: Values, c: Values, d: Values) -> Interval:
    """Return (a - b) - (c - d), of means."""
    return _interval([a, b, c, d], lambda each: each[0] - each[1] - each[2] + each[3])


def _interval(columns: Sequence[Values], figure: Callable[[Values], Values]) -> Interval:
    """Resample prompts; one that any column lacks is left out of all.

    Raises:
        ValueError: the columns are of different prompts.
        MissingError: none is left.
    """
    if len({len(column) for column in columns}) != 1:
        raise ValueError("not the same prompts: their acceptance lengths cannot be compared")
    table = np.array(columns)
    table = table[:, ~np.isnan(table).any(0)]
    count = table.shape[1]
    if not count:
        raise MissingError("no prompt has a verify step in all runs")
    drawn = np.random.default_rng(0).integers(count, size=(SAMPLES, count))
    low, high = np.quantile(figure(table[:, drawn].mean(-1)), (0.025, 0.975))
    return Interval(float(figure(table.mean(-1))), float(low), float(high), count)
