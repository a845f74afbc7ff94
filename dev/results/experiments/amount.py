"""How many answers are enough."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.plots import Plot
from dev.results import statistics
from dev.results.bench import Bench
from dev.results.data import PARTS
from dev.results.experiments.pairs import METHODS, line, values
from dev.results.finding import Claim, Finding, Table, number
from dev.results.specs import FOCUS, SMOLLM2, Judged, Wanted

SETS = {**dict(sorted(PARTS.items(), key=lambda item: -item[1])), FOCUS: 1}
"""By name, one of how many of the recipe's prompts; the smallest first."""
SMALLEST = next(iter(SETS))
HALF = next(name for name, part in SETS.items() if part == 2)


@dataclass(frozen=True)
class Amount:
    """The same recipe with an eighth, a quarter, half and all of a domain's prompts."""

    number: int = 9
    title: str = "How many answers are enough"
    setting: str = (
        f"Drafters trained on fewer answers of {FOCUS} as in experiment 1, three passes over them all the same; the "
        f"held-out prompts of {FOCUS}."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return all amounts; by default without the smallest."""
        return [Judged(make(name)) for name in SETS if full or name != SMALLEST for make in METHODS.values()]

    def found(self, bench: Bench) -> Finding:
        """Compare the amounts, method by method."""
        there = [name for name in SETS if all(Judged(make(name)) in bench.judged for make in METHODS.values())]
        rows = [["prompts", "supervised tokens", *METHODS, "ratio"]]
        points: dict[str, dict[float, statistics.Values]] = {method: {} for method in METHODS}
        for name in there:
            dialogues = bench.prompts(SMOLLM2, name)
            found = {method: values(bench, [make(name)], domains=[FOCUS]) for method, make in METHODS.items()}
            for method, each in found.items():
                points[method][float(dialogues)] = each
            ours, theirs = found.values()
            tokens = bench.training(next(iter(METHODS.values()))(name)).supervised_tokens
            means = (number(statistics.mean(each).value) for each in found.values())
            rows.append([str(dialogues), f"{tokens:,}", *means, str(statistics.ratio(ours, theirs))])
        doubled = {
            method: statistics.ratio(*(values(bench, [make(name)], domains=[FOCUS]) for name in (FOCUS, HALF)))
            for method, make in METHODS.items()
        }
        return Finding(
            claims=[
                Claim(f"{method}: all prompts over half of them", "not given", gain, directed=False)
                for method, gain in doubled.items()
            ],
            tables=[Table(rows)],
            why=(
                "The paper gives none. There is enough where twice as many answers, and twice the training, no "
                "longer pay: look at the last doubling of your own data in the same way. The paper trains on 65,000 "
                "answers of a domain."
            ),
            plots=[Plot("amount", "prompts", "acceptance length", [line(*each) for each in points.items()])],
            values={
                method: {str(int(x)): statistics.mean(each) for x, each in found.items()}
                for method, found in points.items()
            },
            missing=[name for name in SETS if name not in there],
        )
