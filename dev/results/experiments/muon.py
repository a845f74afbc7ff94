"""Past the paper: Muon in Stage 4 beside AdamW, and a longer Stage 2 beside the usual one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dev.results import statistics
from dev.results.bench import Bench, MissingError
from dev.results.experiments.pairs import COLUMNS, lengths, values
from dev.results.finding import Claim, Finding, Table
from dev.results.specs import (
    FOCUS,
    SMOLLM2,
    TARGETS,
    Backbone,
    Drafter,
    Judged,
    Target,
    Wanted,
    osprey,
)
from dev.results.statistics import Interval

SEEDS = (0, 1, 2)
OTHERS = [name for name in COLUMNS if name != FOCUS]
USUAL = osprey()
SLOWER, SMALLER = ("learning_rate", 3e-4), ("global_batch_size", 2)
ADAMW = replace(USUAL, backbone=Backbone(options=(("learning_rate", 3e-3),)), options=(SLOWER, SMALLER))
MUON = replace(ADAMW, options=(("muon_scale", 3.0), *ADAMW.options))
LONGER = {steps: Backbone(steps=steps) for steps in (2400, 9600)}
"""Of experiment 2."""
STEPS: Mapping[str, Drafter] = {
    "as in experiment 1": USUAL,
    "Stage 4 at a rate of 0.0003": replace(USUAL, options=(SLOWER,)),
    "and in batches of 2": replace(USUAL, options=ADAMW.options),
    "and Stage 2 at a rate of 0.003 (AdamW above)": ADAMW,
    "and `optimizer: Muon` in Stage 4 (Muon above)": MUON,
    "and Stage 2 with Muon too, `muonScale: 2.0`, at a rate of 0.001 again": replace(
        MUON, backbone=Backbone(options=(("muon_scale", 2.0),))
    ),
    **{
        f"{name} above, after {steps} steps of Stage 2 at a rate of 0.001": replace(drafter, backbone=backbone)
        for steps, backbone in LONGER.items()
        for name, drafter in (("AdamW", ADAMW), ("Muon", MUON))
    },
}
"""Of the first target, with one seed: one change after another, from the recipe of experiment 1."""
PAST: Mapping[str, tuple[Drafter, Drafter]] = {
    "Muon": (ADAMW, MUON),
    "a longer Stage 2": (USUAL, replace(USUAL, backbone=LONGER[2400])),
}
"""Pairs that are compared over all targets and seeds: what is usual, and what goes past it."""


@dataclass(frozen=True)
class Muon:
    """Muon in Stage 4, beside AdamW at rates that were tuned too."""

    number: int = 11
    title: str = "Past the paper: Muon, and a longer Stage 2"
    setting: str = (
        f"Trained on {FOCUS} alone, {USUAL.epochs} epochs, and measured on all held-out prompts. Muon and the AdamW "
        f"beside it have a backbone of {Backbone().steps} steps of AdamW at 0.003, and distil in batches of 2 at a "
        "learning rate of 0.0003; Muon trains the matrices at `muonScale: 3.0` times that. The longer Stage 2 is that "
        "of 2,400 steps of experiment 2: four times the tokens, once for all targets; it is held against the recipe of "
        "experiment 1, at the same tokens of Stage 4. Seeds are of Stage 4; batches and rates were chosen with the "
        "first target, seed 0, by the same prompts. Not of the paper; what a full run gave of Muon, and what else was "
        "tried, is in [decision 9](decisions/0009-muon-is-an-option.md)."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return the recipes for all targets and seeds, in a full run alone."""
        if not full:
            return []
        recipes = [each for pair in PAST.values() for each in pair]
        compared = [_of(each, target, seed) for seed in SEEDS for target in TARGETS for each in recipes]
        return [Judged(each) for each in dict.fromkeys([*compared, *STEPS.values()])]

    def found(self, bench: Bench) -> Finding:
        """Compare the recipes."""
        rows = [["past the usual", "target", "seeds", "prompts", "usual", "past it", "ratio"]]
        claims: list[Claim] = []
        ratios: dict[str, Interval] = {}
        missing: list[str] = []
        for name, compared in PAST.items():
            for target in TARGETS:
                pairs = {seed: [_of(each, target, seed) for each in compared] for seed in SEEDS}
                there = [pair for pair in pairs.values() if all(Judged(each) in bench for each in pair)]
                missing += [f"{name}: {target.title}, seed {seed}" for seed in SEEDS if pairs[seed] not in there]
                if not there:
                    continue
                for title, domains in ((FOCUS, [FOCUS]), ("other", OTHERS), ("all", None)):
                    usual, past = (values(bench, side, domains=domains) for side in zip(*there, strict=True))
                    ratio = ratios[f"{name}: {target.title}, {title}"] = statistics.ratio(past, usual)
                    means = (str(statistics.mean(each)) for each in (usual, past))
                    rows.append([name, target.title, str(len(there)), title, *means, str(ratio)])
                claims += [
                    Claim(
                        f"{name} over the usual for {target.title}, {title}",
                        "not of the paper",
                        ratios[f"{name}: {target.title}, {title}"],
                        directed=False,
                    )
                    for title in (FOCUS, "all")
                ]
        if not ratios:
            raise MissingError("only FULL=1 has it")
        return Finding(claims=claims, tables=[Table(rows), *_steps(bench)], why=WHY, values=ratios, missing=missing)


WHY = (
    "Muon moves a matrix along all directions of its momentum alike, where AdamW follows the few that have large "
    "gradients; in as few steps as here the features of the target are learnt sooner. It also forgets more of what "
    "is not trained on. Of one seed, AdamW did a little better with Stage 2 at the usual rate than at the tuned one: "
    "the gain may be a point or two smaller. After a longer Stage 2 Muon gained nothing more, of one seed. "
    "Each length of Stage 2 has one seed of its own here, and at 150 steps another one alone changed the AL by 4 %; "
    "that 9,600 steps gave what 2,400 did speaks for the gain."
)


def _of(drafter: Drafter, target: Target, seed: int) -> Drafter:
    return replace(drafter, target=target, seed=seed)


def _steps(bench: Bench) -> list[Table]:
    """One change after another."""
    if Judged(ADAMW) not in bench:
        return []
    reference = values(bench, [ADAMW])
    rows = [[f"{SMOLLM2.title}, seed {ADAMW.seed}", "all", *COLUMNS, "ratio to AdamW's"]]
    for name, drafter in STEPS.items():
        if Judged(drafter) not in bench:
            continue
        ratio = statistics.ratio(values(bench, [drafter]), reference)
        rows.append([name, *lengths(bench, drafter), str(ratio)])
    return [Table(rows)]
