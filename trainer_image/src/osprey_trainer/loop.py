"""The training loop of both training stages."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

import torch
from torch import Tensor

from osprey_api.conditions import ExitCode, FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.ema import WeightAverage
from osprey_trainer.engine import Engine
from osprey_trainer.objectives import Objective
from osprey_trainer.settings import LoopSettings

_ZERO_KINDS = {0: "whole", 1: "split", 2: "split", 3: "split weights"}
"""How DeepSpeed writes a checkpoint under each ZeRO stage; it can't read that of another kind."""
_HOST = torch.device("cpu")
_NAMED = 3
"""Samples of a batch that diverged: it may have thousands, and a message is cut at 2000 characters."""


class Batch(Protocol):
    """A micro-batch: `batch.DialogueBatch`, `batch.WindowBatch`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its samples, for reports."""

    @property
    def tokens(self) -> int:
        """Trained on, for the speed that is reported."""

    def to(self, device: torch.device) -> Self:
        """Moved to a device."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_co = TypeVar("BatchT_co", bound=Batch, covariant=True)


class BatchSource(Protocol[BatchT_co]):
    """An endless source of this rank's micro-batches that can resume exactly."""

    def __next__(self) -> BatchT_co:
        """The next micro-batch."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is: plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""


class Checkpoints(Protocol):
    """Where checkpoints go; every rank calls both methods."""

    @property
    def uri(self) -> str:
        """Where they can be deleted, for messages."""

    def latest(self) -> Path | None:
        """A local folder with the newest complete checkpoint (files of all ranks), or None."""

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Calls `write(folder)` with a local folder; each rank writes its own files there. Then keeps them."""


class Progress(Protocol):
    """Called on rank 0 after every step."""

    def __call__(
        self, step: int, total: int, loss: float, tokens_per_second: float, extra: Mapping[str, float]
    ) -> None:
        """step: how many are done; loss: of the global batch; extra: `Objective.summarise`."""


@dataclass(frozen=True)
class TrainResult:
    """What is left after the last step.

    Attributes:
        weights: state dict of the objective's model, fp32 on the CPU, averaged if asked; on rank 0, else empty.
        tokens: trained on by all ranks since step 0.
        loss: of the last step.
        metrics: of the last step's batches.
    """

    weights: Mapping[str, Tensor]
    steps: int
    tokens: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _StepReport:
    """Of one step of all ranks.

    Attributes:
        stop_asked: whether any rank was asked to stop.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float]
    stop_asked: bool


class Stopped(SystemExit):
    """The loop was told to stop, and the checkpoint is saved: exit code 143."""

    def __init__(self, step: int) -> None:
        super().__init__(ExitCode.STOPPED)
        self.step = step


def train(
    objective: Objective[BatchT],
    batches: BatchSource[BatchT],
    settings: LoopSettings,
    *,
    progress: Progress,
    checkpoints: Checkpoints | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Trains from the newest checkpoint, or the start, to the last step.

    When `stop_asked()` on any rank, all of them finish the step and save a checkpoint.

    Raises:
        StageError: DIVERGED when the loss is not finite, with the step and the names of the batch;
            INVALID_CONFIG when the checkpoint is of another number of ranks or kind of ZeRO stage.
        Stopped: as asked, with a checkpoint saved.
    """
    torch.manual_seed(settings.seed)
    run = _Run(objective, batches, settings)
    try:
        folder = checkpoints.latest() if checkpoints else None
        if checkpoints and folder is not None:
            run.load(folder, checkpoints.uri)
        while True:
            started = time.monotonic()
            report = run.advance(stop_asked=stop_asked())
            if run.engine.rank == 0:
                speed = report.tokens / (time.monotonic() - started)
                progress(run.step, settings.steps, report.loss, speed, report.metrics)
            if run.step >= settings.steps:
                return run.result(report)
            due = run.step % settings.checkpoint_every_steps == 0
            if checkpoints and (due or report.stop_asked):
                checkpoints.save(run.step, run.save)
            if report.stop_asked:
                raise Stopped(run.step)
    finally:
        run.engine.close()


