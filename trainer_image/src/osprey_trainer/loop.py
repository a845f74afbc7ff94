"""The training loop of both training stages. SKELETON: signatures are final, bodies follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Batch(Protocol):
    """A micro-batch: `batch.DialogueBatch`, `batch.WindowBatch`."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def tokens(self) -> int: ...
    def to(self, device: torch.device) -> Self: ...


BatchT = TypeVar("BatchT", bound=Batch)


class BatchSource(Protocol[BatchT]):
    """An endless source of this rank's micro-batches that can resume exactly."""

    def __next__(self) -> BatchT: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Objective(Protocol[BatchT]):
    """A `torch.nn.Module` whose forward gives the loss (`objectives.Distillation`, `objectives.Pretraining`)."""

    def rows(self, batch: BatchT) -> Tensor: ...
    def forward(self, batch: BatchT, scale: Tensor) -> tuple[Tensor, Tensor]: ...
    def summarise(self, totals: Tensor) -> dict[str, float]: ...


class Checkpoints(Protocol):
    """Where checkpoints go; every rank calls both methods."""

    def latest(self) -> Path | None:
        """A local folder with the newest complete checkpoint (files of all ranks), or None."""

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Calls `write(folder)` with a local folder; each rank writes its own files there. Then keeps them."""


class Progress(Protocol):
    """Called on rank 0 after every step."""

    def __call__(
        self, step: int, total: int, loss: float, tokens_per_second: float, extra: Mapping[str, float]
    ) -> None: ...


class Schedule(StrEnum):
    """Learning rate after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True)
class LoopSettings:
    """How to train.

    Attributes:
        steps: optimiser steps in all.
        accumulation: micro-batches of one rank in one step.
        warmup_ratio: share of the steps.
        ema_decay: of the averaged weights that are the result; None: the last weights are.
        bf16: run matrix products in bfloat16 by autocast; weights stay fp32.
    """

    steps: int
    learning_rate: float
    accumulation: int = 1
    schedule: Schedule = Schedule.COSINE
    warmup_ratio: float = 0.01
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    ema_decay: float | None = None
    zero_stage: int = 1
    bf16: bool = True
    checkpoint_every_steps: int = 500
    seed: int = 0


@dataclass(frozen=True)
class TrainResult:
    """What is left after the last step. The trained weights are in the objective's module (averaged if asked).

    Attributes:
        tokens: seen by all ranks since step 0.
        metrics: of the last step's batches.
    """

    steps: int
    tokens: int
    loss: float
    metrics: Mapping[str, float]


class Stopped(SystemExit):
    """SIGTERM came, and the checkpoint is saved. Exit code 143."""


def train(
    objective: Any,
    batches: BatchSource[Any],
    settings: LoopSettings,
    *,
    progress: Progress,
    checkpoints: Checkpoints | None = None,
) -> TrainResult:
    """Trains from the newest checkpoint to the last step.

    Raises:
        TrainerError: DIVERGED when the loss is not finite, with the step and the names of the batch.
        Stopped: after SIGTERM, with a checkpoint saved.
    """
    raise NotImplementedError
