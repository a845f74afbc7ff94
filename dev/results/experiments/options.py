"""What the options of both training stages are worth, one changed at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dev.results import statistics
from dev.results.bench import Bench, MissingError
from dev.results.experiments.pairs import COLUMNS, lengths, values
from dev.results.finding import Finding, Table
from dev.results.specs import FOCUS, Backbone, Drafter, Judged, Wanted, osprey

STEPS = 150
"""Of Stage 2 where its options are compared: a quarter of the usual, as experiment 2 has it too."""
BATCH, WINDOW = 8, 128
SHORT = replace(osprey(stage2=STEPS), epochs=1)
USUAL = osprey()


def _stage2(steps: int = STEPS, **options: object) -> Drafter:
    return replace(SHORT, backbone=Backbone(steps=steps, options=tuple(options.items())))


def _stage4(epochs: int = USUAL.epochs, seed: int = USUAL.seed, **options: object) -> Drafter:
    return replace(USUAL, epochs=epochs, seed=seed, options=tuple(options.items()))


STAGE_2: Mapping[str, Drafter] = {
    "`learningRate: 0.0003`": _stage2(learning_rate=3e-4),
    "`learningRate: 0.003`": _stage2(learning_rate=3e-3),
    "`schedule: Cosine`": _stage2(schedule="Cosine"),
    "`warmupRatio: 0.3`": _stage2(warmup_ratio=0.3),
    "`weightDecay: 0.1`": _stage2(weight_decay=0.1),
    "`clipNorm: 0.1`": _stage2(clip_norm=0.1),
    "`emaDecay` unset": _stage2(ema_decay=None),
    "`globalBatchSize: 2`, `steps: 600`": _stage2(4 * STEPS, global_batch_size=BATCH // 4),
    "`sequenceLength: 512`, `globalBatchSize: 2`": _stage2(sequence_length=4 * WINDOW, global_batch_size=BATCH // 4),
    "`lossVocabSize` unset": _stage2(loss_vocab_size=None),
    "`freezeEmbedding: false`": _stage2(freeze_embedding=False),
    "`precision: BF16`": _stage2(precision="BF16"),
    "`seed: 1`": _stage2(seed=1),
}
"""By the option: equal tokens in all."""
STAGE_4: Mapping[str, Drafter] = {
    "`warmupRatio: 0.3`": _stage4(warmup_ratio=0.3),
    "`epochs: 6`": _stage4(epochs=6),
    "`seed: 1`": _stage4(seed=1),
    "`loss: LKLambda`, `lkDecay: 1.0`": _stage4(loss="LKLambda", lk_decay=1.0),
    "`draftVocabSize: 1024`": _stage4(draft_vocab_size=1024),
    "`draftVocabSize: 49152`, all": _stage4(draft_vocab_size=None),
}


@dataclass(frozen=True)
class OptionsOf:
    """One option at a time, of Stage 2 and of Stage 4."""

    number: int = 10
    title: str = "What the options of training are worth"
    setting: str = (
        f"The drafter of experiment 1 trained on {FOCUS}, with one option of Stage 4 changed; and one with {STEPS} "
        f"steps of Stage 2 and {SHORT.epochs} epoch of Stage 4, with one option of Stage 2 changed, at equal tokens. "
        "Ratios are to the same drafter without the change, over the held-out prompts of all domains. The options of "
        "Stage 4 that are not here are in [training.md](training.md)."
    )

    def wanted(self, *, full: bool) -> Sequence[Wanted]:
        """Return every option, in a full run alone."""
        return [Judged(each) for each in (SHORT, USUAL, *STAGE_2.values(), *STAGE_4.values())] if full else []

    def found(self, bench: Bench) -> Finding:
        """Compare each option with none."""
        tables, ratios, missing = [], {}, []
        for stage, plain, options in (("Stage 2", SHORT, STAGE_2), ("Stage 4", USUAL, STAGE_4)):
            there = {name: drafter for name, drafter in options.items() if Judged(drafter) in bench}
            missing += [f"{stage}, {name}" for name in options if name not in there]
            if not there or Judged(plain) not in bench:
                continue
            rows = [[stage, "acceptance length", *COLUMNS, "ratio"], ["without a change", *lengths(bench, plain), "1"]]
            reference = values(bench, [plain])
            for name, drafter in there.items():
                ratio = ratios[f"{stage}, {name}"] = statistics.ratio(values(bench, [drafter]), reference)
                rows.append([name, *lengths(bench, drafter), str(ratio)])
            tables.append(Table(rows))
        if not ratios:
            raise MissingError("only FULL=1 has it")
        return Finding(
            claims=[],
            tables=tables,
            why=(
                "One seed, and trainings of some hundred steps: what changes the number of steps or how far each goes "
                "shows, what is for long trainings hardly does. Of so many options some lie outside of 1 by chance."
            ),
            values=ratios,
            missing=missing,
        )
