"""Training-time test: the drafter runs K steps on its own output, as it will when serving.

At step 0 row i sees the target's taps at i and the token x_{i+1}; at step k its own last stream and the real token
x_{i+1+k}. It attends to the keys of step 0 of rows 0..i of its dialogue, and to its own keys of steps 1..k, under one
softmax; RoPE positions are i at step 0 and i + k at step k.

Dialogues lie packed, one behind the other, and no row sees another dialogue's keys at any step. Only what is needed is
computed. Rows that are not asked for (the prompt) serve as keys and values: in the last layer they get no query, no
output projection and no feed-forward block, and from step 1 on they are not run at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from osprey_trainer.attention.packed import attend
from osprey_trainer.attention.runs import Run, runs
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.models.body import Attention
from osprey_trainer.models.draft import Drafter, DrafterLayer


@dataclass(frozen=True)
class _Memory:
    """Keys and values of one layer.

    Attributes:
        keys, values: [N, kv_heads, head_dim], of step 0, all rows.
        own: for each later step the keys and values [R, kv_heads, head_dim] that a row keeps for itself.
    """

    keys: Tensor
    values: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def unroll(drafter: Drafter, batch: DialogueBatch, rows: Sequence[int], steps: int) -> list[Tensor]:
    """Runs the unroll on the given rows.

    Args:
        drafter: the drafter.
        batch: dialogues, with the target's taps.
        rows: R places in the batch, ascending. The last of a dialogue, which no token follows, means nothing.
        steps: K >= 1.

    Returns:
        For each step the output of the final norm on the rows, [R, H]. Rows whose tokens run past the end of
        the dialogue mean nothing from there on.
    """
    at = torch.tensor(rows, dtype=torch.long, device=batch.ids.device)
    seen = runs(rows, batch.lengths)
    positions, lasts = batch.positions[at], batch.lasts[at]
    # Once for all steps: the gradient of a lookup is as large as the embedding.
    embedded = drafter.embed_tokens(batch.ids)
    stream, memories = _first_step(drafter, batch, embedded, at, seen)
    normed: list[Tensor] = [drafter.norm(stream)]
    for step in range(1, steps):
        cos_sin = drafter.rotary(positions + step)
        first, stream = drafter.arrange(embedded[(at + 1 + step).clamp(max=lasts)], stream)
        for layer, memory in zip(_layers(drafter), memories, strict=True):
            x = layer.attention_input(first, stream)
            memory.own.append(layer.self_attn.keys_values(x, cos_sin))
            queries = layer.self_attn.queries(x, cos_sin)
            stream = layer.add(stream, _attend(layer.self_attn, queries, memory, seen))
        normed.append(drafter.norm(stream))
    return normed


def _layers(drafter: Drafter) -> list[DrafterLayer]:
    return list(drafter.layers)  # type: ignore[arg-type]


def _first_step(
    drafter: Drafter, batch: DialogueBatch, embedded: Tensor, at: Tensor, seen: Sequence[Run]
) -> tuple[Tensor, list[_Memory]]:
    """Step 0 of every row up to the last layer's keys and values; beyond, of the rows `at` only."""
    places = torch.arange(len(batch.ids), device=batch.ids.device)
    # The last row of a dialogue has no token to take in. It gets some token, and nothing ever sees it.
    following = embedded[(places + 1).clamp(max=batch.lasts)]
    first, stream = drafter.arrange(following, drafter.fc(batch.states.taps))
    cos_sin = drafter.rotary(batch.positions)
    *below, last = _layers(drafter)
    memories = []
    if below:
        everything = runs(range(len(batch.ids)), batch.lengths)
    for layer in below:
        x = layer.attention_input(first, stream)
        memories.append(_Memory(*layer.self_attn.keys_values(x, cos_sin)))
        queries = layer.self_attn.queries(x, cos_sin)
        stream = layer.add(stream, _attend(layer.self_attn, queries, memories[-1], everything))
    x = last.attention_input(first, stream)
    memories.append(_Memory(*last.self_attn.keys_values(x, cos_sin)))
    cos, sin = cos_sin
    queries = last.self_attn.queries(x[at], (cos[at], sin[at]))
    return last.add(stream[at], _attend(last.self_attn, queries, memories[-1], seen)), memories


def _attend(attention: Attention, queries: Tensor, memory: _Memory, seen: Sequence[Run]) -> Tensor:
    """queries: [R, heads, head_dim] -> [R, H]."""
    return attention.output(attend(queries, memory.keys, memory.values, seen, memory.own))
