"""Attention over the paged key-value cache, as the two operators that SGLang's ``intel_amx`` backend calls.

Requests with equally many query tokens are one padded batch and one fused attention call; a decode step
or a verification of drafts is always such a batch, a prefill mostly not.
"""

# ruff: noqa: PLR0917  the signatures are SGLang's

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_DECODE = (
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int window, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_EXTEND = (
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor(b!) k_buffer, "
    "Tensor(c!) v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, "
    "float sm_scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks, "
    "Tensor? tree_mask, bool is_causal) -> ()"
)


def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    tree: Tensor | None,
) -> Tensor:
    """Causal grouped-query attention of the last ``n`` tokens of each of ``B`` sequences.

    Args:
        query: [B, n, query heads, D].
        k_cache: [slots, key heads, D].
        v_cache: [slots, key heads, Dv].
        slots: [B, L], cache slots of each sequence, padded on the right with any valid slot.
        seq_lens: [B], at most L, the ``n`` tokens included.
        scale: of the logits.
        window: tokens that a token sees, itself included; 0 or less: all.
        tree: [B, n, n] bool, which of the ``n`` tokens sees which; None: the causal order.

    Returns:
        [B, n, query heads, Dv].
    """
    batch, n, heads, _ = query.shape
    length, key_heads = slots.shape[1], k_cache.shape[1]
    groups = heads // key_heads
    key_position = torch.arange(length)
    query_position = seq_lens[:, None] - n + torch.arange(n)  # [B, n]
    visible = key_position <= query_position[..., None]  # [B, n, L]
    if tree is not None:
        # Prefix columns of a tree's rows are all visible; the last n columns are the tree's own.
        column = (key_position - (seq_lens[:, None] - n))[:, None].expand(batch, n, length)  # [B, n, L]
        in_tree = (column >= 0) & (column < n)
        visible = torch.where(in_tree, tree.gather(2, column.clamp(0, n - 1)), column < 0)
    if window > 0:
        visible &= key_position > query_position[..., None] - window
    # The query heads that share a key head become rows of one attention problem: no key is copied
    # per query head. [B, n, heads, D] -> [B, key heads, groups * n, D]
    query = query.view(batch, n, key_heads, groups, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, key_heads, groups * n, -1)
    key, value = _gather(k_cache, slots), _gather(v_cache, slots)
    mask = visible[:, None].repeat(1, 1, groups, 1) if n > 1 else visible[:, None]
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    attended = attended.view(batch, key_heads, groups, n, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch, n, heads, -1)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of the cache, [B, L] slots -> [B, key heads, L, D].

    ``index_select`` of flat rows is eight times as fast as indexing with [B, L].
    """
    rows = cache.flatten(1).index_select(0, slots.reshape(-1))
    return rows.view(*slots.shape, *cache.shape[1:]).transpose(1, 2)


def _refuse(*, logit_cap: float, is_cross: bool, sinks: Tensor | None) -> None:
    if logit_cap > 0 or is_cross or sinks is not None:
        raise NotImplementedError("the CPU stand-in has neither logit capping nor cross-attention nor attention sinks")


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,  # noqa: ARG001  of fp8 caches
    v_scale: float,  # noqa: ARG001
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,  # noqa: ARG001  the real kernel's scratch space
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,  # noqa: FBT001
    window: int,
    encoder_lens: Tensor | None,  # noqa: ARG001
    sinks: Tensor | None,
) -> None:
    """Store the new token's key and value, then attend: one query token a request."""
    _refuse(logit_cap=logit_cap, is_cross=is_cross_attn, sinks=sinks)
    if key is not None and value is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
    output.copy_(_attend(query[:, None], k_cache, v_cache, slots, seq_lens, sm_scale, window, None)[:, 0])


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,  # noqa: ARG001  the backend has stored both already
    v: Tensor | None,  # noqa: ARG001
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,  # noqa: ARG001  of fp8 caches
    v_scale: float,  # noqa: ARG001
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,  # noqa: ARG001
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,  # noqa: FBT001
    window: int,
    encoder_lens: Tensor | None,  # noqa: ARG001
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,  # noqa: FBT001
) -> None:
    """Attend for the last ``extend_seq_lens[i]`` tokens of each request, whose keys are stored already."""
    _refuse(logit_cap=logit_cap, is_cross=is_cross or not is_causal, sinks=sinks)
    lengths = extend_seq_lens.tolist()
    for n in set(lengths):
        if n == 0:
            continue
        same = torch.tensor([i for i, other in enumerate(lengths) if other == n])
        ends = seq_lens[same]
        slots = req_to_token[req_pool_indices[same], : int(ends.max())]
        rows = extend_start_loc[same, None] + torch.arange(n)
        # A tree mask comes only with a verification, where every request extends by the same n.
        tree = None if tree_mask is None else tree_mask.view(len(lengths), n, n).bool()
        o[rows] = _attend(q[rows], k_buffer, v_buffer, slots, ends, sm_scale, window, tree)


for _schema, _operator in ((_DECODE, decode_attention_cpu), (_EXTEND, extend_attention_cpu)):
    torch.library.define(f"sgl_kernel::{_operator.__name__}", _schema.removeprefix(_operator.__name__))
    torch.library.impl(f"sgl_kernel::{_operator.__name__}", "cpu", _operator)
