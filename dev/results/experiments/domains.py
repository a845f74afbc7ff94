"""Osprey against EAGLE-3 from scratch, trained on each domain and evaluated on all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dev.plots import Line, Plot
from dev.results import statistics
from dev.results.bench import Bench, MissingError
from dev.results.data import HELD_OUT
from dev.results.experiments.pairs import EAGLE3, METHODS, OSPREY
from dev.results.finding import Claim, Finding, Table, above, number, whole
from dev.results.specs import DOMAINS, LETTERS, Drafter, Judged, Wanted, eagle3, osprey
from dev.results.statistics import Interval, Values

SEEDS = (0, 1, 2)
EPOCHS = 3
LONGER = 7
"""Epochs of an EAGLE-3 drafter that has had at least as much time as Osprey."""


@dataclass(frozen=True)
class Grid:
    """A method's acceptance lengths: by domain of training and prompt, the mean over seeds."""

    values: dict[str, Values]
    domains: Sequence[str]

    def block(self, trained: Sequence[str], *, inside: bool | None) -> Values:
        """Return each prompt's mean over trainings.

        Args:
            trained: domains of training.
            inside: prompts of the training's own domain; False: of the other trained ones; None: of both.
        """
        table = np.array([self.values[domain] for domain in trained])
        own = np.array([[each == domain for each in self.domains] for domain in trained])
        grid = np.array([each in DOMAINS for each in self.domains])
        keep = grid & (np.ones_like(own) if inside is None else own == inside)
        counted = keep & ~np.isnan(table)
        with np.errstate(invalid="ignore"):
            means = np.where(counted, table, 0).sum(0) / counted.sum(0)
        found: Values = np.where(counted.any(0), means, np.nan)
        return found

    def cell(self, trained: str, evaluated: str) -> Values:
        """Return the prompts of one domain under one training."""
        found: Values = self.values[trained][[each == evaluated for each in self.domains]]
        return found

    def only(self, trained: Sequence[str], evaluated: str) -> Values:
        """Return the prompts of one domain, as the mean over trainings."""
        found: Values = np.mean([self.cell(domain, evaluated) for domain in trained], axis=0)
        return found


def grid(bench: Bench, drafters: dict[str, list[Drafter]]) -> Grid:
    """Read a method's acceptance lengths from the bench.

    Args:
        bench: what was measured.
        drafters: by domain of training, one for each seed.
    """
    runs = {domain: [bench.counts(Judged(each)) for each in seeds] for domain, seeds in drafters.items()}
    first = next(iter(runs.values()))[0]
    return Grid(
        {domain: statistics.lengths(each) for domain, each in runs.items()}, [answer.domain for answer in first]
    )


