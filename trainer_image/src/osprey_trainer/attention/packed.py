"""One softmax over the keys of step 0 that a row may see and the row's own keys of later steps.

Keys of step 0 go through a fused kernel, run by run; a row's own keys, one for each later step, are merged in by
log-sum-exp. There is no mask, and no scores of [rows, keys] are kept: for the gradient only the output is, and one
number for each row and head.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osprey_trainer.attention.kernels import Mixed, kernel_for
from osprey_trainer.attention.runs import Run


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, runs: Sequence[Run], own: Sequence[tuple[Tensor, Tensor]] = ()
) -> Tensor:
    """Attention of rows.

    Args:
        queries: [R, heads, D], rotated.
        keys: [N, kv_heads, D] of step 0, rotated.
        values: [N, kv_heads, D] of step 0.
        runs: which of these each row sees.
        own: for each later step the keys and values [R, kv_heads, D] that each row has for itself.

    Returns:
        [R, heads, D].
    """
    result: Tensor = _Attention.apply(queries, keys, values, runs, *(tensor for pair in own for tensor in pair))
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, runs: Sequence[Run], *own: Tensor) -> Tensor:
        with torch.autocast(queries.device.type, enabled=False):
            output, log_sum_exp = _mixed(queries, keys, values, runs, own)
        result = output.to(queries.dtype).view_as(queries)
        ctx.save_for_backward(queries, keys, values, result, log_sum_exp, *own)
        ctx.runs = runs
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, output, log_sum_exp, *own = ctx.saved_tensors
        kernel = kernel_for(queries)
        groups = keys.shape[1]
        grouped, of_output = _grouped(queries, groups), _grouped(gradient.contiguous(), groups)
        mixed = _grouped(output, groups)
        to_queries = torch.zeros_like(grouped, dtype=torch.float32)
        # In fp32, since many runs see the same keys.
        to_keys, to_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
        for run in ctx.runs:
            rows = run.rows
            for seen, causal in _parts(run):
                to_part = kernel.backward(
                    _by_group(of_output[rows]),
                    _by_group(grouped[rows]),
                    _shared(keys[seen], grouped.shape[2]),
                    _shared(values[seen], grouped.shape[2]),
                    Mixed(_by_group(mixed[rows]), log_sum_exp[rows].permute(1, 2, 0)),
                    causal=causal,
                )
                to_queries[rows] += to_part[0].permute(2, 0, 1, 3)
                to_keys[seen] += to_part[1].sum(1).transpose(0, 1)
                to_values[seen] += to_part[2].sum(1).transpose(0, 1)
        to_own: list[Tensor] = []
        if own:
            delta = (of_output.float() * mixed.float()).sum(-1)
            scale = queries.shape[-1] ** -0.5
            for own_keys, own_values in zip(own[::2], own[1::2], strict=True):
                weight = (_own_scores(grouped, own_keys) - log_sum_exp).exp_()
                along = (of_output.float() * own_values[:, :, None].float()).sum(-1)
                to_scores = (weight * (along - delta) * scale)[..., None]
                to_queries.addcmul_(to_scores, own_keys[:, :, None].float())
                to_own.append((to_scores * grouped).sum(2).to(own_keys.dtype))
                to_own.append((weight[..., None] * of_output).sum(2).to(own_values.dtype))
        of_all = to_queries.to(queries.dtype).view_as(queries), to_keys.to(keys.dtype), to_values.to(values.dtype)
        return *of_all, None, *to_own


def _mixed(
    queries: Tensor, keys: Tensor, values: Tensor, runs: Sequence[Run], own: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """-> output [R, groups, heads of a group, D] and log-sum-exp [R, groups, heads of a group], both fp32."""
    kernel = kernel_for(queries)
    groups = keys.shape[1]
    grouped = _grouped(queries, groups)
    output = torch.zeros_like(grouped, dtype=torch.float32)
    log_sum_exp = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=queries.device)
    for run in runs:
        parts = [
            kernel.forward(
                _by_group(grouped[run.rows]),
                _shared(keys[seen], grouped.shape[2]),
                _shared(values[seen], grouped.shape[2]),
                causal=causal,
            )
            for seen, causal in _parts(run)
        ]
        total = torch.stack([part.log_sum_exp for part in parts]).logsumexp(0)
        log_sum_exp[run.rows] = total.permute(2, 0, 1)
        into = _by_group(output[run.rows])
        for part in parts:
            into.addcmul_(part.output, (part.log_sum_exp - total).exp_()[..., None])
    if own:
        scores = [_own_scores(grouped, own_keys) for own_keys in own[::2]]
        total = torch.stack([log_sum_exp, *scores]).logsumexp(0)
        output.mul_((log_sum_exp - total).exp_()[..., None])
        for score, own_values in zip(scores, own[1::2], strict=True):
            output.addcmul_((score - total).exp_()[..., None], own_values[:, :, None].float())
        log_sum_exp = total
    return output, log_sum_exp


def _parts(run: Run) -> Iterator[tuple[slice, bool]]:
    """The keys that a run sees, and whether causally."""
    yield run.own, True
    if run.before.start < run.before.stop:
        yield run.before, False


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[R, heads, D] -> [R, groups, heads of a group, D]."""
    return x.view(len(x), groups, x.shape[1] // groups, x.shape[-1])


def _by_group(x: Tensor) -> Tensor:
    """[R, groups, heads, D] -> [groups, heads, R, D], as kernels have it."""
    return x.permute(1, 2, 0, 3)


def _shared(x: Tensor, heads: int) -> Tensor:
    """[S, groups, D] -> [groups, heads, S, D], without a copy."""
    return x.transpose(0, 1)[:, None].expand(-1, heads, -1, -1)


def _own_scores(grouped: Tensor, own_keys: Tensor) -> Tensor:
    """-> fp32 [R, groups, heads]."""
    scores: Tensor = (grouped.float() * own_keys[:, :, None].float()).sum(-1) * grouped.shape[-1] ** -0.5
    return scores
