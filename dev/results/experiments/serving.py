"""Serving: several requests at a time, temperature 0 and 1."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.plots import Line, Plot
from dev.results import statistics
from dev.results.bench import Bench, MissingError
from dev.results.data import SAMPLED
from dev.results.experiments.pairs import EAGLE3, METHODS, OSPREY, values
from dev.results.finding import Claim, Finding, Table, above
from dev.results.specs import FOCUS, Judged, Served, Wanted

DEFAULT = (1, 4, 16)
FULL = (1, 2, 4, 8, 16)
"""Requests in flight."""


@dataclass(frozen=True)
class Serving:
    """Tokens per second of a real server, and acceptance where answers are sampled."""

    number: int = 8
    title: str = "Serving: batch 1 to 16, temperature 0 and 1"
    setting: str = (
        f"A real SGLang on both cores serves the drafters of experiment 1 trained on {FOCUS}, greedily, on held-out "
        f"prompts of {FOCUS}, with 1 to 16 requests in flight. SGLang's CPU path verifies greedily whatever the "
        "temperature, so tokens per second at temperature 1 are not measured. Acceptance at temperature 1 is "
        "simulated: the target alone samples its answers, and a draft counts where it is the token that was sampled, "
        "which happens with the target's probability of the draft, as in SGLang's verification of a chain with one "
        "branch on a GPU. What that leaves out is the speed of sampling, and drafts that are sampled too."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return both methods and the target alone at some batch sizes, and both on sampled answers."""
        return [
            *(Judged(make(), answers) for make in METHODS.values() for answers in ("held-out", SAMPLED)),
            *(
                Served(drafter, batch)
                for batch in (FULL if full else DEFAULT)
                for drafter in (None, *(make() for make in METHODS.values()))
            ),
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the methods at each batch size and both temperatures."""
        drafters = {name: make() for name, make in METHODS.items()}
        there = [batch for batch in FULL if all(Served(d, batch) in bench.served for d in (None, *drafters.values()))]
        if not there:
            raise MissingError("nothing was served")
        rows = [
            [
                "requests in flight",
                "the target alone",
                *(f"{name}, tokens/s" for name in drafters),
                "AL, Osprey, EAGLE-3",
            ]
        ]
        speeds: dict[str, dict[float, float]] = {name: {} for name in ("the target alone", *drafters)}
        same = 1.0
        for batch in there:
            speeds["the target alone"][batch] = bench.baseline(batch).tokens_per_second
            served = {name: bench.evaluation(drafter, batch) for name, drafter in drafters.items()}
            for name, each in served.items():
                speeds[name][batch] = each.tokens_per_second
                same = min(same, each.identical_outputs)
            rows.append(
                [
                    str(batch),
                    *(f"{each[batch]:.1f}" for each in speeds.values()),
                    ", ".join(f"{each.acceptance_length:.3f}" for each in served.values()),
                ]
            )
        ratios = {}
        temperatures = [["temperature", *drafters, "ratio"]]
        for temperature, answers in (("0", "held-out"), ("1", SAMPLED)):
            ours, theirs = (values(bench, [drafter], answers=answers) for drafter in drafters.values())
            ratios[temperature] = statistics.ratio(ours, theirs)
            means = (str(statistics.mean(each)) for each in (ours, theirs))
            temperatures.append([temperature, *means, str(ratios[temperature])])
        first, last = there[0], there[-1]
        alone = speeds["the target alone"]
        rounds = {
            name: {
                batch: bench.evaluation(drafter, batch).acceptance_length * alone[batch] / speeds[name][batch]
                for batch in there
            }
            for name, drafter in drafters.items()
        }
        return Finding(
            claims=[
                Claim(
                    f"AL at temperature 1 (tokens/s at batch {first}: "
                    f"{speeds[OSPREY][first] / speeds[EAGLE3][first]:.2f} of EAGLE-3's)",
                    "tokens/s 1.175 to 1.179 of EAGLE-3's, batch 1, greedy; temperature 1 not in our notes",
                    ratios["1"],
                    above(ratios["1"], 1),
                )
            ],
            tables=[
                Table(rows, f"Least share of outputs equal to those without a drafter: {same:.2f}. One run each."),
                Table(temperatures, "Simulated, held-out prompts of all domains."),
            ],
            why=(
                f"With {first} in flight a round (5 drafts and a verification of 6 tokens) takes Osprey "
                f"{rounds[OSPREY][first]:.1f} times as long as one token takes the target alone, and EAGLE-3 "
                f"{rounds[EAGLE3][first]:.1f} times; with {last} in flight it is {rounds[OSPREY][last]:.1f} and "
                f"{rounds[EAGLE3][last]:.1f}, since two CPU cores are soon bound by arithmetic, where a GPU still "
                "verifies for hardly more than one token. A drafter of two blocks costs twice one of one block, which "
                "counts for more beside a target of 30 thin blocks than beside the paper's."
            ),
            plots=[
                Plot(
                    "serving",
                    "requests in flight",
                    "tokens per second",
                    [Line(name, sorted(each.items())) for name, each in speeds.items()],
                )
            ],
            values={
                "tokens_per_second": {name: {str(k): v for k, v in each.items()} for name, each in speeds.items()},
                "round": {name: {str(k): v for k, v in each.items()} for name, each in rounds.items()},
            },
            missing=[f"batch {batch}" for batch in FULL if batch not in there],
        )
