"""What an experiment found, before it is written down."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dev.plots import Plot
from dev.results.bench import Bench
from dev.results.specs import Wanted
from dev.results.statistics import Interval


@dataclass(frozen=True)
class Table:
    """Rows of words, the first of them the head."""

    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """One of the paper's statements, and ours beside it.

    Attributes:
        text: what is claimed, in a few words.
        paper: its figure as the paper gives it.
        ours: the same of our models.
        holds: whether ours has the same direction: the interval lies on that side. None: it reaches over.
        directed: the paper gives a direction.
    """

    text: str
    paper: str
    ours: Interval
    holds: bool | None = None
    directed: bool = True

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.directed:
            return "–"
        return {True: "yes", False: "no", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Finding:
    """An experiment's figures.

    Attributes:
        claims: the first of them is the experiment's own.
        why: what explains likeness or difference.
        missing: figures that were not measured, for whatever reason.
    """

    claims: Sequence[Claim]
    tables: Sequence[Table]
    why: str
    plots: Sequence[Plot] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    missing: Sequence[str] = ()


class Experiment(Protocol):
    """One of the paper's claims, as it is tried here."""

    @property
    def number(self) -> int:
        """Of the list in the documentation."""

    @property
    def title(self) -> str:
        """In a few words."""

    @property
    def setting(self) -> str:
        """What is done, in some sentences."""

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return the figures that it needs."""

    def found(self, bench: Bench) -> Finding:
        """Return what the figures say.

        Raises:
            MissingError: those that it cannot do without were not measured.
        """


def above(interval: Interval, threshold: float) -> bool | None:
    """Say whether a figure is above a threshold: None where its interval holds it."""
    if interval.low > threshold:
        return True
    return False if interval.high < threshold else None


def whole(value: float) -> str:
    """Return a number of seconds for a table."""
    return "not known" if math.isnan(value) else f"{value:.0f}"


def number(value: float) -> str:
    """Return a figure for a table."""
    return f"{value:.3f}"
