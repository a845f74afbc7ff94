"""What several experiments ask: both methods on one domain, and the mean over some of the held-out prompts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from dev.plots import Line
from dev.results import statistics
from dev.results.bench import Bench
from dev.results.data import HELD_OUT
from dev.results.finding import number
from dev.results.specs import DOMAINS, FOCUS, LETTERS, Drafter, Judged, eagle3, osprey
from dev.results.statistics import Values


class Method(Protocol):
    """A recipe."""

    def __call__(self, domain: str = FOCUS, *, seed: int = 0) -> Drafter:
        """Return its drafter."""


OSPREY, EAGLE3 = "Osprey", "EAGLE-3"
METHODS: Mapping[str, Method] = {OSPREY: osprey, EAGLE3: eagle3}
"""Both, by their names in tables."""
COLUMNS = (*DOMAINS, LETTERS)
"""Domains of the held-out prompts."""


def values(
    bench: Bench,
    drafters: Sequence[Drafter],
    *,
    answers: str = HELD_OUT,
    chain: int = 5,
    domains: Collection[str] | None = None,
) -> Values:
    """Return each prompt's mean over drafters.

    Args:
        bench: what was measured.
        drafters: judged on the same answers.
        answers: the set of answers.
        chain: tokens drafted per verification.
        domains: of the prompts; None: all.
    """
    counts = [bench.counts(Judged(drafter, answers, chain)) for drafter in drafters]
    found = statistics.lengths(counts)
    kept = [domains is None or answer.domain in domains for answer in counts[0]]
    selected: Values = found[np.array(kept)]
    return selected


def lengths(bench: Bench, drafter: Drafter) -> list[str]:
    """Return a drafter's means for a table: of all prompts first, then of each domain of `COLUMNS`."""
    parts = (values(bench, [drafter], domains=each) for each in (None, *([domain] for domain in COLUMNS)))
    return [number(statistics.mean(part).value) for part in parts]


def line(name: str, points: dict[float, Values]) -> Line:
    """Return a line of means with their intervals."""
    means = {x: statistics.mean(each) for x, each in points.items()}
    return Line(
        name, [(x, each.value) for x, each in means.items()], [(each.low, each.high) for each in means.values()]
    )
