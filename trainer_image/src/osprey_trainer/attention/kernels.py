"""Fused attention with its log-sum-exp, of one run of rows and one part of their keys.

A part's backward pass needs nothing but the softmax of *all* keys: with P = exp(score - log-sum-exp) and
Δ = sum(gradient · output), dScore = P · (gradient · values - Δ). So the same kernels serve for a part as for the whole,
if they are given the log-sum-exp and the output of the whole (the argument of Dao, arXiv 2307.08691, section 3.1;
Liu et al., arXiv 2310.01889, go over blocks of keys in this way).

Queries are [groups, heads, R, D] and keys and values [groups, heads, S, D], where the heads of a group share theirs.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_BLOCK_ROWS = 512
"""Of the eager kernel."""
# Torch's public function gives no log-sum-exp; the operators behind it do.
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Mixed:
    """Values mixed by the softmax of scores.

    Attributes:
        output: [groups, heads, R, D].
        log_sum_exp: of the scores, fp32 [groups, heads, R].
    """

    output: Tensor
    log_sum_exp: Tensor


class Kernel(Protocol):
    """One part of attention; scores are scaled by 1/sqrt(D)."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Mixed:
        """Mixes the values. causal: row r sees keys 0..r; there are as many keys as rows."""

    def backward(
        self, gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mixed: Mixed, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, of the shapes of queries and of keys for each head.

        Args:
            gradient: of the output.
            queries, keys, values, causal: as in `forward`.
            mixed: of all parts together.
        """


def kernel_for(queries: Tensor) -> Kernel:
    """The fastest kernel for a tensor of this device and dtype."""
    if queries.device.type == "cpu":
        return FlashOnCpu()
    if queries.device.type == "cuda" and FlashOnGpu.runs(queries):
        return FlashOnGpu()
    return Eager()


class FlashOnCpu:
    """Torch's flash attention on CPUs."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Mixed:
        """See `Kernel`."""
        return Mixed(*_aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, causal))

    def backward(
        self, gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mixed: Mixed, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries, keys, values, mixed.output, mixed.log_sum_exp, 0.0, causal
        )
        return gradients


class FlashOnGpu:
    """Torch's flash attention on NVIDIA GPUs, in half precision."""

    @staticmethod
    def runs(queries: Tensor) -> bool:
        """Whether it has been written for this GPU, dtype and size of a head."""
        size = queries.shape[-1]
        is_new = torch.cuda.get_device_capability(queries.device) >= (8, 0)
        return is_new and queries.dtype in _HALF and size % 8 == 0 and size <= 256

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Mixed:
        """See `Kernel`."""
        output, log_sum_exp, *_ = _aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
        return Mixed(output, log_sum_exp)

    def backward(
        self, gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mixed: Mixed, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        of_one_length = (None, None, queries.shape[2], keys.shape[2])
        no_dropout = torch.zeros((), dtype=torch.uint64, device=queries.device)
        gradients: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            gradient, queries, keys, values, mixed.output, mixed.log_sum_exp.contiguous(),
            *of_one_length, 0.0, causal, no_dropout, no_dropout,
        )  # fmt: skip
        return gradients


class Eager:
    """As the definitions read, for devices and dtypes without a fused kernel: scores of a block of rows at one time."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Mixed:
        """See `Kernel`."""
        outputs, sums = [], []
        for rows in _blocks(queries):
            scores = _scores(queries, keys, rows, causal=causal)
            sums.append(scores.logsumexp(-1))
            weights = (scores - sums[-1][..., None]).exp().to(values.dtype)
            outputs.append(weights @ values[:, :, : scores.shape[-1]])
        return Mixed(torch.cat(outputs, 2), torch.cat(sums, 2))

    def backward(
        self, gradient: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mixed: Mixed, *, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        delta = (gradient.float() * mixed.output.float()).sum(-1, keepdim=True)
        to_queries = []
        to_keys, to_values = (torch.zeros(x.shape, device=x.device) for x in (keys, values))
        for rows in _blocks(queries):
            scores = _scores(queries, keys, rows, causal=causal)
            seen = slice(scores.shape[-1])
            weights = (scores - mixed.log_sum_exp[:, :, rows, None]).exp()
            of_rows = gradient[:, :, rows].float()
            to_weights = of_rows @ values[:, :, seen].float().mT
            to_scores = weights * (to_weights - delta[:, :, rows]) * queries.shape[-1] ** -0.5
            to_queries.append(to_scores @ keys[:, :, seen].float())
            to_keys[:, :, seen] += to_scores.mT @ queries[:, :, rows].float()
            to_values[:, :, seen] += weights.mT @ of_rows
        return torch.cat(to_queries, 2).to(queries.dtype), to_keys.to(keys.dtype), to_values.to(values.dtype)


def _blocks(queries: Tensor) -> list[slice]:
    return [slice(start, start + _BLOCK_ROWS) for start in range(0, queries.shape[2], _BLOCK_ROWS)]


def _scores(queries: Tensor, keys: Tensor, rows: slice, *, causal: bool) -> Tensor:
    """Of a block of rows with the keys that any of them sees."""
    queries = queries[:, :, rows].float()
    if not causal:
        return _scaled(queries, keys)
    last = rows.start + queries.shape[2]
    places = torch.arange(last, device=keys.device)
    return _scaled(queries, keys[:, :, :last]).masked_fill(places > places[rows.start :, None], -torch.inf)


def _scaled(queries: Tensor, keys: Tensor) -> Tensor:
    scores: Tensor = queries @ keys.float().mT * queries.shape[-1] ** -0.5
    return scores
