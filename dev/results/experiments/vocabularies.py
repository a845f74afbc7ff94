"""One backbone for two targets of different vocabularies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dev.results import statistics
from dev.results.bench import Bench
from dev.results.experiments.pairs import METHODS, values
from dev.results.finding import Claim, Finding, Table, above
from dev.results.specs import FOCUS, TARGETS, Judged, Wanted

PAPER = "1.161, 1.212 and 1.227 for three targets"


@dataclass(frozen=True)
class Vocabularies:
    """The backbone of experiment 1, converted to a second target of another family."""

    number: int = 5
    title: str = "One backbone, two targets of different vocabularies"
    setting: str = (
        "The backbone (49,152 tokens, hidden size 576) drafts for its own model and for Gemma 3 270M (262,144 "
        f"tokens, hidden size 640, sliding windows), both trained on the target's own answers to {FOCUS}; EAGLE-3 "
        "from scratch beside each. Gemma answers half as many prompts. It is the base model, which goes on with a "
        "prompt rather than answers it."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return both methods for both targets; by default with one seed."""
        return [
            Judged(replace(make(seed=seed), target=target))
            for seed in ((0, 1, 2) if full else (0,))
            for target in TARGETS
            for make in METHODS.values()
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the methods target by target."""
        rows = [["target", "seeds", *METHODS, "ratio"]]
        claims = []
        for target in TARGETS:
            seeds = [
                seed
                for seed in (0, 1, 2)
                if all(Judged(replace(make(seed=seed), target=target)) in bench.judged for make in METHODS.values())
            ] or [0]
            ours, theirs = (
                values(bench, [replace(make(seed=seed), target=target) for seed in seeds]) for make in METHODS.values()
            )
            ratio = statistics.ratio(ours, theirs)
            means = (str(statistics.mean(each)) for each in (ours, theirs))
            rows.append([target.title, str(len(seeds)), *means, str(ratio)])
            claims.append(Claim(f"Osprey over EAGLE-3 for {target.title}", PAPER, ratio, above(ratio, 1)))
        return Finding(
            claims=claims[::-1],
            tables=[Table(rows)],
            why=(
                "Of Gemma's tokens 18 % have a twin in the backbone's vocabulary; the others begin as the mean of "
                "the pieces that they split into, in embedding and head. EAGLE-3 keeps the target's own "
                "embedding. The ratios of the two targets are not to be compared with each other: prompts, "
                "answers and draft vocabularies differ in number."
            ),
        )
