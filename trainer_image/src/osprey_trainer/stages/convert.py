"""Stage 3: a backbone becomes the initial drafter of a target; without a backbone, an EAGLE-3 drafter from scratch.

The drafter is written in the published format. Its embedding has the target's rows, padding included; its head, if
the draft vocabulary is compressed, those of the tokens most frequent in the target's answers.
"""

import logging
from pathlib import Path
from typing import cast

from osprey_api.stages import ConvertConfig, ConvertResult, InputRole
from osprey_runtime.context import StageContext
from osprey_trainer.data.answers import count_answer_tokens, read_dialogues
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Drafter, text_config
from osprey_trainer.models.hf_names import read_config, read_embedding
from osprey_trainer.models.target import default_tapped_layers
from osprey_trainer.vocabulary import TokenTable, align, choose_draft_vocabulary

log = logging.getLogger(__name__)


def run(ctx: StageContext) -> ConvertResult:
    """Writes the initial drafter.

    Raises:
        StageError: UNSUPPORTED_MODEL, INVALID_CONFIG, INVALID_DATA or CORRUPT_ARTIFACT.
    """
    config = cast(ConvertConfig, ctx.config)
    from_backbone = InputRole.BACKBONE in ctx.task.inputs
    target = ctx.model(config.target, weights=not from_backbone)
    tokens = TokenTable.load(target)
    if from_backbone:
        drafter, copied, composed, left = _from_backbone(ctx.input(InputRole.BACKBONE), target, tokens)
    else:
        drafter, copied, composed, left = _from_scratch(target, tokens, seed=config.seed)
    coverage = 1.0
    if config.draft_vocab_size is not None:
        vocab_size = drafter.config.vocab_size
        counts = count_answer_tokens(
            read_dialogues(ctx.input(InputRole.ANSWERS), vocab_size=vocab_size), vocab_size=vocab_size
        )
        vocabulary = choose_draft_vocabulary(counts, config.draft_vocab_size, num_tokens=tokens.size)
        coverage = vocabulary.coverage
        if len(vocabulary.ids) < vocab_size:
            drafter = drafter.with_draft_vocabulary(vocabulary)
    drafter.save(ctx.output)
    return ConvertResult(
        parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        rows_copied=copied,
        rows_composed=composed,
        rows_left=left,
        coverage=coverage,
    )


def _from_backbone(folder: Path, target: Path, tokens: TokenTable) -> tuple[Drafter, int, int, int]:
    backbone = Backbone.load(folder)
    target_config = read_config(target)
    text = text_config(target_config)
    alignment = align(
        TokenTable.load(folder),
        tokens,
        source_rows=len(backbone.embed_tokens.weight),
        target_rows=text["vocab_size"],
    )
    drafter = Drafter.from_backbone(
        backbone,
        alignment,
        target_config=target_config,
        tapped_layers=default_tapped_layers(text["num_hidden_layers"]),
        target_vocabulary=tokens.digest,
    )
    return drafter, alignment.copied, alignment.composed, alignment.left


def _from_scratch(folder: Path, tokens: TokenTable, *, seed: int) -> tuple[Drafter, int, int, int]:
    config = read_config(folder)
    drafter = Drafter.from_scratch(
        target_config=config,
        target_embedding=read_embedding(folder),  # alone: all of the target in memory may be hundreds of gigabytes
        tapped_layers=default_tapped_layers(text_config(config)["num_hidden_layers"]),
        seed=seed,
        target_vocabulary=tokens.digest,
    )
    return drafter, len(tokens.strings), 0, 0
