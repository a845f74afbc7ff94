"""How the two training stages run the loop in a stage's pod: settings, checkpoints, progress, and what was seen."""

import ctypes
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import JsonValue

from osprey_api.stages import Optimization
from osprey_runtime.context import StageContext, stopped
from osprey_trainer.cost import Spent, StepCost
from osprey_trainer.data.split import Split
from osprey_trainer.engine import join_process_group
from osprey_trainer.loop import BatchSource, Stopped, TrainResult, train
from osprey_trainer.objectives import Objective
from osprey_trainer.settings import LoopSettings, Schedule

T = TypeVar("T")
log = logging.getLogger(__name__)

REPORT_NAME = "training.json"
COST_LINE = "cost of this attempt: "
"""Begins the line of the log that has it, as JSON."""
_POINTS = 200
_RESTORED = "restored-checkpoint"
_HISTORY_NAME = "history.json"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""
_BF16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
"""Any of these capabilities of a CPU (x86, x86, ARM) makes its bfloat16 products fast."""
_DISTRIBUTIONS = ("osprey-trainer", "torch", "transformers", "deepspeed", "tokenizers", "numpy")


@contextmanager
def process_group(ctx: StageContext, precision: str, *, muon: bool = False) -> Iterator[torch.device]:
    """Joins the stage's processes, and yields the device of this one, which will compute in `precision`.

    The runner starts the processes and gives each its rank in the variables that torch reads.

    muon: the optimizer will be Muon, which computes in bfloat16 in any case.
    """
    device = join_process_group()
    if device.type == "cpu":
        _keep_freed_memory()
        warn_of_slow_bf16(precision, muon=muon)
    yield device
    if ctx.world_size > 1:
        dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Has glibc reuse large blocks that are freed, in place of giving them back to the kernel.

    A step on a CPU allocates the same large tensors again and again, and clearing their pages anew took a quarter of
    the time of pretraining (measured: 420 -> 560 tokens per CPU second).
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def warn_of_slow_bf16(precision: str, *, muon: bool) -> None:
    """Logs that this CPU has to emulate bfloat16: with AVX2 alone it took seven times as long as fp32 (measured)."""
    units = torch.cpu.get_capabilities()
    if any(units.get(unit) for unit in _BF16_UNITS):
        return
    if precision == "BF16":
        log.warning("this CPU has no bfloat16 units: with precision FP32 the same takes a fraction of the time")
    if muon:
        log.warning("this CPU has no bfloat16 units, in which Muon computes: optimizer AdamW may be faster by far")


def from_rank_0(value: T) -> T:
    """Returns rank 0's value on all ranks. Every rank calls it."""
    word: list[Any] = [value]
    dist.broadcast_object_list(word, src=0)
    return cast(T, word[0])


def split_of(ctx: StageContext, optimization: Optimization) -> Split:
    """Returns this process's part of every global batch.

    Raises:
        StageError: INVALID_CONFIG if the processes cannot have equal shares.
    """
    return Split.plan(
        global_batch_size=optimization.global_batch_size,
        sequence_length=optimization.sequence_length,
        rank=ctx.rank,
        world_size=ctx.world_size,
    )


@dataclass
class LossHistory:
    """The mean loss of about 200 equal parts of a run.

    Attributes:
        steps: of the whole run.
        points: (last step, mean loss) of each part that is over, and of the current one.
    """

    steps: int
    points: list[tuple[int, float]] = field(default_factory=list)
    _seen: int = 0

    def add(self, step: int, loss: float) -> None:
        """Takes the loss of a step; steps are counted from 1 and come in order."""
        if self._seen == 0:
            self.points.append((step, loss))
        else:
            self.points[-1] = (step, (self.points[-1][1] * self._seen + loss) / (self._seen + 1))
        self._seen = (self._seen + 1) % math.ceil(self.steps / _POINTS)

    def write(self, path: Path) -> None:
        """Keeps it in a checkpoint."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "LossHistory":
        """Reads what `write` wrote."""
        fields = json.loads(path.read_text())
        return cls(fields["steps"], [(step, loss) for step, loss in fields["points"]], fields["_seen"])


@dataclass(frozen=True)
class Trained:
    """A finished run: the loop's result and the losses on the way."""

    result: TrainResult
    history: LossHistory

    @property
    def first_loss(self) -> float:
        """Mean of the first part of the run."""
        return self.history.points[0][1]

    @property
    def final_loss(self) -> float:
        """Mean of the last part of the run."""
        return self.history.points[-1][1]


