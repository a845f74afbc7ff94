"""Chains of 2 to 8 drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.plots import Line, Plot
from dev.results import statistics
from dev.results.bench import Bench
from dev.results.experiments.pairs import METHODS
from dev.results.finding import Claim, Finding, Table, above, number
from dev.results.specs import DOMAINS, FOCUS, Judged, Wanted
from dev.results.statistics import Values

CHAINS = tuple(range(2, 9))


@dataclass(frozen=True)
class Chains:
    """The same drafters, drafting shorter and longer chains than they were trained for."""

    number: int = 4
    title: str = "Chains of 2 to 8 drafts"
    setting: str = (
        f"The drafters of experiment 1 trained on {FOCUS}, unrolled for 5 steps in training, draft 2 to 8 tokens per "
        "verification; the mean over the held-out prompts of all domains."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return all lengths; by default of one domain's drafters."""
        return [
            Judged(make(domain), chain=chain)
            for domain in (DOMAINS if full else (FOCUS,))
            for make in METHODS.values()
            for chain in CHAINS
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the methods length by length."""
        trained = [
            domain
            for domain in DOMAINS
            if all(Judged(make(domain), chain=8) in bench.judged for make in METHODS.values())
        ] or [FOCUS]

        def of(method: str, chain: int) -> Values:
            return statistics.lengths([bench.counts(Judged(METHODS[method](each), chain=chain)) for each in trained])

        table = {method: {chain: of(method, chain) for chain in CHAINS} for method in METHODS}
        ratios = {chain: statistics.ratio(table["Osprey"][chain], table["EAGLE-3"][chain]) for chain in CHAINS}
        least = min(ratios.values(), key=lambda each: each.value)
        sides = [above(each, 1) for each in ratios.values()]
        rows = [["chain", *METHODS, "ratio"]]
        rows += [
            [
                str(chain),
                *(number(statistics.mean(table[method][chain]).value) for method in METHODS),
                str(ratios[chain]),
            ]
            for chain in CHAINS
        ]
        lines = []
        for method, each in table.items():
            means = {chain: statistics.mean(values) for chain, values in each.items()}
            lines.append(
                Line(
                    method,
                    [(chain, mean.value) for chain, mean in means.items()],
                    [(mean.low, mean.high) for mean in means.values()],
                )
            )
        return Finding(
            claims=[
                Claim(
                    "Osprey is ahead at every length; the smallest ratio",
                    "only chains of 5 are in our notes of the paper: 1.161",
                    least,
                    False if False in sides else None if None in sides else True,
                )
            ],
            tables=[Table(rows)],
            why=(
                "A draft at position k counts only where all before it were right. How much a longer chain adds "
                "is thus a question of how often the first drafts are right, which is less often here than in the "
                "paper; positions beyond the fifth were not trained."
            ),
            plots=[Plot("chains", "drafts per verification", "acceptance length", lines)],
            values={
                method: {str(chain): statistics.mean(values) for chain, values in each.items()}
                for method, each in table.items()
            },
            missing=[f"trained on {domain}" for domain in DOMAINS if domain not in trained],
        )
