"""The parts of a Llama-type body that the backbone and the drafter share: Llama, Mistral, Qwen2, Qwen3.

Attributes are named as in Hugging Face checkpoints of these, so a state dict needs no second set of names.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

# Types whose frequencies do not depend on the length of the sequence that is being run: the trainer and the
# server then agree whatever the batch.
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
# Those that do are what they are up to the length that the model was first trained on: `dynamic` is plain, `longrope`
# divides by its short factors. A drafter is trained within it, and the server switches beyond it, if at all.
_ROPE_OF_THE_FIRST_LENGTH = frozenset({"dynamic", "longrope"})
_RELATIVE_TO_THE_FIRST_LENGTH = frozenset({"llama3", "yarn", "longrope"})
_RMS_NORM_EPS = 1e-6
"""Of a target that has no RMSNorm of its own."""


class Family(StrEnum):
    """What distinguishes the bodies: nothing, biases of the QKV projections, or norms of each query and key head."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


_FAMILY_OF = {"llama": Family.LLAMA, "mistral": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}
"""By `model_type`. A Mistral that sees its whole context is a Llama."""
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
"""What all bodies here have in common, where a config says it at all."""


@dataclass(frozen=True)
class Body:
    """Sizes of a body; enough to build its layers.

    Attributes:
        rope: the `rope_parameters` of transformers 5 (`rope_type`, `rope_theta`, and what the type needs).
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Body":
        """Reads the fields of a `config.json`, old RoPE schema (`rope_theta`, `rope_scaling`) or new.

        Raises:
            StageError: UNSUPPORTED_MODEL when the body is none that this module computes.
        """
        family = _FAMILY_OF.get(config.get("model_type", ""))
        if family is None:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                f"The body is of model type {config.get('model_type')!r}; supported are {', '.join(_FAMILY_OF)}. "
                "Choose a source of one of these, or leave the backbone out to train EAGLE-3 from scratch.",
            )
        for field, expected in _FIXED.items():
            if config.get(field, expected) != expected:
                raise StageError(
                    FailureReason.UNSUPPORTED_MODEL,
                    f"The body has {field}={config[field]!r}; only {field}={expected!r} is supported.",
                )
        _refuse_a_window(config)
        return dataclasses.replace(
            cls._of_sizes(config), family=family, num_layers=config["num_hidden_layers"], rope=rope_parameters(config)
        )

    @classmethod
    def one_layer_like(cls, target: Mapping[str, Any]) -> "Body":
        """A Llama block of a target's sizes, whatever the target's own blocks are: what EAGLE-3 trains from scratch.

        RoPE angles that depend on the length of the sequence are replaced by plain ones of the same base.
        """
        rope = _rope_fields(target)
        if rope["rope_type"] not in _STATIC_ROPE - {"proportional"}:
            rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return dataclasses.replace(cls._of_sizes(target), rope=rope)

    @classmethod
    def _of_sizes(cls, config: Mapping[str, Any]) -> "Body":
        heads = config["num_attention_heads"]
        return cls(
            family=Family.LLAMA,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=1,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", _RMS_NORM_EPS),
            max_position_embeddings=config["max_position_embeddings"],
            rope={},
        )

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values add a bias, as in Qwen2."""
        return self.family is Family.QWEN2

    @property
    def has_head_norms(self) -> bool:
        """Whether each query and key head is normed before it is rotated, as in Qwen3."""
        return self.family is Family.QWEN3

    def to_hf(self) -> dict[str, Any]:
        """The fields of a `config.json`, RoPE in both schemas: engines of either age read the same angles."""
        scaling = {key: value for key, value in self.rope.items() if key != "rope_theta"}
        return {
            "model_type": str(self.family),
            "hidden_act": "silu",
            "attention_bias": False,  # Qwen2's are implied by its type; this would mean one on the output as well
            "mlp_bias": False,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": dict(self.rope),
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": None if self.rope["rope_type"] == "default" else scaling,
        }


