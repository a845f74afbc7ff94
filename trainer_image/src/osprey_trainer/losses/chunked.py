"""The losses of `losses.eager` without ever holding [rows, vocabulary].

The logits of one chunk of rows live only until their gradient is formed, in place, in the forward pass itself;
what is kept for the backward pass has the size of the inputs.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.teacher_head import TeacherHead


class _Targets(Protocol):
    """What a row's distribution is compared with."""

    def losses_and_gradients(self, rows: slice, log_q: Tensor) -> Tensor:
        """Losses [chunk] of log-probabilities [chunk, V], which become d loss / d logits in place."""


@dataclass(frozen=True)
class _Soft:
    hidden: Tensor
    head: TeacherHead
    divergence: Divergence

    def losses_and_gradients(self, rows: slice, log_q: Tensor) -> Tensor:
        p = self.head.logits(self.hidden[rows]).softmax(-1)
        return self.divergence.losses_and_gradients(p, log_q)


@dataclass(frozen=True)
class _Hard:
    labels: Tensor

    def losses_and_gradients(self, rows: slice, log_q: Tensor) -> Tensor:
        labels = self.labels[rows, None]
        losses = -log_q.gather(1, labels).squeeze(1)
        log_q.exp_().scatter_add_(1, labels, -torch.ones_like(labels, dtype=log_q.dtype))
        return losses


@dataclass(frozen=True)
class _Plan:
    """What a row is compared with; rows a chunk; dtype of the matrix products."""

    targets: _Targets
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
            for start in range(0, len(x), plan.chunk):
                rows = slice(start, start + plan.chunk)
                log_q = functional.linear(x[rows], w).float()
                predicted[rows] = log_q.argmax(-1)
                log_q.sub_(log_q.logsumexp(-1, keepdim=True))
                loss += plan.targets.losses_and_gradients(rows, log_q) @ weight[rows]
                gradient = log_q.mul_(weight[rows, None]).to(plan.dtype)
                grad_hidden[rows] = gradient @ w
                if grad_head is not None:
                    grad_head += gradient.T @ x[rows]
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
    divergence: Divergence,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`eager.distillation`, `chunk` rows at a time, in the dtype of autocast where that is on."""
    dtype = _matmul_dtype(hidden)
    targets = _Soft(teacher_hidden.to(dtype), teacher_head.to(dtype), divergence)
    return _apply(hidden, head, weight, _Plan(targets, chunk, dtype))


def hard_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """`eager.hard_cross_entropy`, `chunk` rows at a time, in the dtype of autocast where that is on."""
    return _apply(hidden, head, weight, _Plan(_Hard(labels), chunk, _matmul_dtype(hidden)))


def _apply(hidden: Tensor, head: Tensor, weight: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _ChunkedCrossEntropy.apply(hidden, head, weight, plan)
    return result


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
