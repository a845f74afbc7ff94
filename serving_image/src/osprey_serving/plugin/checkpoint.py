"""The published checkpoint format of Osprey drafters: which tensors, of which shapes, and the draft vocabulary.

Reads only headers (and ``d2t``), with the standard library, so a whole drafter is checked in milliseconds
before SGLang loads a byte of it.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3")
"""Names of the format; SGLang itself knows the first, for drafters without ``swap_h_and_emb``."""

Shapes = dict[str, tuple[int, ...]]

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


class CheckpointError(ValueError):
    """A drafter's folder does not hold what the format asks for; the message says what."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_osprey(config: Mapping[str, Any]) -> bool:
    """Whether the context goes in front of the residual stream, in every layer."""
    return bool(config.get("swap_h_and_emb"))


def architecture(config: Mapping[str, Any]) -> str:
    """The first of the config's ``architectures``, which SGLang goes by; empty without one."""
    names: list[str] = config.get("architectures") or [""]
    return names[0]


def read_config(folder: Path) -> dict[str, Any]:
    """The drafter's ``config.json``.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no drafter: it has no config.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return config


def tapped_layers(config: Mapping[str, Any]) -> int:
    """How many hidden states of the target are concatenated before ``fc``."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if ids else 3


def expected_tensors(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of every tensor of an Osprey checkpoint, from its config.

    Raises:
        CheckpointError: the config lacks a size, or asks for what the drafter's class does not have.
    """
    missing = [key for key in _REQUIRED if not config.get(key)]
    if missing:
        raise CheckpointError(f"the drafter's config.json lacks {', '.join(missing)}")
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if config.get(key):
            raise CheckpointError(f"the drafter's config.json says {key}: true; an Osprey drafter has false")
    H, I, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]  # noqa: E741
    heads = config["num_attention_heads"]
    D = config.get("head_dim") or H // heads  # where they are left out, SGLang reads them so
    queries, keys = heads * D, (config.get("num_key_value_heads") or heads) * D
    draft_vocabulary = config.get("draft_vocab_size") or V
    features = tapped_layers(config) * (config.get("target_hidden_size") or H)
    if features == H:
        raise CheckpointError(
            f"the tapped hidden states together are as wide as the drafter ({H}): "
            "SGLang tells them apart by their width; tap another number of layers"
        )
    shapes: Shapes = {
        "embed_tokens.weight": (V, H),
        "fc.weight": (H, features),
        "norm.weight": (H,),
        "lm_head.weight": (draft_vocabulary, H),
        "d2t": (draft_vocabulary,),
        "t2d": (V,),
    }
    layers = config["num_hidden_layers"]
    for i in range(layers):
        block = "midlayer" if layers == 1 else f"layers.{i}"
        shapes |= {
            f"{block}.input_layernorm.weight": (H,),
            f"{block}.hidden_norm.weight": (H,),
            f"{block}.post_attention_layernorm.weight": (H,),
            f"{block}.self_attn.q_proj.weight": (queries, 2 * H),
            f"{block}.self_attn.k_proj.weight": (keys, 2 * H),
            f"{block}.self_attn.v_proj.weight": (keys, 2 * H),
            f"{block}.self_attn.o_proj.weight": (H, queries),
            f"{block}.mlp.gate_proj.weight": (I, H),
            f"{block}.mlp.up_proj.weight": (I, H),
            f"{block}.mlp.down_proj.weight": (H, I),
        }
        if has_qkv_bias(config):
            shapes |= {
                f"{block}.self_attn.q_proj.bias": (queries,),
                f"{block}.self_attn.k_proj.bias": (keys,),
                f"{block}.self_attn.v_proj.bias": (keys,),
            }
        if has_head_norms(config):
            shapes |= {f"{block}.self_attn.{name}.weight": (D,) for name in ("q_norm", "k_norm")}
    return shapes


def has_qkv_bias(config: Mapping[str, Any]) -> bool:
    """Whether the projections to queries, keys and values add a bias, as in Qwen2."""
    return config.get("model_type") == "qwen2" and not has_head_norms(config)


def has_head_norms(config: Mapping[str, Any]) -> bool:
    """Whether each query and key head is normed, as in Qwen3."""
    return architecture(config).startswith("Qwen3")


def compare(expected: Shapes, found: Shapes, *, complete: bool = True) -> None:
    """Check that the tensors found are those expected; without ``complete``, some of them.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    # t2d is for training; d2t says nothing when the draft vocabulary is the whole one.
    optional = {"t2d"} | ({"d2t"} if expected["d2t"] == expected["t2d"] else set())
    missing = expected.keys() - found.keys() - optional if complete else set()
    problems = [f"{name} is missing" for name in sorted(missing)]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and found[name] != shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"the drafter's tensors do not fit its config.json: {shown}")


def stored_tensors(folder: Path) -> Shapes:
    """Name and shape of every tensor in the folder's safetensors files.

    Raises:
        CheckpointError: there is no such file, or one is broken.
    """
    return {name: entry.shape for name, entry in _entries(folder).items()}


def target_ids(folder: Path) -> list[int] | None:
    """The target's token id of each draft token, from ``d2t``, which stores differences; None without it.

    Raises:
        CheckpointError: ``d2t`` is not int64, or its file is broken.
    """
    entry = _entries(folder).get("d2t")
    if entry is None:
        return None
    if entry.dtype != "I64":
        raise CheckpointError(f"d2t is {entry.dtype} instead of int64")
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        offsets = struct.unpack(f"<{(entry.end - entry.start) // 8}q", file.read(entry.end - entry.start))
    return [draft_id + offset for draft_id, offset in enumerate(offsets)]


def check(folder: Path) -> dict[str, Any]:
    """Check a whole Osprey drafter.

    Returns:
        Its config.

    Raises:
        CheckpointError: see the other functions; or a draft token maps to no token of the target.
    """
    config = read_config(folder)
    compare(expected_tensors(config), stored_tensors(folder))
    ids = target_ids(folder)
    if ids is not None and not all(0 <= token < config["vocab_size"] for token in ids):
        raise CheckpointError("d2t maps a draft token to an id outside the target's vocabulary")
    return config


def _entries(folder: Path) -> dict[str, _Entry]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file")
    entries: dict[str, _Entry] = {}
    for path in files:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            size = path.stat().st_size
            if not 0 < length <= size - 8:
                raise CheckpointError(f"{path} is no complete safetensors file")
            try:
                header = json.loads(file.read(length))
            except ValueError:
                raise CheckpointError(f"{path} is no safetensors file") from None
        header.pop("__metadata__", None)
        for name, value in header.items():
            start, end = (8 + length + offset for offset in value["data_offsets"])
            if end > size:
                raise CheckpointError(f"{path} is cut off: {name} reaches beyond its end")
            entries[name] = _Entry(path, value["dtype"], tuple(value["shape"]), start, end)
    return entries
