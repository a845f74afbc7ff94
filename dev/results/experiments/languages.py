"""Prompts that are not English, after adaptation on English code alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from dev.results import statistics
from dev.results.bench import Bench
from dev.results.data import DOMAIN_OF, OTHER_LANGUAGES
from dev.results.experiments.pairs import METHODS, values
from dev.results.finding import Claim, Finding, Table, above, number
from dev.results.specs import FOCUS, Judged, Wanted, eagle3, osprey

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Languages:
    """What of a drafter is left on text that it never saw."""

    number: int = 7
    title: str = "Prompts that are not English"
    setting: str = (
        f"The drafters of experiment 1 trained on {FOCUS}, whose answers are English and Python, on {len(DOMAIN_OF)} "
        "other languages: prompts of our own, none of them about code, with the target's greedy answers."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return both methods; by default with one seed."""
        return [
            Judged(make(seed=seed), OTHER_LANGUAGES)
            for seed in (SEEDS if full else SEEDS[:1])
            for make in METHODS.values()
        ]

    def found(self, bench: Bench) -> Finding:
        """Compare the methods language by language."""
        seeds = [
            seed
            for seed in SEEDS
            if all(Judged(make(seed=seed), OTHER_LANGUAGES) in bench.judged for make in METHODS.values())
        ] or [0]

        def of(domains: Sequence[str] | None = None) -> list[statistics.Values]:
            return [
                values(bench, [make(seed=seed) for seed in seeds], answers=OTHER_LANGUAGES, domains=domains)
                for make in (osprey, eagle3)
            ]

        ours, theirs = of()
        ratio = statistics.ratio(ours, theirs)
        rows = [["language", *METHODS, "ratio"]]
        for name, language in DOMAIN_OF.items():
            means = [statistics.mean(each).value for each in of([name])]
            rows.append([language, *(number(each) for each in means), number(means[0] / means[1])])
        rows.append(["all", *(str(statistics.mean(each)) for each in (ours, theirs)), str(ratio)])
        return Finding(
            claims=[
                Claim(
                    "Osprey over EAGLE-3, other languages",
                    "1.238 (Global-MMLU, 42 languages), 1.124 (MGSM)",
                    ratio,
                    above(ratio, 1),
                )
            ],
            tables=[Table(rows, "Four prompts a language: single languages are noise.")],
            why=(
                "The paper's backbones are multilingual models. SmolLM2 is an English one, its Stage 2 here is "
                "English documentation, and the 4096 tokens that can be drafted are the most frequent of English "
                "answers, so both methods can draft little of another script. The target itself is weak there: it "
                "may answer in English or repeat itself, which is easy to draft."
            ),
            missing=[f"seed {seed}" for seed in SEEDS if seed not in seeds],
        )
