"""The Osprey drafter as an SGLang draft model.

Every layer attends from ``cat(input_layernorm(context), hidden_norm(stream))``, 2H wide. The residual stream
starts as the drafter's own token embedding. The context is the same for every layer: ``fc`` of the tapped
hidden states on tokens that the target has seen, the drafter's own last pre-norm stream on drafted ones.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import llama_eagle3
from sglang.srt.models.llama import LlamaAttention, LlamaDecoderLayer
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils import add_prefix
from torch import Tensor, nn

from osprey_serving.plugin import checkpoint
from osprey_serving.plugin.failure import stop

_FUSED = (
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)
"""Tensors that SGLang keeps as shards of one parameter: (stored, parameter, shard)."""


class _HeadNormAttention(LlamaAttention):  # type: ignore[misc]
    """Llama's attention with an RMSNorm on each query and key head, as Qwen3 has."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward_prepare_native(self, positions: Tensor, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Project, norm each head, rotate."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(q=q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim)
        q, k = self.rotary_emb(positions, q, k)
        return q, k, v


class OspreyLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama block whose attention reads context and stream side by side."""

    self_attn: Any

    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str, window: int | None) -> None:
        super().__init__(config, layer_id, quant_config=quant_config, prefix=prefix, stage_boundaries=False)
        if checkpoint.has_head_norms(config.to_dict()):
            llama = self.self_attn
            self.self_attn = _HeadNormAttention(
                config,
                hidden_size=llama.hidden_size,
                num_heads=llama.total_num_heads,
                num_kv_heads=llama.total_num_kv_heads,
                layer_id=layer_id,
                rope_theta=llama.rope_theta,
                rope_scaling=_rope_scaling(config),
                max_position_embeddings=llama.max_position_embeddings,
                quant_config=quant_config,
                prefix=add_prefix("self_attn", prefix),
            )
        attention = self.self_attn
        if window is not None:
            attention.attn.sliding_window_size = window
        attention.qkv_proj = QKVParallelLinear(
            2 * config.hidden_size,
            attention.head_dim,
            attention.total_num_heads,
            attention.total_num_kv_heads,
            bias=checkpoint.has_qkv_bias(config.to_dict()),
            quant_config=quant_config,
            prefix=add_prefix("self_attn.qkv_proj", prefix),
        )
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions: Tensor, context: Tensor, stream: Tensor, forward_batch: Any) -> Tensor:
        """One block.

        Args:
            positions: [tokens].
            context: [tokens, H].
            stream: [tokens, H], the residual.
            forward_batch: SGLang's.

        Returns:
            The next stream, [tokens, H], not normed.
        """
        pair = torch.cat([self.input_layernorm(context), self.hidden_norm(stream)], dim=-1)
        attended = self.self_attn(positions=positions, hidden_states=pair, forward_batch=forward_batch)
        normed, stream = self.post_attention_layernorm(attended, stream)
        return stream + self.mlp(normed)  # type: ignore[no-any-return]  # SGLang has no types


class OspreyModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, config: Any, quant_config: Any, prefix: str, window: int | None) -> None:
        super().__init__()
        H = config.hidden_size
        taps = checkpoint.tapped_layers(config.to_dict())
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, H, prefix=add_prefix("embed_tokens", prefix))
        self.fc = nn.Linear(taps * (getattr(config, "target_hidden_size", None) or H), H, bias=False)
        with layer_stack():
            self.layers = nn.ModuleList(
                OspreyLayer(config, i, quant_config, add_prefix(f"layers.{i}", prefix), window)
                for i in range(config.num_hidden_layers)
            )
        self.norm = RMSNorm(H, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,  # noqa: ARG002  SGLang's calling convention
    ) -> tuple[Tensor, list[Tensor]]:
        """Draft one step.

        Returns:
            The normed stream, for the logits; and the stream before the norm, the next step's context.
        """
        stream = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        if stream.shape[0] == 0:  # an idle rank
            return stream, [stream]
        context = forward_batch.spec_info.hidden_states
        if context.shape[-1] == self.fc.in_features:  # hidden states of the target; never as wide as H
            context = self.fc(context)
        for layer in self.layers:
            stream = layer(positions, context, stream, forward_batch)
        return self.norm(stream), [stream]


class LlamaForCausalLMEagle3(llama_eagle3.LlamaForCausalLMEagle3):  # type: ignore[misc]
    """SGLang's own EAGLE-3 drafter, unless the config says ``swap_h_and_emb``: then an Osprey one."""

    def __new__(cls, config: Any, *_: Any, **__: Any) -> Any:
        """Choose the class: both kinds are published under one architecture name."""
        chosen = OspreyDrafter if checkpoint.is_osprey(config.to_dict()) else cls
        return nn.Module.__new__(chosen)


