"""The losses of `losses.eager` without ever holding [rows, vocabulary].

The logits of one chunk of rows live only until their gradient is formed, in place, in the forward pass itself;
what is kept for the backward pass has the size of the inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.teacher_head import TeacherHead

_ROWS_IN_CACHE = 16
"""Rows whose log-probabilities and gradients a CPU forms at one time: all of a chunk's would go through its memory once
for each operation (measured with 256 rows of 49,152: 85 ms, 28 with 16 at a time, beside 480 of matrix products)."""

Compare = Callable[[slice, Tensor], Tensor]
"""Losses [n] of the rows of a slice; their log-probabilities [n, V] become d loss / d logits in place."""


class _Targets(Protocol):
    """What rows' distributions are compared with; rows are named by their place in the plan's order."""

    def of(self, chunk: slice) -> Compare:
        """Computes what the rows of a chunk have in common; slices of the result are of the chunk."""


@dataclass(frozen=True)
class _Soft:
    """Attributes: hidden: [T, Ht], one for each teacher; which: int64 [R], ascending: that of each row."""

    hidden: Tensor
    which: Tensor
    head: TeacherHead
    divergence: Divergence

    def of(self, chunk: slice) -> Compare:
        which = self.which[chunk]
        first, last = which[[0, -1]].tolist()
        p = self.head.logits(self.hidden[first : last + 1]).softmax(-1)

        def compare(rows: slice, log_q: Tensor) -> Tensor:
            return self.divergence.losses_and_gradients(p[which[rows] - first], log_q)

        return compare


@dataclass(frozen=True)
class _Hard:
    labels: Tensor

    def of(self, chunk: slice) -> Compare:
        labels = self.labels[chunk, None]

        def compare(rows: slice, log_q: Tensor) -> Tensor:
            losses = -log_q.gather(1, labels[rows]).squeeze(1)
            log_q.exp_().scatter_add_(1, labels[rows], -torch.ones_like(labels[rows], dtype=log_q.dtype))
            return losses

        return compare


@dataclass(frozen=True)
class _Plan:
    """What a row is compared with; in which order rows are taken, int64 [R]; rows a chunk; dtype of the products."""

    targets: _Targets
    order: Tensor
    chunk: int
    dtype: torch.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, weight: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        with torch.autocast(hidden.device.type, enabled=False):
            x, w = hidden.to(plan.dtype), head.to(plan.dtype)
            grad_hidden = torch.empty_like(x)
            # Summed in fp32 over the chunks: bf16 would lose the small ones.
            grad_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            predicted = torch.empty(len(x), dtype=torch.long, device=x.device)
            loss = torch.zeros((), device=x.device)
            together = plan.chunk if x.device.type != "cpu" else _ROWS_IN_CACHE
            room = x.new_empty(min(plan.chunk, len(x)), len(w))  # of the logits of a chunk, then of their gradient
            for start in range(0, len(x), plan.chunk):
                rows = plan.order[start : start + plan.chunk]
                taken, weights = x[rows], weight[rows]
                logits = torch.mm(taken, w.T, out=room[: len(rows)])
                compare = plan.targets.of(slice(start, start + len(rows)))
                for first in range(0, len(rows), together):
                    part = slice(first, first + together)
                    predicted[rows[part]] = logits[part].argmax(-1)
                    log_q = logits[part].log_softmax(-1, dtype=torch.float32)
                    loss += compare(part, log_q) @ weights[part]
                    torch.mul(log_q, weights[part, None], out=logits[part])
                grad_hidden[rows] = logits @ w
                if grad_head is not None and plan.dtype == grad_head.dtype:
                    grad_head.addmm_(logits.T, taken)  # without another tensor of the head's size
                elif grad_head is not None:
                    grad_head += logits.T @ taken
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.dtypes = hidden.dtype, head.dtype
        ctx.mark_non_differentiable(predicted)
        return loss, predicted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _grad_predicted: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        hidden_dtype, head_dtype = ctx.dtypes
        to_hidden = (grad_hidden * grad_loss).to(hidden_dtype)
        to_head = None if grad_head is None else (grad_head * grad_loss).to(head_dtype)
        return to_hidden, to_head, None, None


def distillation(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: TeacherHead,
    weight: Tensor,
    *,
    teachers: Tensor,
    divergence: Divergence,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`eager.distillation`, `chunk` rows at a time, in the dtype of autocast where that is on.

    Rows of different steps of the unroll have the same teachers. They are taken side by side, so that the teacher's
    distribution is formed once for all of them, but where two chunks meet.
    """
    dtype = _matmul_dtype(hidden)
    order = teachers.argsort(stable=True)
    distinct, which = torch.unique_consecutive(teachers[order], return_inverse=True)
    targets = _Soft(teacher_hidden[distinct].to(dtype), which, teacher_head.to(dtype), divergence)
    return _apply(hidden, head, weight, _Plan(targets, order, chunk, dtype))


def hard_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """`eager.hard_cross_entropy`, `chunk` rows at a time, in the dtype of autocast where that is on."""
    order = torch.arange(len(hidden), device=hidden.device)
    return _apply(hidden, head, weight, _Plan(_Hard(labels), order, chunk, _matmul_dtype(hidden)))


def _apply(hidden: Tensor, head: Tensor, weight: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(hidden, head, weight, plan)
    return result


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
