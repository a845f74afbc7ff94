"""One rank of test_ranks.py: pretrains on its own windows."""

import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from osprey_api.conditions import EXIT_CODE_OF
from osprey_runtime.errors import StageError
from osprey_trainer.batch import WindowBatch
from osprey_trainer.loop import train
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.objectives import Pretraining
from osprey_trainer.settings import LoopSettings


class Windows:
    """Rank 0 has windows of 12 tokens, rank 1 of 5: a mean of means would be wrong."""

    def __init__(self, rank: int) -> None:
        self.rank, self.served = rank, 0

    def __next__(self) -> WindowBatch:
        generator = torch.Generator().manual_seed(10 * self.served + self.rank)
        self.served += 1
        length = 13 if self.rank == 0 else 6
        return WindowBatch(torch.randint(8, (2, length), generator=generator), names=(f"rank{self.rank}",))

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


class Checkpoints:
    def __init__(self, folder: Path, *, hidden: bool) -> None:
        self.folder, self.hidden = folder, hidden
        self.uri = str(folder)

    def latest(self) -> Path | None:
        return self.folder if self.folder.exists() and not self.hidden else None

    def save(self, _step, write) -> None:
        self.folder.mkdir(exist_ok=True)
        write(self.folder)


def run(rank: int, port: int, source: Path, out: Path, *, stop_at: int | None, hidden: bool) -> None:
    """One of two ranks; is told to stop after step `stop_at`.

    hidden: it does not see the checkpoint.
    """
    os.environ.update(  # noqa: TID251 - as the runner does
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )

    stop = threading.Event()

    def progress(step, *_rest, **_more) -> None:
        if step == stop_at:
            stop.set()

    settings = LoopSettings(steps=4, learning_rate=1e-2, bf16=False, ema_decay=0.5, zero_stage=1)
    try:
        result = train(
            Pretraining(Backbone.prune(source, 2)),
            Windows(rank),
            settings,
            progress=progress,
            checkpoints=Checkpoints(out / "checkpoint", hidden=hidden),
            stop_asked=stop.is_set,
        )
    except StageError as error:
        (out / f"error-{rank}").write_text(f"{error.reason}: {error.message}")
        raise SystemExit(EXIT_CODE_OF[error.reason]) from error
    assert dist.get_world_size() == 2
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=2)
    if rank == 0:
        torch.save(result.weights, out / "weights.pt")