class OspreyDrafter(LlamaForCausalLMEagle3):
    """An Osprey drafter: own embedding and head, context in every layer, nothing skipped on loading."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        try:
            self._expected = checkpoint.expected_tensors(config.to_dict())
        except checkpoint.CheckpointError as error:
            stop(str(error))
        # What SGLang reads of an EAGLE-3 drafter:
        self.config, self.quant_config, self.pp_group = config, quant_config, get_parallel().pp_group
        self.load_lm_head_from_target = False
        self.capture_aux_hidden_states = True
        self.hot_token_id: Tensor | None = None
        self._draft_window_size = get_spec().speculative_draft_window_size

        draft_vocabulary = self._expected["lm_head.weight"][0]
        self.model = OspreyModel(config, quant_config, add_prefix("model", prefix), self._draft_window_size)
        self.lm_head = ParallelLMHead(
            draft_vocabulary,
            config.hidden_size,
            quant_config=quant_config,
            prefix=add_prefix("lm_head", prefix),
        )
        draft_config = copy.deepcopy(config)
        draft_config.vocab_size = draft_vocabulary
        self.logits_processor = LogitsProcessor(draft_config)
        self._loaded = False

    def set_embed(self, embed: Tensor) -> None:
        """Keep the drafter's own embedding: it is trained, and often not even initialised from the target's."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint; the first load, at start, ends the process if it does not fit.

        Raises:
            CheckpointError: a later one brings an unknown or misshapen tensor, or another ``d2t``.
        """
        try:
            self._load(weights)
        except checkpoint.CheckpointError as error:
            if self._loaded:
                raise
            stop(str(error))
        self._loaded = True

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        found: checkpoint.Shapes = {}
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            found[name] = tuple(tensor.shape)
            if self._expected.get(name) != found[name] or name == "t2d":
                continue  # a wrong one is told below, together with all others
            if name == "d2t":
                self._set_target_ids(tensor)
                continue
            target = name.replace("midlayer.", "layers.0.")
            shard: tuple[Any, ...] = ()
            for stored, fused, index in _FUSED:
                if stored in target:
                    target, shard = target.replace(stored, fused), (index,)
            parameter = parameters[target if target in parameters else f"model.{target}"]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *shard)
        # An update of a running server may come in parts.
        checkpoint.compare(self._expected, found, complete=not self._loaded)

    def _set_target_ids(self, d2t: Tensor) -> None:
        ids = d2t + torch.arange(d2t.numel(), device=d2t.device)
        if self._loaded and (self.hot_token_id is None or not torch.equal(ids.cpu(), self.hot_token_id.cpu())):
            raise checkpoint.CheckpointError("d2t changed: SGLang copies it once at start; restart the server")
        self.hot_token_id = ids


class Qwen3ForCausalLMEagle3(OspreyDrafter):
    """The name that a drafter with a Qwen3 body is published under; SGLang has no class of that name."""

    def __new__(cls, config: Any, *_: Any, **__: Any) -> Any:
        """Refuse what is no Osprey drafter.

        An EAGLE-3 drafter of that name would lose its head norms on SGLang's Llama class.
        """
        if not checkpoint.is_osprey(config.to_dict()):
            stop(
                "a drafter of architecture Qwen3ForCausalLMEagle3 needs swap_h_and_emb: true in its config.json; "
                "SGLang serves no EAGLE-3 drafter with per-head norms"
            )
        return nn.Module.__new__(cls)


def _rope_scaling(config: Any) -> Any:
    parameters = getattr(config, "rope_parameters", None)
    return parameters if parameters is not None else getattr(config, "rope_scaling", None)


EntryClass = [LlamaForCausalLMEagle3, Qwen3ForCausalLMEagle3]
