"""The training loop of both training stages."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from osprey_api.conditions import ExitCode, FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.cost import CostMeter, StepCost
from osprey_trainer.ema import WeightAverage
from osprey_trainer.engine import TAG, Engine, join_process_group
from osprey_trainer.explosion import FACTOR, PATIENCE, LossWatch
from osprey_trainer.objectives import Objective
from osprey_trainer.settings import LoopSettings
from osprey_trainer.universal import convert

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
        self,
        step: int,
        total: int,
        loss: float,
        tokens_per_second: float,
        extra: Mapping[str, float],
        *,
        cost: StepCost,
    ) -> None:
        """step: how many are done; loss: of the global batch; extra: `Objective.summarise`; cost: of this step."""


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
        StageError: DIVERGED when loss or gradient is not finite, or the loss explodes (see `explosion`), with the
            step and the names of the batch; INVALID_CONFIG when the checkpoint is of another kind of ZeRO stage;
            CORRUPT_ARTIFACT when the ranks see different checkpoints, or files of one are missing; OUT_OF_DISK.
        Stopped: as asked, with a checkpoint saved, unless the loss is just then too high to keep what led to it.
    """
    torch.manual_seed(settings.seed)
    join_process_group()
    folder = checkpoints.latest() if checkpoints else None
    saved = _Saved.agreed(folder, checkpoints.uri, settings) if checkpoints else None
    run = _Run(objective, batches, settings, universal=saved is not None and saved.is_converted)
    due = False
    try:
        if saved is not None:
            run.load(saved)
        while True:
            started = time.monotonic()
            with run.cost.step():
                report = run.advance(stop_asked=stop_asked())
            if run.engine.rank == 0:
                seconds = time.monotonic() - started
                cost = run.cost.cost(report.tokens, seconds)
                progress(run.step, settings.steps, report.loss, report.tokens / seconds, report.metrics, cost=cost)
            if run.step >= settings.steps:
                return run.result(report)
            due |= run.step % settings.checkpoint_every_steps == 0
            # While the loss is high it may be exploding: the last checkpoint from before that is the good one.
            if checkpoints and run.watch.is_calm and (due or report.stop_asked):
                checkpoints.save(run.step, run.save)
                due = False
            if report.stop_asked:
                raise Stopped(run.step)
    finally:
        run.engine.close()


class _Run(Generic[BatchT]):
    """The state that a checkpoint holds, and the steps that change it."""

    def __init__(
        self,
        objective: Objective[BatchT],
        batches: BatchSource[BatchT],
        settings: LoopSettings,
        *,
        universal: bool,
    ) -> None:
        """universal: what it goes on from was converted."""
        if settings.ema_decay is not None and settings.zero_stage == 3:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                "Averaged weights need whole weights, which ZeRO stage 3 splits: set zeroStage to 2 or less.",
            )
        if settings.muon_scale is not None and settings.zero_stage != 0:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"Muon needs whole matrices, which ZeRO stage {settings.zero_stage} splits: set zeroStage to 0, or "
                "optimizer to AdamW.",
            )
        self.objective, self.batches, self.settings = objective, batches, settings
        self.engine = Engine(objective, settings, universal=universal)
        # Every rank has the same weights, so one rank's average is enough.
        averages = settings.ema_decay is not None and self.engine.rank == 0
        self.average = WeightAverage(settings.ema_decay or 0.0) if averages else None
        self.watch = LossWatch()
        dtype = torch.bfloat16 if settings.bf16 else torch.float32
        self.cost = CostMeter(self.engine.device, dtype, world_size=self.engine.world_size)
        self.step = self.tokens = 0

    def advance(self, *, stop_asked: bool) -> _StepReport:
        """One optimiser step."""
        engine, settings = self.engine, self.settings
        batches, counts = [], []
        for _ in range(settings.accumulation):
            with self.cost.waiting():
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
            # Those of the ranks that have seen it.
            self._raise_diverged("The loss is not finite", [] if local_loss.isfinite() else batches)
        # Only now: a loss that is not finite must not reach the weights.
        with self.cost.updating():
            updated = engine.step(learning_rate)
        if not updated:
            self._raise_diverged("The gradient is not finite", batches)
        if self.watch.exploded(float(loss)):
            self._raise_diverged(
                f"The loss explodes: it has been more than {FACTOR:g} times the usual {self.watch.usual:.3g} for "
                f"{PATIENCE} steps and is {float(loss):.3g}",
                batches,
            )
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
                "ranks": self.engine.world_size,
                "zero_stage": self.settings.zero_stage,
                "step": self.step,
                "tokens": self.tokens,
                "batches": self.batches.state_dict(),
                "watch": self.watch.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state() if self.engine.device.type == "cuda" else None,
            },
            folder / f"rank{self.engine.rank}.pt",
        )
        if self.average:
            self.average.save(folder / "average.safetensors")

    def load(self, saved: "_Saved") -> None:
        """Goes on where a checkpoint was written."""
        state = saved.state
        self.engine.load(saved.engine_folder)
        self.step, self.tokens = state["step"], state["tokens"]
        self.batches.load_state_dict(state["batches"])
        self.watch.load_state_dict(state["watch"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])
        if self.average:
            self.average.load(saved.folder / "average.safetensors", self.engine.device)

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

    def _raise_diverged(self, what: str, suspects: Sequence[BatchT]) -> NoReturn:
        names = [name for batch in suspects for name in batch.names]
        culprits = [name for part in self.engine.gather(names) for name in part]
        more = f" and {len(culprits) - _NAMED} more" if len(culprits) > _NAMED else ""
        raise StageError(
            FailureReason.DIVERGED,
            f"{what} at step {self.step + 1}: lower the learning rate, or look at the samples of its batch, "
            f"{', '.join(culprits[:_NAMED])}{more}. The checkpoints from before are kept.",
        )


