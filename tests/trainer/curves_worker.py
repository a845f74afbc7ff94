"""One rank of test_curves.py: trains on its share of the global batches that every number of ranks sees alike."""

import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.dialogues import DialogueBatches
from osprey_trainer.data.split import Split
from osprey_trainer.data.teacher import OnlineTeacher
from osprey_trainer.data.windows import RandomWindows
from osprey_trainer.loop import Stopped, train
from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.target import Target
from osprey_trainer.objectives import Distillation, Objective, Pretraining
from osprey_trainer.settings import LoopSettings

VOCAB, GLOBAL_BATCH, STEPS = 64, 8, 50
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One run: what is trained, and how it is spread."""

    objective: str
    zero_stage: int = 0
    accumulation: int = 1
    clip_norm: float = 0.5
    ema_decay: float | None = None
    steps: int = STEPS
    muon_scale: float | None = None
    train_embedding: bool = True

    @property
    def settings(self) -> LoopSettings:
        return LoopSettings(
            steps=self.steps,
            learning_rate=1e-3,
            muon_scale=self.muon_scale,
            bf16=False,
            clip_norm=self.clip_norm,
            accumulation=self.accumulation,
            zero_stage=self.zero_stage,
            ema_decay=self.ema_decay,
            warmup_ratio=0.1,
            weight_decay=0.01,
        )


@dataclass(frozen=True)
class Models:
    """Folders of the models that are trained and of the target."""

    source: Path
    drafter: Path
    target: Path


class Text:
    """A stream of tokens; only some of them are predicted, so that windows differ in their number of rows."""

    def __init__(self) -> None:
        # Runs of predicted and of other tokens, longer than a window.
        random = np.random.default_rng(5)
        self.ids = np.concatenate([random.integers(32, size=20) + 32 * (run % 2) for run in range(40)])

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.ids[start : start + count]


def dialogues() -> list[Dialogue]:
    """Answers of 2 to 24 tokens."""
    random = np.random.default_rng(6)

    def some(count: int) -> np.ndarray:
        return random.integers(VOCAB, size=count)

    return [Dialogue(f"d{i}", "any", some(3 + i % 4), some(2 + 7 * i % 23)) for i in range(40)]


def make(case: Case, models: Models, *, rank: int, world_size: int) -> tuple[Objective[Any], Any]:
    """Objective and batches of one rank."""
    split = Split(GLOBAL_BATCH, rank, world_size, case.accumulation)
    if case.objective == "pretraining":
        backbone = Backbone.prune(models.source, 2)
        objective = Pretraining(backbone, vocabulary=torch.arange(32), train_embedding=case.train_embedding)
        return objective, RandomWindows(Text(), sequence_length=12, split=split, seed=1)
    drafter = Drafter.load(models.drafter)
    target = Target(models.target, tapped_layers=drafter.config.tapped_layers)
    batches = DialogueBatches(dialogues(), OnlineTeacher(target, greedy=False, device=CPU), split=split, seed=1)
    objective = Distillation(
        drafter,
        target.head,
        step_weights=(1.0, 0.8, 0.64),
        divergence=Divergence(),
        train_embedding=case.train_embedding,
    )
    return objective, batches


class Checkpoints:
    """One folder that all ranks share, as those of a pod do."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.uri = str(folder)

    def latest(self) -> Path | None:
        return self.folder if self.folder.exists() else None

    def save(self, _step, write) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True)
        dist.barrier()
        write(self.folder)
        dist.barrier()


def exact_muon() -> None:
    """Muon orthogonalises in fp32 from here on in this process.

    Torch rounds to bfloat16 there, whose last bit is a large one: two orders of the same sum end up up to 0.02 apart
    in the loss after 50 steps, and how far depends on the processor.
    """
    torch.Tensor.bfloat16 = lambda tensor: tensor.to(torch.float32, copy=True)


def run(rank: int, world_size: int, *, port: int, models: Models, out: Path, cases: list[Case], stop_at: int) -> None:
    """Trains each case in turn; `out/<number>.pt` is what rank 0 saw.

    stop_at: a step after which all stop with a checkpoint, `out/<number>`, unless they go on from one.
    """
    exact_muon()
    warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed 0.19.8 calls what torch 2.14 has newer names for
    torch.set_num_threads(1)
    os.environ.update(  # noqa: TID251 - as the runner does
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    for number, case in enumerate(cases):
        lines: list[tuple[int, float]] = []
        stop = threading.Event()

        def progress(step, _total, loss, *_rest, lines=lines, stop=stop, **_more) -> None:
            lines.append((step, loss))
            if step == stop_at - 1:  # heard during the next step
                stop.set()

        objective, batches = make(case, models, rank=rank, world_size=world_size)
        weights = {}
        try:
            result = train(
                objective,
                batches,
                case.settings,
                progress=progress,
                checkpoints=Checkpoints(out / str(number), rank),
                stop_asked=stop.is_set,
            )
            weights = dict(result.weights)
        except Stopped:
            assert stop_at != 0
        if rank == 0:
            torch.save({"lines": lines, "weights": weights}, out / f"{number}.pt")
    dist.destroy_process_group()
