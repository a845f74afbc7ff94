"""Training-time test: the drafter runs K steps on its own output, as it will when serving.

At step 0 row i sees the target's taps at i and the token x_{i+1}; at step k its own last stream and the real token
x_{i+1+k}. It attends to the keys of step 0 of rows 0..i, and to its own keys of steps 1..k, under one softmax; RoPE
positions are i at step 0 and i + k at step k.

Only what is needed is computed. Rows that are not asked for (the prompt) serve as keys and values: in the last
layer they get no query, no output projection and no feed-forward block, and from step 1 on they are not run at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from osprey_trainer.models.body import Attention
from osprey_trainer.models.draft import Drafter, DrafterLayer

MANY_SCORES = 1 << 26
"""Scores of more rows and keys than this, 256 MiB in fp32, are formed a block of rows at a time, and once more for the
gradient: else those of all steps would lie in memory together."""
_BLOCK_ROWS = 512


@dataclass(frozen=True)
class _Memory:
    """Keys and values of one layer.

    Attributes:
        keys, values: [B, kv_heads, T, head_dim], of step 0, all rows.
        own: for each later step the keys and values [B, kv_heads, R, head_dim] that a row keeps for itself.
    """

    keys: Tensor
    values: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def unroll(drafter: Drafter, ids: Tensor, taps: Tensor, rows: Tensor, steps: int) -> list[Tensor]:
    """Runs the unroll on the given rows.

    Args:
        drafter: the drafter.
        ids: int64 [B, L], padded on the right.
        taps: [B, L, taps·Ht], tapped states of the target.
        rows: int64 [B, R], rows to run, each below L - 1.
        steps: K >= 1.

    Returns:
        For each step the output of the final norm on the rows, [B, R, H]. Rows whose tokens run past the end of
        the dialogue mean nothing from there on.
    """
    at = torch.arange(len(rows), device=rows.device)[:, None]
    hidden_from = torch.arange(ids.shape[1] - 1, device=rows.device) > rows[..., None]  # [B, R, T]

    stream, memories = _first_step(drafter, ids, taps, rows, hidden_from)
    normed: list[Tensor] = [drafter.norm(stream)]
    for step in range(1, steps):
        tokens = ids[at, (rows + 1 + step).clamp_max(ids.shape[1] - 1)]
        cos_sin = _per_row(drafter, rows + step)
        first, stream = drafter.arrange(drafter.embed_tokens(tokens), stream)
        for layer, memory in zip(_layers(drafter), memories, strict=True):
            x = layer.attention_input(first, stream)
            memory.own.append(layer.self_attn.keys_values(x, cos_sin))
            queries = layer.self_attn.queries(x, cos_sin)
            stream = layer.add(stream, _attend(layer.self_attn, queries, memory, hidden_from))
        normed.append(drafter.norm(stream))
    return normed


def _layers(drafter: Drafter) -> list[DrafterLayer]:
    return list(drafter.layers)  # type: ignore[arg-type]


def _first_step(
    drafter: Drafter, ids: Tensor, taps: Tensor, rows: Tensor, hidden_from: Tensor
) -> tuple[Tensor, list[_Memory]]:
    """Step 0 of every row up to the last layer's keys and values; beyond, of `rows` only."""
    at = torch.arange(len(rows), device=rows.device)[:, None]
    length = ids.shape[1] - 1
    first, stream = drafter.arrange(drafter.embed_tokens(ids[:, 1:]), drafter.fc(taps[:, :length]))
    cos_sin = drafter.rotary(torch.arange(length, device=ids.device))
    *below, last = _layers(drafter)
    memories = []
    for layer in below:
        x = layer.attention_input(first, stream)
        memories.append(_Memory(*layer.self_attn.keys_values(x, cos_sin)))
        queries = layer.self_attn.queries(x, cos_sin)
        stream = layer.add(stream, layer.self_attn.causal(queries, memories[-1].keys, memories[-1].values))
    x = last.attention_input(first, stream)
    memories.append(_Memory(*last.self_attn.keys_values(x, cos_sin)))
    queries = last.self_attn.queries(x[at, rows], _per_row(drafter, rows))
    attended = _attend(last.self_attn, queries, memories[-1], hidden_from)
    return last.add(stream[at, rows], attended), memories


def _per_row(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """positions: [B, R] -> cos, sin [B, 1, R, head_dim]."""
    cos, sin = drafter.rotary(positions)
    return cos[:, None], sin[:, None]


def _attend(attention: Attention, queries: Tensor, memory: _Memory, hidden_from: Tensor) -> Tensor:
    """One softmax over the visible keys of step 0 and the row's own later keys.

    Args:
        attention: the layer's projections.
        queries: [B, heads, R, head_dim].
        memory: the layer's keys and values.
        hidden_from: bool [B, R, T], keys of step 0 that lie after the row.

    Returns:
        [B, R, H].
    """
    keys, values = memory.keys, memory.values
    if queries.shape[:3].numel() * keys.shape[2] <= MANY_SCORES:
        return attention.output(_mix(queries, hidden_from, keys, values, memory.own))
    blocks = [slice(start, start + _BLOCK_ROWS) for start in range(0, queries.shape[2], _BLOCK_ROWS)]
    mixed = [
        checkpoint(
            _mix,
            queries[:, :, rows],
            hidden_from[:, rows],
            keys,
            values,
            [(own_keys[:, :, rows], own_values[:, :, rows]) for own_keys, own_values in memory.own],
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is random
        )
        for rows in blocks
    ]
    return attention.output(torch.cat(mixed, dim=2))


def _mix(
    queries: Tensor, hidden_from: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """-> values mixed by attention, [B, heads, R, head_dim]. own: keys and values of the later steps."""
    B, heads, R, D = queries.shape
    kv_heads, T = keys.shape[1:3]
    group = heads // kv_heads
    queries = queries.reshape(B, kv_heads, group, R, D) * D**-0.5
    scores = queries.reshape(B, kv_heads, group * R, D) @ keys.transpose(-1, -2)
    scores = scores.view(B, kv_heads, group, R, T).float()
    scores = scores.masked_fill(hidden_from[:, None, None], -torch.inf)
    own_scores = [(queries * own_keys[:, :, None]).sum(-1, keepdim=True).float() for own_keys, _ in own]
    weights = torch.cat([scores, *own_scores], dim=-1).softmax(-1).to(values.dtype)
    shared = weights[..., :T].reshape(B, kv_heads, group * R, T) @ values
    mixed = shared.view(B, kv_heads, group, R, D)
    for step, (_, own_values) in enumerate(own):
        mixed = mixed + weights[..., T + step, None] * own_values[:, :, None]
    return mixed.view(B, heads, R, D)
