"""The drafter: a Llama-type body whose attention also sees a context made of the target's hidden states.

In every layer the attention input is cat(input_layernorm(first), hidden_norm(stream)), 2H wide:

* Osprey (`swap_h_and_emb`): first = context, the same for every layer; the residual stream starts as the
  token embedding, as it did in the backbone's language model.
* EAGLE-3: one layer; first = token embedding; the residual stream starts as the context.

The context is fc(three tapped hidden states of the target) at step 0 of the unroll, and the drafter's own
last stream before the final norm afterwards.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models import hf_names
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.body import Attention, Body, Family, Mlp, RMSNorm, Rotary
from osprey_trainer.models.published import completed
from osprey_trainer.vocabulary import Alignment, DraftVocabulary

_INITIALISER_STD = 0.02
_DEFAULT_TAPS = 3
VOCABULARY_FIELD = "target_vocabulary_digest"
"""Of a drafter's `config.json`: our own word, which SGLang passes over."""
_ARCHITECTURE_OF = {Family.QWEN3: "Qwen3ForCausalLMEagle3"}
"""Under which drafters are published; all others are called after Llama."""


class Arrangement(StrEnum):
    """Which of embedding and context comes first in the attention input, and which is the residual stream."""

    OSPREY = "osprey"
    EAGLE3 = "eagle3"


@dataclass(frozen=True)
class DraftConfig:
    """Everything but the weights.

    Attributes:
        vocab_size: V, rows of the target's embedding, padding included.
        draft_vocab_size: Vd, rows of the drafter's head.
        target_hidden_size: Ht.
        tapped_layers: "input to layer j" convention; None: those of `default_tapped_layers`, which depend on the
            target's depth. A drafter that is published without them is written without them.
        target_vocabulary: `TokenTable.digest` of the target's tokenizer; None: unknown, as of all that others publish.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` of the target, copied to the export.
        dtype: of the target, by torch's name. The server runs a drafter in what its config says, and takes a float32
            for float16, so that beside a bfloat16 target nothing else will do. The tensors stay fp32 all the same.
    """

    arrangement: Arrangement
    body: Body
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tapped_layers: tuple[int, ...] | None
    token_ids: Mapping[str, Any]
    dtype: str
    target_vocabulary: str | None = None

    @property
    def num_taps(self) -> int:
        """Hidden states of the target that `fc` takes, side by side."""
        return _DEFAULT_TAPS if self.tapped_layers is None else len(self.tapped_layers)