def _refuse_a_window(config: Mapping[str, Any]) -> None:
    """A layer that sees only the last tokens is another model; Qwen's configs name a window that is off."""
    limit = config["max_position_embeddings"]
    on = config.get("model_type") == "mistral" and (config.get("sliding_window") or limit) < limit
    if on or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            "The body has sliding-window attention, which is not supported: choose a source whose layers see the whole "
            "context.",
        )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE of a `config.json` in the schema of transformers 5.

    What transformers would derive from `max_position_embeddings` is written down, since a drafter gets its target's.

    Raises:
        StageError: UNSUPPORTED_MODEL for a type that is not computed here, or one that turns only a part of each head;
            INVALID_CONFIG for two schemas that contradict each other.
    """
    rope = _rope_fields(config)
    kind, theta = rope["rope_type"], config.get("rope_theta")
    if theta is not None and theta != rope["rope_theta"]:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"config.json says rope_theta: {theta}, but {rope['rope_theta']} in rope_parameters: correct one of them.",
        )
    if kind not in _STATIC_ROPE | _ROPE_OF_THE_FIRST_LENGTH:
        supported = ", ".join(sorted(_STATIC_ROPE | _ROPE_OF_THE_FIRST_LENGTH))
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL, f"RoPE type {kind!r} is not supported; supported types are {supported}."
        )
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if kind != "proportional" and part != 1.0:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"The body turns only a part of each head (partial_rotary_factor={part}), which is not supported.",
        )
    if kind == "dynamic":
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if kind in _RELATIVE_TO_THE_FIRST_LENGTH:
        limit = config["max_position_embeddings"]
        first = config.get("original_max_position_embeddings") or limit
        rope.setdefault("original_max_position_embeddings", first)
        if kind == "longrope" and rope.get("factor") is None:
            rope["factor"] = limit / rope["original_max_position_embeddings"]
    return rope


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(found.get("full_attention", found))  # Gemma 3 has a set for each kind of layer
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


class RMSNorm(nn.Module):
    """Root-mean-square norm in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of x: [..., size]."""
        # A weight of another dtype than the input's loses the fused kernel, and autocast on a GPU gives fp32 back.
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of rotary position embeddings, by transformers' own frequencies."""

    inv_freq: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        # Sizes that do not matter for RoPE are left at their defaults: LlamaConfig refuses a hidden size that
        # is no multiple of the heads, which an explicit head_dim allows.
        config = LlamaConfig(
            head_dim=body.head_dim,
            max_position_embeddings=body.max_position_embeddings,
            rope_parameters=dict(body.rope),
        )
        hf = LlamaRotaryEmbedding(config)
        self.scaling = float(hf.attention_scaling)
        self.register_buffer("inv_freq", hf.inv_freq.float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int [...] -> cos, sin: fp32 [..., head_dim]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Applies RoPE to x: [..., heads, head_dim]; cos and sin: [..., head_dim]."""
    cos, sin = (part.unsqueeze(-2) for part in cos_sin)
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention; `input_size` is H for a backbone and 2H for a drafter."""

    def __init__(self, body: Body, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = body.num_heads, body.num_kv_heads, body.head_dim
        query_size, kv_size = body.num_heads * body.head_dim, body.num_kv_heads * body.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=body.has_qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=body.has_qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=body.has_qkv_bias)
        self.o_proj = nn.Linear(query_size, body.hidden_size, bias=False)
        self.q_norm = RMSNorm(body.head_dim, body.rms_norm_eps) if body.has_head_norms else None
        self.k_norm = RMSNorm(body.head_dim, body.rms_norm_eps) if body.has_head_norms else None

    def queries(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """x: [..., input_size] -> rotated queries [..., heads, head_dim]."""
        queries = self._heads(self.q_proj(x), self.num_heads)
        return rotate(queries if self.q_norm is None else self.q_norm(queries), cos_sin)

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x: [..., input_size] -> rotated keys and values, each [..., kv_heads, head_dim]."""
        keys = self._heads(self.k_proj(x), self.num_kv_heads)
        keys = rotate(keys if self.k_norm is None else self.k_norm(keys), cos_sin)
        return keys, self._heads(self.v_proj(x), self.num_kv_heads)

    def output(self, mixed: Tensor) -> Tensor:
        """mixed: [..., heads, head_dim] -> [..., H]."""
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim)


class Mlp(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=False)
        self.up_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=False)
        self.down_proj = nn.Linear(body.intermediate_size, body.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., H] -> [..., H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