@dataclass(frozen=True)
class Domains:
    """At equal supervised tokens, and at equal time."""

    number: int = 1
    title: str = "Osprey against EAGLE-3 from scratch"
    setting: str = (
        "Drafters are trained on the target's answers of one domain, for three epochs with both methods (equal "
        "supervised tokens), and EAGLE-3 for seven as well; all are evaluated on the held-out prompts of all domains. "
        "Equal time is read between EAGLE-3's two lengths, where Osprey's time lies between theirs. The minutes of "
        "Stage 2 count for neither."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return every training on every domain; by default with one seed."""
        return [
            Judged(drafter, HELD_OUT)
            for seed in (SEEDS if full else SEEDS[:1])
            for domain in DOMAINS
            for drafter in (
                osprey(domain, seed=seed),
                eagle3(domain, seed=seed),
                eagle3(domain, epochs=LONGER, seed=seed),
            )
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the methods over the grid."""
        seeds = [seed for seed in SEEDS if all(_is_there(bench, domain, seed) for domain in DOMAINS)]
        if not seeds:
            raise MissingError("not one seed was trained on all domains")
        ours = grid(bench, {domain: [osprey(domain, seed=seed) for seed in seeds] for domain in DOMAINS})
        theirs = grid(bench, {domain: [eagle3(domain, seed=seed) for seed in seeds] for domain in DOMAINS})
        overall, inside, outside = (
            statistics.ratio(ours.block(DOMAINS, inside=where), theirs.block(DOMAINS, inside=where))
            for where in (None, True, False)
        )
        claims = [
            Claim("Osprey over EAGLE-3, all pairs of domains", "1.161 (3.686 / 3.176)", overall, above(overall, 1)),
            Claim("the same in-domain", "1.124", inside, above(inside, 1)),
            Claim("the same out of domain", "1.173 (3.493 / 2.977)", outside, above(outside, 1)),
        ]
        by_seed = {
            str(seed): statistics.ratio(
                grid(bench, {domain: [osprey(domain, seed=seed)] for domain in DOMAINS}).block(DOMAINS, inside=None),
                grid(bench, {domain: [eagle3(domain, seed=seed)] for domain in DOMAINS}).block(DOMAINS, inside=None),
            ).value
            for seed in seeds
        }
        equal_time, lines = _equal_time(bench, ours, seeds)
        missing = [f"seed {seed}" for seed in SEEDS if seed not in seeds]
        if equal_time is None:
            missing.append("equal training time")
        else:
            claims.append(
                Claim("the same at equal training time", "not given", equal_time, above(equal_time, 1), directed=False)
            )
        return Finding(
            claims=claims,
            tables=[_matrix({OSPREY: ours, EAGLE3: theirs}), _costs(bench, seeds), _seeds(by_seed)],
            why=(
                "The paper gains more out of domain than in-domain. Here a domain is some hundred prompts of a few "
                "templates, held-out ones included: in-domain much is learnt from little, and a head start counts, "
                "since EAGLE-3 has not seen enough yet (experiment 9). Out of domain both accept little, so that there "
                "is little to be ahead in; what Osprey brings there comes from Stage 2, which saw 0.6 million tokens "
                "and not 503 billion. Embeddings are frozen. Both methods see the same answers and states."
            ),
            plots=[lines] if lines else [],
            values={
                "osprey": _values(ours),
                "eagle3": _values(theirs),
                "ratio_by_seed": by_seed,
                "letters_ratio": statistics.ratio(ours.only(DOMAINS, LETTERS), theirs.only(DOMAINS, LETTERS)),
            },
            missing=missing,
        )


def _is_there(bench: Bench, domain: str, seed: int) -> bool:
    return all(Judged(make(domain, seed=seed)) in bench.judged for make in METHODS.values())


def _equal_time(bench: Bench, ours: Grid, seeds: Sequence[int]) -> tuple[Interval | None, Plot | None]:
    """Compare Osprey with what EAGLE-3 had after as many seconds, between its two lengths of training."""
    longer = {domain: [eagle3(domain, epochs=LONGER, seed=seed) for seed in seeds] for domain in DOMAINS}
    if any(Judged(drafter) not in bench.judged for each in longer.values() for drafter in each):
        return None, None
    shorter = {domain: [eagle3(domain, seed=seed) for seed in seeds] for domain in DOMAINS}
    reference = {domain: [osprey(domain, seed=seed) for seed in seeds] for domain in DOMAINS}

    def took(drafters: dict[str, list[Drafter]]) -> float:
        return float(np.mean([bench.seconds(drafter) for each in drafters.values() for drafter in each]))

    begin, end, now = took(shorter), took(longer), took(reference)
    if not begin <= now <= end or begin == end:  # nor where a time is not known
        return None, None
    share = (now - begin) / (end - begin)
    low, high = (grid(bench, each).block(DOMAINS, inside=None) for each in (shorter, longer))
    mine = ours.block(DOMAINS, inside=None)
    ends = [statistics.mean(each) for each in (low, high, mine)]
    plot = Plot(
        "time",
        "seconds of distillation (one thread)",
        "acceptance length",
        [
            Line(
                "EAGLE-3", [(begin, ends[0].value), (end, ends[1].value)], [(each.low, each.high) for each in ends[:2]]
            ),
            Line("Osprey", [(now, ends[2].value)], [(ends[2].low, ends[2].high)]),
        ],
    )
    return statistics.ratio(mine, low + share * (high - low)), plot


def _matrix(grids: dict[str, Grid]) -> Table:
    columns = (*DOMAINS, LETTERS)
    rows = [["trained on", "method", *columns]]
    for domain in DOMAINS:
        for method, each in grids.items():
            rows.append([domain, method, *(number(float(np.nanmean(each.cell(domain, column)))) for column in columns)])
        ours, theirs = grids.values()
        ratios = (statistics.ratio(ours.cell(domain, column), theirs.cell(domain, column)) for column in columns)
        rows.append([domain, "ratio", *(number(each.value) for each in ratios)])
    return Table(rows, "Acceptance length by domain of the prompts; nothing is trained on letters.")


def _costs(bench: Bench, seeds: Sequence[int]) -> Table:
    rows = [["a drafter", "epochs", "supervised tokens", "seconds, one thread"]]
    for name, epochs in ((OSPREY, EPOCHS), (EAGLE3, EPOCHS), (EAGLE3, LONGER)):
        drafters = [replace(METHODS[name](domain, seed=seed), epochs=epochs) for domain in DOMAINS for seed in seeds]
        there = [drafter for drafter in drafters if drafter in bench.drafters]
        if there:
            tokens = np.mean([bench.training(drafter).supervised_tokens for drafter in there])
            seconds = np.mean([bench.seconds(drafter) for drafter in there])
            rows.append([name, str(epochs), f"{tokens:,.0f}", whole(float(seconds))])
    return Table(rows, "The mean over domains and seeds; another cell ran beside each.")


def _seeds(by_seed: dict[str, float]) -> Table:
    return Table([["seed", "ratio, all pairs"], *([seed, number(value)] for seed, value in by_seed.items())])


def _values(of: Grid) -> dict[str, dict[str, float]]:
    return {
        domain: {column: float(np.nanmean(of.cell(domain, column))) for column in (*DOMAINS, LETTERS)}
        for domain in of.values
    }
