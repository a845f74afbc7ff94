"""Names of weights and config fields, both ways: the one place that knows the formats on disk.

Three sets of names meet here:

* Hugging Face's causal LMs of Llama's kind, from which a backbone comes: `model.layers.{i}...`, `lm_head.weight`;
* the modules of this package: `layers.{i}...`;
* published drafters, as SGLang reads them: `midlayer...` for a single layer, else `layers.{i}...`.

Which norm is which in a drafter's layer: `input_layernorm` norms the *first* half of the attention input and
`hidden_norm` the *second*, the residual stream. In Osprey the stream is the token embedding, so the
backbone's `input_layernorm` becomes `hidden_norm`, and `input_layernorm`, now of the context, starts at ones.
In EAGLE-3 it is the other way round: first = embedding, second = context.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_runtime.store import out_of_disk

TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_EMBEDDING = "embed_tokens.weight"
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
_MOVED = {  # of a backbone's layer -> of an Osprey drafter's layer, shape unchanged
    "input_layernorm.weight": "hidden_norm.weight",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
}
_MOVED_WHERE_THERE_IS_ONE = (  # Qwen2's biases, Qwen3's norms of heads: behind the projections, so unchanged
    *(f"self_attn.{part}_proj.bias" for part in "qkv"),
    *(f"self_attn.{part}_norm.weight" for part in "qk"),
)
_EXPANDED = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")


# --- Backbones ---


def is_pruned(name: str, layers: int) -> bool:
    """Whether a tensor of the source belongs to a block that is not kept, or is derived (old `inv_freq`)."""
    match = _LAYER.match(name)
    return bool(match and int(match[1]) >= layers) or name.endswith("rotary_emb.inv_freq")


def backbone_from_hf(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a Hugging Face causal LM -> state dict of `Backbone`."""
    state = {name.removeprefix("model."): value for name, value in tensors.items()}
    if config.get("tie_word_embeddings", False):
        state.pop("lm_head.weight", None)  # some files repeat the tied tensor
    return state


