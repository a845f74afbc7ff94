"""With and without Stage 2, and its length."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.plots import Line, Plot
from dev.results import statistics
from dev.results.bench import Bench
from dev.results.experiments.pairs import line, values
from dev.results.finding import Claim, Finding, Table, above, number, whole
from dev.results.specs import DOMAINS, FOCUS, LETTERS, Backbone, Judged, Wanted, eagle3, osprey

USUAL = Backbone().steps
DEFAULT = (0, 150, USUAL)
FULL = (*DEFAULT, 2400, 9600)
"""Steps: from nothing over minutes to hours."""


@dataclass(frozen=True)
class Stage2:
    """What next-token prediction on text is worth to the drafter."""

    number: int = 2
    title: str = "With and without Stage 2"
    setting: str = (
        f"Two blocks, pruned and not pretrained, or pretrained for some steps, become drafters trained on {FOCUS} as "
        "in experiment 1; the mean over the held-out prompts of all domains."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return one drafter for each length of Stage 2, and EAGLE-3."""
        lengths = FULL if full else DEFAULT
        return [*(Judged(osprey(stage2=steps)) for steps in lengths), Judged(eagle3())]

    def found(self, bench: Bench) -> Finding:
        """Compare the lengths."""
        with_, without = (values(bench, [osprey(stage2=steps)]) for steps in (USUAL, 0))
        gained = statistics.difference(with_, without)
        there = [steps for steps in FULL if Judged(osprey(stage2=steps)) in bench.judged]
        table = {steps: values(bench, [osprey(stage2=steps)]) for steps in there}
        reference = values(bench, [eagle3()])
        rows = [["steps of Stage 2", "seconds", "all", *DOMAINS, LETTERS, "over EAGLE-3"]]
        for steps, each in table.items():
            seconds = bench.backbones[Backbone(steps=steps)].seconds if steps else 0.0
            parts = (values(bench, [osprey(stage2=steps)], domains=[domain]) for domain in (*DOMAINS, LETTERS))
            rows.append(
                [
                    str(steps),
                    whole(seconds),
                    number(statistics.mean(each).value),
                    *(number(statistics.mean(part).value) for part in parts),
                    str(statistics.ratio(each, reference)),
                ]
            )
        first, last = there[0], there[-1]
        mean = statistics.mean(reference)
        lines = [
            line("Osprey", {float(steps): each for steps, each in table.items()}),
            Line("EAGLE-3", [(float(steps), mean.value) for steps in (first, last)]),
        ]
        return Finding(
            claims=[
                Claim(f"{USUAL} steps of Stage 2 add to the AL", "0.185 (3.605 to 3.790)", gained, above(gained, 0)),
                Claim(
                    "without Stage 2, over EAGLE-3",
                    "not in our notes of the paper",
                    statistics.ratio(without, reference),
                    directed=False,
                ),
            ],
            tables=[Table(rows)],
            why=(
                "Distillation sees some ten thousand tokens here, so a body must bring its language along; the "
                "paper's sees tens of millions, in which a body that was only pruned can still learn some of it. "
                "2,400 steps of 1,024 tokens read half of our text; 9,600 read all of it more than twice, and gained "
                "nothing over them in our full run. The paper's text is as good as new at every step."
            ),
            plots=[Plot("stage2", "steps of Stage 2", "acceptance length", lines)],
            values={str(steps): statistics.mean(each) for steps, each in table.items()},
            missing=[f"{steps} steps" for steps in FULL if steps not in there],
        )