@dataclass(frozen=True)
class _Saved:
    """A checkpoint as this rank goes on from it.

    What it holds beside weights and optimiser is a function of the step, and the same for all ranks, but for the
    state of the random numbers: with another number of ranks, rank r takes that of rank r modulo the old number.

    Attributes:
        folder: its files, of all ranks.
        state: of this rank.
        is_converted: it was split otherwise, and is read from a universal checkpoint beside it.
    """

    folder: Path
    state: Mapping[str, Any]
    is_converted: bool

    @property
    def engine_folder(self) -> Path:
        """What the engine reads."""
        return _universal(self.folder) if self.is_converted else self.folder

    @classmethod
    def agreed(cls, folder: Path | None, uri: str, settings: LoopSettings) -> "_Saved | None":
        """The checkpoint in a folder, which all ranks must see alike. Every rank calls it, after joining the group.

        Raises:
            StageError: CORRUPT_ARTIFACT; INVALID_CONFIG, see `train`; OUT_OF_DISK.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        files = sorted(folder.glob("rank*.pt"), key=_rank_of) if folder is not None else []
        state = torch.load(files[rank % len(files)], weights_only=True) if files else None
        views: list[Any] = [None] * world_size
        dist.all_gather_object(views, state and (state["step"], state["ranks"], len(files)))
        if any(view != views[0] for view in views):
            seen = ", ".join(f"rank {r}: {'none' if view is None else view[0]}" for r, view in enumerate(views))
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT,
                f"The ranks see different checkpoints (steps by rank: {seen}): try again, or delete the checkpoints "
                f"below {uri} to start again.",
            )
        if folder is None:
            return None
        otherwise = f"or delete the checkpoints below {uri} to start again"
        shards = len(list((folder / TAG).glob("*_optim_states.pt")))
        # Under stage 0 no rank has a shard of its own.
        if state is None or len(files) != state["ranks"] or shards != (state["ranks"] if state["zero_stage"] else 0):
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT,
                f"The checkpoint has {len(files)} states and {shards} shards of ranks, and lacks others: try again, "
                f"{otherwise}.",
            )
        before, now = state["zero_stage"], settings.zero_stage
        if _ZERO_KINDS[before] != _ZERO_KINDS[now]:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The checkpoint was written with zeroStage {before}, and zeroStage {now} splits it otherwise: set "
                f"job.zeroStage to {before} again, {otherwise}.",
            )
        is_converted = state["ranks"] != world_size and now != 0
        if is_converted:
            if dist.get_node_local_rank(fallback_rank=0) == 0:
                convert(folder, _universal(folder), tag=TAG)
            dist.barrier()
        return cls(folder, state, is_converted)


def _rank_of(state: Path) -> int:
    return int(state.stem.removeprefix("rank"))


def _universal(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-universal")
