"""Stage 2: next-token prediction on generic text restores the pruned LM. Target-agnostic, and shared by all targets.

Windows are drawn at random places of the token stream. The text holds no begin token, as a drafter never sees one.
The result is a Hugging Face folder like that of prune, in fp32.
"""

import logging
from typing import cast

import torch

from osprey_api.conditions import FailureReason
from osprey_api.stages import InputRole, PretrainConfig, PretrainResult
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_trainer.data.shards import TokenStream
from osprey_trainer.data.tokenizer import copy_companions
from osprey_trainer.data.windows import RandomWindows
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.objectives import Pretraining
from osprey_trainer.training import process_group, run_loop, split_of, write_report
from osprey_trainer.vocabulary import choose_draft_vocabulary

log = logging.getLogger(__name__)


def run(ctx: StageContext) -> PretrainResult:
    """Writes the pretrained backbone.

    Raises:
        StageError: INVALID_CONFIG if text and backbone have different tokenizers, or the batch cannot be shared
            by the processes; INVALID_DATA if the text is shorter than a window; DIVERGED;
            STOPPED, with a checkpoint saved.
    """
    config = cast(PretrainConfig, ctx.config)
    optimization = config.optimization
    split = split_of(ctx, optimization)
    backbone = Backbone.load(ctx.input(InputRole.BACKBONE))
    stream = TokenStream(ctx.input(InputRole.TOKENS))
    rows = len(backbone.embed_tokens.weight)
    if stream.index.vocab_size > rows:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"The text has token ids up to {stream.index.vocab_size - 1}, but the backbone has {rows} rows: tokenize "
            "it with the tokenizer of the backbone's source.",
        )
    passes = config.steps * optimization.global_batch_size * optimization.sequence_length / len(stream)
    log.info("%d tokens of %d documents, seen %.2g times", len(stream), stream.index.rows, passes)
    vocabulary = None
    if config.loss_vocab_size is not None:
        counts = torch.from_numpy(stream.counts(rows))
        chosen = choose_draft_vocabulary(counts, config.loss_vocab_size, num_tokens=stream.index.vocab_size)
        vocabulary = chosen.ids
        log.info("%d tokens are predicted: %.1f %% of the text", len(chosen.ids), 100 * chosen.coverage)
    batches = RandomWindows(stream, sequence_length=optimization.sequence_length, split=split, seed=optimization.seed)
    with process_group(ctx, optimization.precision, muon=optimization.muon_scale is not None):
        trained = run_loop(
            ctx,
            Pretraining(backbone, train_embedding=not config.freeze_embedding, vocabulary=vocabulary),
            batches,
            optimization=optimization,
            steps=config.steps,
            accumulation=split.accumulation,
        )
    if ctx.rank == 0:
        backbone = Backbone(backbone.hf_config)
        backbone.load_state_dict(trained.result.weights)
        backbone.save(ctx.output)
        copy_companions(ctx.input(InputRole.BACKBONE), ctx.output)
        write_report(ctx, trained, text_tokens=len(stream))
    return PretrainResult(
        steps=trained.result.steps,
        tokens=trained.result.tokens,
        first_loss=trained.first_loss,
        final_loss=trained.final_loss,
    )
