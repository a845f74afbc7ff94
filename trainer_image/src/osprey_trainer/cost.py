"""What training costs: FLOPs, counted as they run, and which share of the machine's peak they make.

A floating-point operation is an addition or a multiplication of a matrix product; nothing else is counted, and a
product that runs twice counts twice. Muon's products are left out: they belong to a step, however many tokens it has.
One step of every `EVERY` is counted, the first of a process among them; a step in between is taken to cost as much for
each token as the last one that was counted.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

EVERY = 50
_TERA = 1e12
_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the product that tells the peak."""
_TRIALS = 5


def _cpu_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # As for other kernels, what a causal mask hides counts too.
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _cpu_attention_backward(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Five products in place of two: the scores again, and the gradients of weights, queries, keys and values.
    return _cpu_attention(query, key, value) * 5 // 2


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    # torch 2.14 has formulas for attention on GPUs alone.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,  # noqa: SLF001 - an operator's name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,  # noqa: SLF001
}


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of what runs within it, backward passes included.

    Attributes:
        flops: so far.
        paused: count nothing for now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(func._overloadpacket)  # noqa: SLF001 - as torch's own counter finds it
        if formula is not None and not self.paused:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


@lru_cache
def gemm_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The most FLOPs a second of a product of two square matrices, as measured here and now by this process."""
    size = _SIZES.get(device.type, _SIZES["cpu"])
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(1 + _TRIALS):  # the first one warms up
        started = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


@dataclass(frozen=True)
class StepCost:
    """Of one step.

    Attributes:
        tokens: that all processes trained on.
        flops: of all processes.
        mfu: FLOPs a second as a share of the peak.
        seconds: that it took.
        waited_s: of these, for its batches: for data, or for the target to teach.
    """

    tokens: int
    flops: float
    mfu: float
    seconds: float
    waited_s: float


@dataclass
class Spent:
    """Of all steps of an attempt so far."""

    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0
    _used_s: float = 0.0

    def add(self, cost: StepCost) -> None:
        """Adds a step."""
        self.tokens += cost.tokens
        self.flops += cost.flops
        self.seconds += cost.seconds
        self.waited_s += cost.waited_s
        self._used_s += cost.mfu * cost.seconds

    @property
    def figures(self) -> dict[str, float]:
        """By the names by which people know them; what is a share, of the seconds of the steps."""
        seconds = self.seconds or 1.0
        return {
            "tokens": self.tokens,
            "TFLOP": self.flops / _TERA,
            "MFU": self._used_s / seconds,
            "waiting": self.waited_s / seconds,
        }


class CostMeter:
    """Follows the steps of a process, and takes the others to cost as much: they have equal shares of every batch."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, world_size: int) -> None:
        """dtype: of the matrix products."""
        self._peak = gemm_peak(device, dtype)
        self._world_size = world_size
        self._steps = 0
        self._waited_s = 0.0
        self._count: FlopCount | None = None
        self._per_token = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step runs within it."""
        self._waited_s, self._count = 0.0, None
        if self._steps % EVERY == 0:
            with FlopCount() as self._count:
                yield
        else:
            yield
        self._steps += 1

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The step's optimizer runs within it."""
        if self._count is not None:
            self._count.paused = True
        yield
        if self._count is not None:
            self._count.paused = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The step waits within it."""
        started = time.monotonic()
        yield
        self._waited_s += time.monotonic() - started

    def cost(self, tokens: int, seconds: float) -> StepCost:
        """Of the step that is over.

        Args:
            tokens: that all processes trained on.
            seconds: that it took.
        """
        if self._count is not None:
            self._per_token = self._count.flops / max(1, tokens)
        flops = self._per_token * tokens
        return StepCost(
            tokens=tokens,
            flops=flops * self._world_size,
            mfu=flops / seconds / self._peak,
            seconds=seconds,
            waited_s=min(seconds, self._waited_s),
        )