class _Run(Generic[BatchT]):
    """The state that a checkpoint holds, and the steps that change it."""

    def __init__(self, objective: Objective[BatchT], batches: BatchSource[BatchT], settings: LoopSettings) -> None:
        if settings.ema_decay is not None and settings.zero_stage == 3:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                "Averaged weights need whole weights, which ZeRO stage 3 splits: set zeroStage to 2 or less.",
            )
        self.objective, self.batches, self.settings = objective, batches, settings
        self.engine = Engine(objective, settings)
        # Every rank has the same weights, so one rank's average is enough.
        averages = settings.ema_decay is not None and self.engine.rank == 0
        self.average = WeightAverage(settings.ema_decay or 0.0) if averages else None
        self.step = self.tokens = 0

    def advance(self, *, stop_asked: bool) -> _StepReport:
        """One optimiser step."""
        engine, settings = self.engine, self.settings
        batches, counts = [], []
        for _ in range(settings.accumulation):
            batch = next(self.batches).to(engine.device)
            counts.append(self.objective.rows(batch))
            # Where several wait they do so in the host's memory: with the target's states they would fill a GPU.
            batches.append(batch if settings.accumulation == 1 else batch.to(_HOST))
        rows = engine.sum(torch.stack(counts).sum(0))
        # The engine divides the gradient by both; the mean over all rows of the global batch is wanted.
        shares = engine.world_size * settings.accumulation
        scale = (shares / rows.clamp_min(1)).float()
        learning_rate = settings.learning_rate_at(self.step)
        losses, totals = [], []
        for index, batch in enumerate(batches):
            if index:
                engine.step(learning_rate)
            loss, total = engine.forward(batch.to(engine.device), scale)
            engine.backward(loss)
            losses.append(loss.detach().to(engine.device, torch.float64) / shares)
            totals.append(total.detach().to(engine.device, torch.float64))
        local_loss = torch.stack(losses).sum()
        signals = local_loss.new_tensor([sum(batch.tokens for batch in batches), stop_asked])
        loss, tokens, stops, *_ = reduced = engine.sum(
            torch.cat([local_loss[None], signals, torch.stack(totals).sum(0)])
        )
        if not loss.isfinite():
            self._raise_diverged(batches, local_loss)
        # Only now: a loss that is not finite must not reach the weights.
        engine.step(learning_rate)
        self.step += 1
        self.tokens += int(tokens)
        if self.average:
            self.average.update(engine.trained_weights(), self.step)
        return _StepReport(float(loss), int(tokens), self.objective.summarise(reduced[3:]), stop_asked=bool(stops))

    def save(self, folder: Path) -> None:
        """Writes this rank's files of a checkpoint."""
        self.engine.save(folder)
        torch.save(
            {
                "zero_stage": self.settings.zero_stage,
                "step": self.step,
                "tokens": self.tokens,
                "batches": self.batches.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state() if self.engine.device.type == "cuda" else None,
            },
            folder / f"rank{self.engine.rank}.pt",
        )
        if self.average:
            self.average.save(folder / "average.safetensors")

    def load(self, folder: Path, uri: str) -> None:
        """Goes on where a checkpoint was written. uri: of the checkpoints."""
        otherwise = f"or delete the checkpoints below {uri} to start again"
        ranks = len(list(folder.glob("rank*.pt")))
        if ranks != self.engine.world_size:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The checkpoint was written by {ranks} ranks, and {self.engine.world_size} are running: run as "
                f"many as before, {otherwise}.",
            )
        state = torch.load(folder / f"rank{self.engine.rank}.pt", weights_only=True)
        before, now = state["zero_stage"], self.settings.zero_stage
        if _ZERO_KINDS[before] != _ZERO_KINDS[now]:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The checkpoint was written with zeroStage {before}, and zeroStage {now} splits it otherwise: set "
                f"job.zeroStage to {before} again, {otherwise}.",
            )
        if not self.engine.load(folder):
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT, f"The checkpoint lacks DeepSpeed's files: try again, {otherwise}."
            )
        self.step, self.tokens = state["step"], state["tokens"]
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])
        if self.average:
            self.average.load(folder / "average.safetensors", self.engine.device)

    def result(self, report: _StepReport) -> TrainResult:
        """The trained weights, with the averages in place of those that were averaged."""
        weights = self.engine.whole_weights()
        if self.average:
            weights |= {name: value.cpu() for name, value in self.average.weights.items()}
        return TrainResult(
            weights=weights,
            steps=self.step,
            tokens=self.tokens,
            loss=report.loss,
            metrics=report.metrics,
        )

    def _raise_diverged(self, batches: Sequence[BatchT], local_loss: Tensor) -> NoReturn:
        names = [name for batch in batches for name in batch.names] if not local_loss.isfinite() else []
        culprits = [name for part in self.engine.gather(names) for name in part]
        more = f" and {len(culprits) - _NAMED} more" if len(culprits) > _NAMED else ""
        raise StageError(
            FailureReason.DIVERGED,
            f"The loss is not finite at step {self.step + 1}: lower the learning rate, or look at the samples of its "
            f"batch, {', '.join(culprits[:_NAMED])}{more}.",
        )
