"""Past the paper: Muon in Stage 4 beside AdamW, and both with a longer Stage 2."""

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
LONGER_MUON = replace(MUON, backbone=LONGER[2400])
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
PAST: Mapping[str, Drafter] = {"Muon": MUON, "Muon and a longer Stage 2": LONGER_MUON}
"""Recipes that are compared with AdamW's, over all targets and seeds."""


@dataclass(frozen=True)
class Muon:
    """Muon in Stage 4, beside AdamW at rates that were tuned too."""

    number: int = 11
    title: str = "Past the paper: Muon, and a longer Stage 2"
    setting: str = (
        f"Trained on {FOCUS} alone, {USUAL.epochs} epochs, and measured on all held-out prompts. Both have a backbone "
        f"of {Backbone().steps} steps of AdamW at 0.003, and distil in batches of 2 at a learning rate of 0.0003; "
        "Muon trains the matrices at `muonScale: 3.0` times that. The longer Stage 2 is that of 2,400 steps of "
        "experiment 2: four times the tokens, once for all targets; those of Stage 4 are the same. Seeds are of Stage "
        "4; batches and rates were chosen with the first target, seed 0, by the same prompts. Not of the paper; what "
        "a full run gave, and what else was tried, is in [decision 9](decisions/0009-muon-is-an-option.md)."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return the recipes for all targets and seeds, in a full run alone."""
        if not full:
            return []
        recipes = (ADAMW, *PAST.values())
        compared = [_of(each, target, seed) for seed in SEEDS for target in TARGETS for each in recipes]
        return [Judged(each) for each in dict.fromkeys([*compared, *STEPS.values()])]

    def found(self, bench: Bench) -> Finding:
        """Compare the recipes."""
        rows = [["target", "seeds", "prompts", "AdamW", "past it", "its AL", "ratio"]]
        claims: list[Claim] = []
        ratios: dict[str, Interval] = {}
        missing: list[str] = []
        for name, recipe in PAST.items():
            for target in TARGETS:
                pairs = {seed: [_of(each, target, seed) for each in (ADAMW, recipe)] for seed in SEEDS}
                there = [pair for pair in pairs.values() if all(Judged(each) in bench for each in pair)]
                missing += [f"{name}: {target.title}, seed {seed}" for seed in SEEDS if pairs[seed] not in there]
                if not there:
                    continue
                for title, domains in ((FOCUS, [FOCUS]), ("other", OTHERS), ("all", None)):
                    usual, past = (values(bench, side, domains=domains) for side in zip(*there, strict=True))
                    ratio = ratios[f"{name}: {target.title}, {title}"] = statistics.ratio(past, usual)
                    means = [str(statistics.mean(each)) for each in (usual, past)]
                    rows.append([target.title, str(len(there)), title, means[0], name, means[1], str(ratio)])
                claims += [
                    Claim(
                        f"{name} over AdamW for {target.title}, {title}",
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
    "the gain may be a point or two smaller."
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