def has_own_head(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a Hugging Face causal LM holds a head that is not its embedding, whatever its config says."""
    state = {name.removeprefix("model."): value for name, value in tensors.items()}
    embedding, head = state.get(_EMBEDDING), state.get("lm_head.weight")
    return embedding is not None and head is not None and not torch.equal(embedding, head)


def backbone_to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `Backbone` -> tensors of a Hugging Face causal LM."""
    return {name if name.startswith("lm_head.") else f"model.{name}": value for name, value in state.items()}


def drafter_from_backbone(
    state: Mapping[str, Tensor], *, num_layers: int, target_hidden_size: int, num_taps: int
) -> dict[str, Tensor]:
    """Body of the Osprey drafter that computes the backbone exactly, without embedding and head.

    QKV become [0, W]: zeros on the context's half. `fc` is the identity on the deepest tap, truncated to
    min(H, Ht): a zero `fc` behind zeros would be a stationary point that never trains.
    """
    hidden_size = len(state["norm.weight"])
    fc = torch.zeros(hidden_size, num_taps * target_hidden_size)
    fc[:, (num_taps - 1) * target_hidden_size :].fill_diagonal_(1.0)
    drafter = {"fc.weight": fc, "norm.weight": state["norm.weight"]}
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        for source, destination in _MOVED.items():
            drafter[prefix + destination] = state[prefix + source]
        for name in _MOVED_WHERE_THERE_IS_ONE:
            if prefix + name in state:
                drafter[prefix + name] = state[prefix + name]
        for name in _EXPANDED:
            weight = state[prefix + name]
            drafter[prefix + name] = torch.cat([torch.zeros_like(weight), weight], dim=1)
        drafter[prefix + "input_layernorm.weight"] = torch.ones(hidden_size)
    return drafter


# --- Published drafters ---


def to_published(state: Mapping[str, Tensor], *, num_layers: int) -> dict[str, Tensor]:
    """State dict of `Drafter` -> published tensors."""
    if num_layers > 1:
        return dict(state)
    return {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in state.items()}


def from_published(tensors: Mapping[str, Tensor], *, num_layers: int) -> dict[str, Tensor]:
    """Published tensors -> state dict of `Drafter`."""
    if num_layers > 1:
        return dict(tensors)
    return {re.sub(r"^midlayer\.", "layers.0.", name): value for name, value in tensors.items()}


def check_draft_vocabulary(d2t: Tensor, t2d: Tensor, folder: Path) -> None:
    """Checks that both maps say the same: the head's rows are the tokens that t2d allows, in their order.

    Args:
        d2t: int64 [Vd], offsets.
        t2d: bool [V].
        folder: where they were read, for the message.

    Raises:
        StageError: CORRUPT_ARTIFACT otherwise.
    """
    ids = d2t + torch.arange(len(d2t))
    if not torch.equal(ids, t2d.nonzero().flatten()):
        raise StageError(
            FailureReason.CORRUPT_ARTIFACT,
            f"The draft vocabulary of {folder.name} contradicts itself: d2t, which holds offsets (target id minus "
            "draft id), and t2d name different tokens.",
        )


# --- Folders ---


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder.

    Raises:
        StageError: CORRUPT_ARTIFACT if there is none.
    """
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StageError(
            FailureReason.CORRUPT_ARTIFACT, f"{folder.name} holds no readable config.json: {error}"
        ) from error
    return config


def read_tensors(folder: Path, *, skip: Callable[[str], bool] = lambda _name: False) -> dict[str, Tensor]:
    """Tensors of all `*.safetensors` of a folder, floating-point ones in fp32, without those to skip.

    Raises:
        StageError: CORRUPT_ARTIFACT if there is no such file, or a shard of the index is missing.
    """
    files = weight_files(folder)
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        raise StageError(
            FailureReason.CORRUPT_ARTIFACT,
            f"{folder.name} lacks weights: {', '.join(missing) or 'no *.safetensors file'}.",
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the reader is no mapping
                if not skip(name):
                    value = file.get_tensor(name)
                    tensors[name] = value.float() if value.is_floating_point() else value
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, those of its index where it has one, there or not."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    # Mistral's consolidated ones are the same once more, in another layout.
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))


def read_embedding(folder: Path) -> Tensor:
    """[V, H]: the token embedding of a language model, in fp32. No other tensor is read.

    It is known by the end of its name, since the names of multimodal models differ before it. A tied one may lie in the
    file as the head.

    Raises:
        StageError: CORRUPT_ARTIFACT if there is none; UNSUPPORTED_MODEL if there are several.
    """
    for name in (_EMBEDDING, "lm_head.weight"):
        found = _tensors_that_end_in(name, folder)
        if len(found) > 1:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL, f"The target has several embeddings: {', '.join(sorted(found))}."
            )
        if found:
            return next(iter(found.values()))
    raise StageError(FailureReason.CORRUPT_ARTIFACT, f"{folder.name} has no tensor that ends in {_EMBEDDING}.")


def _tensors_that_end_in(ending: str, folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder, skip=lambda name: not f".{name}".endswith(f".{ending}"))


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`.

    Raises:
        StageError: OUT_OF_DISK if they do not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < sum(value.nbytes for value in tensors.values()):
        raise out_of_disk(folder)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
    save_file(
        {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def load_exactly(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Loads a state dict that must match the module tensor by tensor.

    Raises:
        StageError: CORRUPT_ARTIFACT that names unknown, missing and misshapen tensors.
    """
    wanted = module.state_dict()
    problems = [f"unknown {name}" for name in sorted(state.keys() - wanted.keys())]
    problems += [f"missing {name}" for name in sorted(wanted.keys() - state.keys())]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & state.keys())
        if state[name].shape != wanted[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise StageError(
            FailureReason.CORRUPT_ARTIFACT, f"Tensors of {folder.name} do not fit its config.json: {shown}."
        )
    module.load_state_dict(state)
