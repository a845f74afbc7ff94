"""Blocks kept: the cost of drafting against acceptance length."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.plots import Line, Plot
from dev.results import statistics
from dev.results.bench import Bench
from dev.results.experiments.pairs import values
from dev.results.finding import Claim, Finding, Table, number
from dev.results.specs import FOCUS, Judged, Served, Wanted, eagle3, osprey

BLOCKS = (1, 2, 4)


@dataclass(frozen=True)
class Blocks:
    """More blocks draft better and slower."""

    number: int = 6
    title: str = "Blocks kept: 1, 2, 4"
    setting: str = (
        f"Backbones of 1, 2 and 4 blocks with as many steps of Stage 2 become drafters trained on {FOCUS}. Acceptance "
        "length is the mean over the held-out prompts of all domains; tokens per second are those of a real SGLang "
        f"on both cores, one request at a time, on held-out prompts of {FOCUS}."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return each size judged and served, and EAGLE-3 and the target alone beside them."""
        del full
        sizes = [osprey(blocks=blocks) for blocks in BLOCKS]
        return [
            *(Judged(drafter) for drafter in (*sizes, eagle3())),
            *(Served(drafter, 1) for drafter in (None, *sizes, eagle3())),
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the sizes."""
        alone = bench.baseline(1).tokens_per_second
        drafters = {f"Osprey, {blocks}": osprey(blocks=blocks) for blocks in BLOCKS} | {"EAGLE-3, 1": eagle3()}
        rows = [["method, blocks", "AL, all", f"AL, {FOCUS}, served", "tokens/s", "of the target alone"]]
        speeds, lengths = {}, {}
        for name, drafter in drafters.items():
            served = bench.evaluation(drafter, 1)
            speeds[name], lengths[name] = served.tokens_per_second, values(bench, [drafter])
            rows.append(
                [
                    name,
                    str(statistics.mean(lengths[name])),
                    number(served.acceptance_length),
                    f"{served.tokens_per_second:.1f}",
                    f"{served.tokens_per_second / alone:.2f}",
                ]
            )
        rows.append(["the target alone", "1", "1", f"{alone:.1f}", "1.00"])
        ours = [f"Osprey, {blocks}" for blocks in BLOCKS]
        fastest, longest = (
            max(ours, key=lambda name: speeds[name]),
            max(ours, key=lambda name: statistics.mean(lengths[name]).value),
        )
        more = statistics.difference(lengths[ours[-1]], lengths[ours[0]])
        return Finding(
            claims=[
                Claim(
                    f"4 blocks accept more than 1; fastest: {fastest.partition(', ')[2]}, "
                    f"longest: {longest.partition(', ')[2]}",
                    "2 of 36 blocks kept, or 4 of 16; no figure for other numbers",
                    more,
                    directed=False,
                )
            ],
            tables=[Table(rows, "Tokens per second of one run each.")],
            why=(
                "A draft costs the drafter's blocks and head, a verification the target's 30 blocks and head over "
                "6 tokens. Drafts are made one after the other, so every block of the drafter counts five times in a "
                "round. On a GPU, where a verification costs hardly more than one token, the balance lies elsewhere."
            ),
            plots=[
                Plot(
                    "blocks",
                    "acceptance length",
                    "tokens per second",
                    [
                        Line("Osprey", [(statistics.mean(lengths[name]).value, speeds[name]) for name in ours]),
                        Line("EAGLE-3", [(statistics.mean(lengths["EAGLE-3, 1"]).value, speeds["EAGLE-3, 1"])]),
                    ],
                )
            ],
            values={"tokens_per_second": speeds, "target_alone": alone, "fastest": fastest, "longest": longest},
        )
