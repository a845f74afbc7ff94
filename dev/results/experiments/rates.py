"""A tenth of the learning rate, for both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dev.results import statistics
from dev.results.bench import Bench
from dev.results.experiments.pairs import METHODS
from dev.results.finding import Claim, Finding, Table, above, number
from dev.results.specs import DOMAINS, FOCUS, Judged, Wanted
from dev.results.statistics import Values

SLOWER = 10


@dataclass(frozen=True)
class Rates:
    """What each method loses when the learning rate is far too small."""

    number: int = 3
    title: str = "A tenth of the learning rate"
    setting: str = (
        f"The drafters of experiment 1, trained on {FOCUS} with a tenth of the learning rate and all else equal; the "
        "mean over the held-out prompts of all domains."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return both rates of both methods; by default trained on one domain."""
        return [
            Judged(each)
            for domain in (DOMAINS if full else (FOCUS,))
            for make in METHODS.values()
            for each in (make(domain), replace(make(domain), slower=SLOWER))
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare what is lost."""
        trained = [
            domain
            for domain in DOMAINS
            if all(
                Judged(replace(make(domain), slower=slower)) in bench.judged
                for make in METHODS.values()
                for slower in (1, SLOWER)
            )
        ] or [FOCUS]

        def of(method: str, slower: int) -> Values:
            drafters = [replace(METHODS[method](domain), slower=slower) for domain in trained]
            return statistics.lengths([bench.counts(Judged(drafter)) for drafter in drafters])

        table = {method: {slower: of(method, slower) for slower in (1, SLOWER)} for method in METHODS}
        lost = {method: statistics.difference(each[1], each[SLOWER]) for method, each in table.items()}
        more = statistics.difference_of_differences(
            table["EAGLE-3"][1], table["EAGLE-3"][SLOWER], table["Osprey"][1], table["Osprey"][SLOWER]
        )
        head = ["method", "learning rate", f"/ {SLOWER}", "lost", "of what is above 1"]
        rows = [head]
        for method, each in table.items():
            first, second = (float(np.nanmean(each[slower])) for slower in (1, SLOWER))
            rows.append(
                [method, number(first), number(second), str(lost[method]), f"{(first - second) / (first - 1):.0%}"]
            )
        return Finding(
            claims=[
                Claim("EAGLE-3 loses more than Osprey", "0.96 more (1.07 against 0.11)", more, above(more, 0)),
                Claim("Osprey loses", "0.11", lost["Osprey"], above(lost["Osprey"], 0)),
                Claim("EAGLE-3 loses", "1.07", lost["EAGLE-3"], above(lost["EAGLE-3"], 0)),
            ],
            tables=[Table(rows)],
            why=(
                "The paper takes tens of thousands of steps, so even a tenth of its rate goes a long way; ours "
                "takes a hundred, most of which are needed to get anywhere from random weights, or to begin to use the "
                "target's states, whose weights are zero at first. EAGLE-3 has less to lose here than in the paper: "
                "what it loses is better read as a share of what it has above 1."
            ),
            values={
                method: {str(slower): float(np.nanmean(values)) for slower, values in each.items()}
                for method, each in table.items()
            },
            missing=[f"trained on {domain}" for domain in DOMAINS if domain not in trained],
        )