class DrafterLayer(nn.Module):
    """One decoder block with a 2H-wide attention input."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.hidden_norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.self_attn = Attention(body, 2 * body.hidden_size)
        self.post_attention_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.mlp = Mlp(body)

    def attention_input(self, first: Tensor, stream: Tensor) -> Tensor:
        """first, stream: [B, T, H] -> [B, T, 2H]."""
        return torch.cat([self.input_layernorm(first), self.hidden_norm(stream)], dim=-1)

    def add(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Adds the attention's output, then the feed-forward block, to the residual stream."""
        stream = stream + attended
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class Drafter(nn.Module):
    """The drafter. Its state dict is the published checkpoint, save for the name of a single layer.

    `unroll.unroll` is its forward pass for training and simulation.
    """

    t2d: Tensor
    d2t: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        body = config.body
        if config.arrangement is Arrangement.EAGLE3 and body.num_layers != 1:
            raise StageError(FailureReason.INVALID_CONFIG, f"An EAGLE-3 drafter has one layer, not {body.num_layers}.")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, body.hidden_size)
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, body.hidden_size, bias=False)
        self.layers = nn.ModuleList(DrafterLayer(body) for _ in range(body.num_layers))
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.lm_head = nn.Linear(body.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(body)
        identity = DraftVocabulary.identity(config.vocab_size)
        self.register_buffer("d2t", identity.d2t[: config.draft_vocab_size])
        self.register_buffer("t2d", identity.t2d)

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        alignment: Alignment,
        *,
        target_config: Mapping[str, Any],
        tapped_layers: tuple[int, ...],
        target_vocabulary: str | None = None,
    ) -> Self:
        """The Osprey drafter that computes exactly the backbone's language model: QKV [0, W], fc identity.

        Args:
            backbone: the pruned language model, pretrained or not.
            alignment: the target's vocabulary in terms of the backbone's.
            target_config: the target's `config.json`.
            tapped_layers: "input to layer j" convention.
            target_vocabulary: see `DraftConfig`.
        """
        text = text_config(target_config)
        body = dataclasses.replace(backbone.body, max_position_embeddings=text["max_position_embeddings"])
        config = _config(Arrangement.OSPREY, body, target_config, tapped_layers, target_vocabulary)
        drafter = cls(config)
        embedding = backbone.embed_tokens.weight.detach()
        weights = hf_names.drafter_from_backbone(
            backbone.state_dict(),
            num_layers=body.num_layers,
            target_hidden_size=config.target_hidden_size,
            num_taps=len(tapped_layers),
        )
        weights["embed_tokens.weight"] = alignment.apply(embedding)
        weights["lm_head.weight"] = alignment.apply(backbone.head_weight.detach())
        drafter.load_state_dict(weights | {"d2t": drafter.d2t, "t2d": drafter.t2d})
        return drafter

    @classmethod
    def from_scratch(
        cls,
        *,
        target_config: Mapping[str, Any],
        target_embedding: Tensor,
        tapped_layers: tuple[int, ...],
        seed: int,
        target_vocabulary: str | None = None,
    ) -> Self:
        """The EAGLE-3 baseline: one layer of the target's sizes, its embedding copied, all else random.

        Args:
            target_config: the target's `config.json`.
            target_embedding: [V, Ht].
            tapped_layers: "input to layer j" convention.
            seed: of the random weights.
            target_vocabulary: see `DraftConfig`.
        """
        body = Body.one_layer_like(text_config(target_config))
        drafter = cls(_config(Arrangement.EAGLE3, body, target_config, tapped_layers, target_vocabulary))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in drafter.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(std=_INITIALISER_STD, generator=generator)
            drafter.embed_tokens.weight.copy_(target_embedding)
        return drafter

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads a checkpoint in the published format, in fp32.

        Raises:
            StageError: CORRUPT_ARTIFACT for unknown, missing or misshapen tensors, or `d2t` and `t2d` that do not
                belong together; UNSUPPORTED_MODEL for a config of another kind.
        """
        config = _config_from_json(completed(hf_names.read_config(folder), name=folder.name))
        state = hf_names.from_published(hf_names.read_tensors(folder), num_layers=config.body.num_layers)
        drafter = cls(config)
        hf_names.load_exactly(drafter, state, folder)
        hf_names.check_draft_vocabulary(drafter.d2t, drafter.t2d, folder)
        return drafter

    def save(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`, in fp32, in the published format, which SGLang serves."""
        weights = hf_names.to_published(self.state_dict(), num_layers=self.config.body.num_layers)
        hf_names.write_folder(folder, _config_to_json(self.config), weights)

    def with_draft_vocabulary(self, vocabulary: DraftVocabulary) -> "Drafter":
        """The same drafter with only these rows of the head.

        Raises:
            StageError: INVALID_CONFIG if the head is already compressed: the mapping is frozen for life.
        """
        if self.config.draft_vocab_size != self.config.vocab_size:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The drafter already has a draft vocabulary of {self.config.draft_vocab_size} tokens, and "
                "keeps it for life; start from a converted drafter to choose another.",
            )
        config = dataclasses.replace(self.config, draft_vocab_size=len(vocabulary.ids))
        drafter = Drafter(config)
        state = self.state_dict() | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
        state["lm_head.weight"] = self.lm_head.weight.detach()[vocabulary.ids]
        drafter.load_state_dict(state)
        return drafter

    def for_target(self, target_config: Mapping[str, Any]) -> "Drafter":
        """The same drafter, with what its config says of the target as this target's own config says it.

        Published ones are often wrong there: a context of 2048 tokens, another dtype, no end token.
        """
        text = text_config(target_config)
        body = dataclasses.replace(self.config.body, max_position_embeddings=text["max_position_embeddings"])
        config = dataclasses.replace(
            self.config, body=body, token_ids=_token_ids(text), dtype=_target_dtype(target_config)
        )
        drafter = Drafter(config)
        drafter.load_state_dict(self.state_dict())
        return drafter

    @property
    def draft_ids(self) -> Tensor:
        """int64 [Vd]: the target's token id of every row of the head, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def arrange(self, embedding: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """-> (first half of every layer's attention input, start of the residual stream)."""
        if self.config.arrangement is Arrangement.OSPREY:
            return context, embedding
        return embedding, context


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a `config.json`: of a multimodal target it lies one level down."""
    nested: Mapping[str, Any] = config.get("text_config", config)
    return nested


def _config(
    arrangement: Arrangement,
    body: Body,
    target: Mapping[str, Any],
    tapped_layers: tuple[int, ...],
    target_vocabulary: str | None,
) -> DraftConfig:
    text = text_config(target)
    return DraftConfig(
        arrangement=arrangement,
        body=body,
        vocab_size=text["vocab_size"],
        draft_vocab_size=text["vocab_size"],
        target_hidden_size=text["hidden_size"],
        tapped_layers=tapped_layers,
        token_ids=_token_ids(text),
        dtype=_target_dtype(target),
        target_vocabulary=target_vocabulary,
    )


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields.get(name) for name in hf_names.TOKEN_ID_FIELDS}


def _target_dtype(target: Mapping[str, Any]) -> str:
    return _dtype(text_config(target)) or _dtype(target) or "float32"


def _dtype(fields: Mapping[str, Any]) -> str | None:
    """The dtype that a `config.json` names, by its new or its old name."""
    return fields.get("dtype") or fields.get("torch_dtype")


def _config_to_json(config: DraftConfig) -> dict[str, Any]:
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if config.tapped_layers is not None:
        # These name layers whose *output* is tapped: the input of layer j is the output of j - 1.
        eagle["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in config.tapped_layers]
    known = {} if config.target_vocabulary is None else {VOCABULARY_FIELD: config.target_vocabulary}
    return {
        **config.body.to_hf(),
        **known,
        **config.token_ids,
        "architectures": [_ARCHITECTURE_OF.get(config.body.family, "LlamaForCausalLMEagle3")],
        "dtype": config.dtype,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "swap_h_and_emb": config.arrangement is Arrangement.OSPREY,
        "eagle_config": eagle,
    }


def _config_from_json(fields: Mapping[str, Any]) -> DraftConfig:
    try:
        ids = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        swapped = fields.get("swap_h_and_emb", False)
        return DraftConfig(
            arrangement=Arrangement.OSPREY if swapped else Arrangement.EAGLE3,
            body=Body.from_hf(fields),
            vocab_size=fields["vocab_size"],
            draft_vocab_size=fields["draft_vocab_size"],
            target_hidden_size=fields["target_hidden_size"],
            tapped_layers=tuple(layer + 1 for layer in ids) if ids else None,
            token_ids=_token_ids(fields),
            dtype=_dtype(fields) or "float32",
            target_vocabulary=fields.get(VOCABULARY_FIELD),
        )
    except KeyError as error:
        raise StageError(FailureReason.CORRUPT_ARTIFACT, f"The drafter's config.json lacks {error}.") from error
