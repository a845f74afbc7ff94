"""What the `config.json` of a published drafter leaves out, or says of another model, made plain.

Such configs are written by hand or copied from the backbone's or the target's, and engines read them with defaults of
their own. What can mean only one thing is filled in, and said in the log; what this package does not compute is
refused by its name, since a flag that is not read costs acceptance and shows nowhere.
"""

import logging
from collections.abc import Mapping
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

log = logging.getLogger(__name__)

_MODEL_TYPES_OF = {
    "LlamaForCausalLMEagle3": ("llama", "mistral", "qwen2"),
    "Qwen3ForCausalLMEagle3": ("qwen3",),
}
"""Bodies by architecture; the first one is meant where the config names none of them."""
_COMPUTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "fc_norm": False,
    "num_aux_hidden_states": 3,
}
"""Options of EAGLE-3 drafters that engines know, at the top or in `eagle_config`, and the only value that is computed
here."""


def completed(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """The fields of a published drafter's `config.json` without gaps.

    `eagle_config` may stay without layer ids: they are then the target's default ones.

    Args:
        config: what is written.
        name: of its folder, for log and messages.

    Raises:
        StageError: UNSUPPORTED_MODEL by the name of the architecture, or of an option that is not computed here.
    """
    fields, notices = dict(config), []
    architecture = next(iter(fields.get("architectures") or ()), None)
    model_types = _MODEL_TYPES_OF.get(architecture or "")
    if model_types is None:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"{name} is a {architecture or 'model without an architecture'}; drafters that can be read are "
            f"{', '.join(_MODEL_TYPES_OF)}.",
        )
    if fields.get("model_type") not in model_types:
        notices.append(f"model_type is {fields.get('model_type')!r}, but a {architecture} is a {model_types[0]}")
        fields["model_type"] = model_types[0]
    if fields.get("tie_word_embeddings"):
        notices.append("tie_word_embeddings is true, but a drafter's head has rows of its own")
        fields["tie_word_embeddings"] = False
    for field, stand_in in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        if fields.get(field) is None and stand_in in fields:
            notices.append(f"there is no {field}, so it is {stand_in}, {fields[stand_in]}")
            fields[field] = fields[stand_in]
    eagle = fields.get("eagle_config") or {}
    _refuse_options({**fields, **eagle}, name)
    if not eagle.get("eagle_aux_hidden_state_layer_ids"):
        notices.append("no tapped layers are named, so they are the target's default ones")
    if notices:
        log.warning("config.json of %s: %s", name, "; ".join(notices))
    return fields


def _refuse_options(fields: Mapping[str, Any], name: str) -> None:
    for option, computed in _COMPUTED.items():
        found = fields.get(option)
        if found is not None and found != computed:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"The config.json of {name} says {option}: {found!r}; only {computed!r} is supported.",
            )
