"""Two processes on this machine."""

import importlib
import itertools
import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from dev.network import free_ports
from osprey_trainer.loop import train
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.objectives import Pretraining
from osprey_trainer.settings import LoopSettings


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("ranks_worker")


def two_ranks(worker, source, out, *, stop_at=None, hidden_from=None):
    """Exit codes of both."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["osprey_trainer.loop"])  # imports once for all processes
    (port,) = free_ports(1)
    processes = [
        context.Process(
            target=worker.run,
            args=(rank, port, source, out),
            # Only one of them is told: the other must learn it from the reduction.
            kwargs={"stop_at": stop_at if rank == 0 else None, "hidden": rank == hidden_from},
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=200)
    return [process.exitcode for process in processes]


class Interleaved:
    """What both ranks saw, one after the other."""

    def __init__(self, windows):
        self.turns = itertools.cycle([windows(0), windows(1)])

    def __next__(self):
        return next(next(self.turns))


def test_two_ranks_stopped_and_resumed_equal_one_process_on_all_their_rows(worker, source_folder, tmp_path):
    assert two_ranks(worker, source_folder, tmp_path, stop_at=1) == [143, 143]
    assert not (tmp_path / "weights.pt").exists()
    assert {path.name for path in (tmp_path / "checkpoint").glob("rank*.pt")} == {"rank0.pt", "rank1.pt"}
    assert two_ranks(worker, source_folder, tmp_path) == [0, 0]

    settings = LoopSettings(steps=4, learning_rate=1e-2, bf16=False, ema_decay=0.5, zero_stage=0, accumulation=2)
    alone = train(
        Pretraining(Backbone.prune(source_folder, 2)),
        Interleaved(worker.Windows),
        settings,
        progress=lambda *_, **__: None,
    )
    together = torch.load(tmp_path / "weights.pt")
    assert together.keys() == alone.weights.keys()
    for name, value in alone.weights.items():
        torch.testing.assert_close(together[name], value, atol=2e-3, rtol=1e-2)


def test_a_checkpoint_that_one_rank_does_not_see_stops_both(worker, source_folder, tmp_path):
    """Neither goes on alone, nor do they wait for each other."""
    assert two_ranks(worker, source_folder, tmp_path, stop_at=1) == [143, 143]
    began = time.monotonic()
    assert two_ranks(worker, source_folder, tmp_path, hidden_from=1) == [75, 75]
    assert time.monotonic() - began < 60
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        "CorruptArtifact: The ranks see different checkpoints (steps by rank: rank 0: 2, rank 1: none)"
    )
    assert f"delete the checkpoints below {tmp_path / 'checkpoint'}" in errors[0]
