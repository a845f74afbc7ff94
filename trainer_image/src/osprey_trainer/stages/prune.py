"""Stage 1: keep the first decoder blocks of a source LM, with its embedding, final norm and head.

The result is a Hugging Face folder in fp32, whatever the source's dtype: Stage 2 trains fp32 weights, and rounding in
between would only lose. Tied embeddings stay tied, since Stage 2 restores the same model, only shorter; convert
unties them, because a drafter's head has rows of its own.
"""

from typing import cast

from osprey_api.stages import PruneConfig, PruneResult
from osprey_runtime.context import StageContext
from osprey_trainer.data.tokenizer import copy_companions
from osprey_trainer.models.backbone import Backbone


def run(ctx: StageContext) -> PruneResult:
    """Writes the pruned LM.

    Raises:
        StageError: INVALID_CONFIG if the source has fewer blocks; UNSUPPORTED_MODEL if its family is not supported;
            CORRUPT_ARTIFACT if its weights do not fit its config.
    """
    config = cast(PruneConfig, ctx.config)
    source = ctx.model(config.source)
    backbone = Backbone.prune(source, config.layers)
    backbone.save(ctx.output)
    copy_companions(source, ctx.output)
    return PruneResult(parameters=sum(parameter.numel() for parameter in backbone.parameters()))