def run_loop(
    ctx: StageContext,
    objective: Objective[Any],
    batches: BatchSource[Any],
    *,
    optimization: Optimization,
    steps: int,
    accumulation: int,
    acceptance: Callable[[int, Mapping[str, float]], float | None] = lambda _step, _metrics: None,
) -> Trained:
    """Trains, or goes on training, with the pod's checkpoints and progress. Every rank calls it.

    Args:
        ctx: of the stage.
        objective: what is trained.
        batches: of this rank.
        optimization: of the stage's config.
        steps: optimiser steps in all.
        accumulation: micro-batches of this rank in one step.
        acceptance: called on rank 0 after each step with its number and metrics: the simulated acceptance length,
            or None to leave it as it was.

    Returns:
        The result; the weights are on rank 0 alone.

    Raises:
        StageError: DIVERGED; STOPPED, with a checkpoint saved; a checkpoint could not be saved or read.
    """
    checkpoints = _PodCheckpoints(ctx, LossHistory(steps))
    spent = Spent()

    def progress(
        step: int,
        total: int,  # noqa: ARG001 - the pod's progress was told already
        loss: float,
        tokens_per_second: float,
        extra: Mapping[str, float],
        *,
        cost: StepCost,
    ) -> None:
        checkpoints.history.add(step, loss)
        spent.add(cost)
        ctx.progress.update(
            step,
            loss=loss,
            tokens_per_second=tokens_per_second,
            simulated_acceptance_length=acceptance(step, extra),
            more=spent.figures,
        )

    settings = LoopSettings(
        steps=steps,
        learning_rate=optimization.learning_rate,
        muon_scale=optimization.muon_scale,
        accumulation=accumulation,
        schedule=Schedule(optimization.schedule.lower()),
        warmup_ratio=optimization.warmup_ratio,
        weight_decay=optimization.weight_decay,
        clip_norm=optimization.clip_norm,
        ema_decay=optimization.ema_decay,
        zero_stage=ctx.task.execution.zero_stage,
        bf16=optimization.precision == "BF16",
        checkpoint_every_steps=ctx.task.execution.checkpoint_every_steps,
        seed=optimization.seed,
    )
    began = time.monotonic()
    try:
        result = train(
            objective, batches, settings, progress=progress, checkpoints=checkpoints, stop_asked=ctx.stop.is_set
        )
    except Stopped as stop:
        ctx.checkpoints.wait()
        raise stopped() from stop
    if ctx.rank == 0:
        took = {"seconds": time.monotonic() - began, "seconds_of_steps": spent.seconds}
        log.info("%s%s", COST_LINE, json.dumps(took | spent.figures))
    return Trained(result, from_rank_0(checkpoints.history))


class _PodCheckpoints:
    """The loop's view of the checkpoints: the processes of a pod write into one folder, which its first one uploads."""

    def __init__(self, ctx: StageContext, history: LossHistory) -> None:
        self._ctx = ctx
        self._restored = ctx.scratch / _RESTORED
        self.history = history
        self.uri = ctx.checkpoints.uri

    def latest(self) -> Path | None:
        """Returns a folder with the newest complete checkpoint, the same on all ranks, or None."""
        ctx = self._ctx
        # Rank 0 speaks for all. One that was told to stop by now need not download a checkpoint first.
        found, stop = from_rank_0((ctx.patiently(ctx.checkpoints.latest) if ctx.rank == 0 else None, ctx.stop.is_set()))
        if stop:
            raise stopped()
        ctx.progress.begin(self.history.steps, done=found.step if found else 0)
        if found is None:
            return None
        if ctx.local_rank == 0:
            ctx.checkpoints.restore(found, self._restored, ctx.patiently)
        dist.barrier()
        if ctx.rank == 0:
            self.history = LossHistory.read(self._restored / _HISTORY_NAME)
            log.info("goes on from the checkpoint of step %d", found.step)
        return self._restored

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Writes a checkpoint; the upload goes on beside the training."""
        ctx = self._ctx
        folder = ctx.scratch / f"checkpoint-{step}"
        if ctx.local_rank == 0:
            for left in self._ctx.scratch.glob(f"{_RESTORED}*"):  # what it was converted to, too
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed meanwhile
            folder.mkdir()
        dist.barrier()
        write(folder)
        if ctx.rank == 0:
            self.history.write(folder / _HISTORY_NAME)
        dist.barrier()
        if ctx.local_rank == 0:
            ctx.checkpoints.save(folder, step)


def write_report(ctx: StageContext, trained: Trained, **more: JsonValue) -> None:
    """Writes `training.json` beside the weights: the config, what was trained on, the losses, the versions.

    It holds nothing that differs between two runs of one config, so that equal weights are an equal artifact.
    """
    report = {
        "config": ctx.config.model_dump(mode="json"),
        **more,
        "steps": trained.result.steps,
        "tokens": trained.result.tokens,
        "losses": trained.history.points,
        "last_batch": dict(trained.result.metrics),
        "versions": {name: version(name) for name in _DISTRIBUTIONS},
    }
    (ctx.output / REPORT_NAME).write_text(json.dumps(report, indent=2) + "\n")
