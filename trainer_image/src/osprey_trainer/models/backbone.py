"""The backbone: the first blocks of a small language model, with its embedding, final norm and head."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models import hf_names
from osprey_trainer.models.body import Attention, Body, Mlp, RMSNorm, Rotary

log = logging.getLogger(__name__)


class BackboneLayer(nn.Module):
    """A plain decoder block."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.self_attn = Attention(body, body.hidden_size)
        self.post_attention_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.mlp = Mlp(body)

    def forward(self, stream: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """stream: [B, T, H] -> [B, T, H]."""
        x = self.input_layernorm(stream)
        queries = self.self_attn.queries(x, cos_sin)
        stream = stream + self.self_attn.output(_causal(queries, *self.self_attn.keys_values(x, cos_sin)))
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal self-attention of whole sequences: [B, T, heads, D] and twice [B, T, kv_heads, D] -> [B, T, heads, D]."""
    group = queries.shape[2] // keys.shape[2]
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (keys, values))
    mixed = functional.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, is_causal=True)
    return mixed.transpose(1, 2)


class Backbone(nn.Module):
    """A pruned language model. Its state dict is a Hugging Face checkpoint without the `model.` prefix.

    Attributes:
        hf_config: the `config.json` it is saved with.
    """

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.hf_config = dict(hf_config)
        self.body = body = Body.from_hf(hf_config)
        vocab_size = hf_config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocab_size, body.hidden_size)
        self.layers = nn.ModuleList(BackboneLayer(body) for _ in range(body.num_layers))
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        if not hf_config.get("tie_word_embeddings", False):
            self.lm_head = nn.Linear(body.hidden_size, vocab_size, bias=False)
        self.rotary = Rotary(body)

    @classmethod
    def prune(cls, folder: Path, layers: int) -> Self:
        """The first `layers` blocks of the language model in `folder`, in fp32.

        Raises:
            StageError: INVALID_CONFIG if it has fewer blocks; UNSUPPORTED_MODEL, CORRUPT_ARTIFACT.
        """
        config = hf_names.read_config(folder)
        available = Body.from_hf(config).num_layers
        if not 1 <= layers <= available:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"layers is {layers}, but the source has {available} blocks; choose 1 to {available}.",
            )
        kept: dict[str, Any] = {"num_hidden_layers": layers}
        if config.get("layer_types"):
            kept["layer_types"] = config["layer_types"][:layers]
        tensors = hf_names.read_tensors(folder, skip=lambda name: hf_names.is_pruned(name, layers))
        if config.get("tie_word_embeddings") and hf_names.has_own_head(tensors):
            log.warning(
                "%s: tie_word_embeddings is true, but its head is not its embedding: both are kept", folder.name
            )
            kept["tie_word_embeddings"] = False
        backbone = cls(config | kept)
        hf_names.load_exactly(backbone, hf_names.backbone_from_hf(tensors, backbone.hf_config), folder)
        return backbone

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads what `save` wrote, or any small model of a supported family, in fp32."""
        return cls.prune(folder, hf_names.read_config(folder)["num_hidden_layers"])

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`, in fp32, as transformers reads them."""
        config = self.hf_config | {"dtype": "float32"}
        hf_names.write_folder(folder, config, hf_names.backbone_to_hf(self.state_dict()))

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: the head, which may be the embedding."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [B, T] -> output of the final norm [B, T, H]; logits are `hidden @ head_weight.T`."""
        cos_sin = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        stream: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            stream = layer(stream, cos_sin)
        normed: Tensor = self.norm(stream)
        return normed
