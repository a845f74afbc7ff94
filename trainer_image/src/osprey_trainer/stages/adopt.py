"""A finished drafter that is imported, in place of stages 3 and 4: held against its target, and taken over.

What comes out is what distil would have made: the published format in fp32, every tensor known and used, and a config
that says of the target what this target says. So whatever evaluates and serves it need not know where it is from.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from osprey_api.conditions import FailureReason
from osprey_api.stages import AdoptConfig, AdoptResult, InputRole
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_trainer.models.draft import VOCABULARY_FIELD, Drafter, text_config
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.target import check_tapped_layers
from osprey_trainer.vocabulary import TokenTable

log = logging.getLogger(__name__)


def run(ctx: StageContext) -> AdoptResult:
    """Writes the imported drafter, as its target wants it.

    Raises:
        StageError: INVALID_CONFIG if a tensor is unknown, missing or misshapen, or the drafter is another target's;
            UNSUPPORTED_MODEL if it is of a kind that is not computed here.
    """
    config = cast(AdoptConfig, ctx.config)
    uri = ctx.task.inputs[InputRole.DRAFTER].uri
    folder = ctx.model(config.target, weights=False)
    target = read_config(folder)
    try:
        drafter = Drafter.load(ctx.input(InputRole.DRAFTER))
        _check_fits(drafter, text_config(target))
        is_compared = _check_vocabulary(drafter, folder)
    except StageError as error:
        # The files are those that were named, by their digest, so reading them again would not help.
        damaged = error.reason is FailureReason.CORRUPT_ARTIFACT
        reason = FailureReason.INVALID_CONFIG if damaged else error.reason
        raise StageError(
            reason, f"{uri} is no drafter of this target that can be imported. {error.message} Correct spec.import."
        ) from error
    drafter = drafter.for_target(target)
    drafter.save(ctx.output)
    return AdoptResult(
        parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        layers=drafter.config.body.num_layers,
        draft_vocab_size=drafter.config.draft_vocab_size,
        vocabulary_compared=is_compared,
    )


def _check_fits(drafter: Drafter, target: Mapping[str, Any]) -> None:
    """Whether the target's tokens and hidden states are those that the drafter was made for, as far as sizes tell."""
    for what, found, wanted in (
        ("tokens", drafter.config.vocab_size, target["vocab_size"]),
        ("numbers in a hidden state", drafter.config.target_hidden_size, target["hidden_size"]),
    ):
        if found != wanted:
            raise StageError(
                FailureReason.INVALID_CONFIG, f"It was made for a target of {found} {what}, and this one has {wanted}."
            )
    layers = drafter.config.tapped_layers
    if layers is not None:  # `resolve` has seen that the usual ones can be tapped
        check_tapped_layers(layers, target["num_hidden_layers"])


def _check_vocabulary(drafter: Drafter, target: Path) -> bool:
    """Whether the target's tokens are those that the drafter was made for, where it says which these were."""
    wanted = drafter.config.target_vocabulary
    if wanted is None:
        log.warning(
            "the drafter's config.json has no %s, so only the number of the target's tokens was compared; made for "
            "other tokens, it will be accepted hardly ever",
            VOCABULARY_FIELD,
        )
        return False
    found = TokenTable.load(target).digest
    if found != wanted:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"It was made for a target of as many tokens, but of others: its config.json says {VOCABULARY_FIELD} "
            f"{wanted}, and this target's tokenizer has {found}. Import one made for it, or train it.",
        )
    return True
