"""A training stage that is stopped or killed goes on, and ends with the same bits."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import Execution

SAVE_OFTEN = Execution(checkpoint_every_steps=10, checkpoints_kept=2)
DEADLINE_S = 120


@pytest.fixture(params=["AdamW", "Muon"])
def distil(machine, greedy_answers, request):
    """Makes the task of a run of 90 steps on a machine of its own."""
    optimizer, execution = {}, SAVE_OFTEN
    if request.param == "Muon":
        optimizer, execution = {"muon_scale": 3.0}, SAVE_OFTEN.model_copy(update={"zero_stage": 0})

    def make(folder: Path):
        other = type(machine)(folder)
        folder.mkdir()
        answers = other.answers(greedy_answers)
        pruned = other.done(other.prune()).artifact
        initial = other.done(other.convert(answers, backbone=pruned)).artifact
        return other, other.distil(initial, answers, epochs=15, execution=execution, **optimizer)

    return make


def wait_for_checkpoint(machine, task, process=None):
    deadline = time.monotonic() + DEADLINE_S
    while not machine.checkpoints(task):
        assert time.monotonic() < deadline, "no checkpoint in time"
        assert process is None or process.poll() is None, "the stage ended"
        time.sleep(0.02)


def test_killed_and_stopped_runs_end_with_the_bits_of_an_uninterrupted_one(distil, tmp_path, capfd):
    whole, task = distil(tmp_path / "whole")
    expected = whole.done(task)
    interrupted, task = distil(tmp_path / "interrupted")

    process = interrupted.start(task, scratch="killed")
    try:
        wait_for_checkpoint(interrupted, task, process)
    finally:
        process.kill()
        process.wait()
    prefix = Path(task.prefix.removeprefix("file://"))
    assert process.returncode == -signal.SIGKILL
    assert not (prefix / "manifest.json").exists()
    killed_at = interrupted.checkpoints(task)[-1]

    # Another pod, with an empty scratch volume, is told to stop when it has saved something itself.
    def stop_later():
        while interrupted.checkpoints(task)[-1] <= killed_at:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_later)
    stopper.start()
    code, outcome = interrupted.run(task, scratch="stopped")
    stopper.join()
    assert (code, outcome.failure) == (143, FailureReason.STOPPED)
    assert not (prefix / "manifest.json").exists()
    assert interrupted.checkpoints(task)[-1] > killed_at

    stopped_at = int(interrupted.checkpoints(task)[-1].split("-")[1])
    capfd.readouterr()
    resumed = interrupted.done(task, scratch="resumed")
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distil ")]
    assert lines[0].startswith(f"distil {stopped_at + 1}/90")
    # The digest covers the weights and training.json with its losses, bit by bit.
    assert resumed.artifact.digest == expected.artifact.digest
    assert resumed.result == expected.result
    assert not resumed.reused


def test_the_newest_checkpoint_with_all_its_shards_is_gone_on_from(machine, tmp_path, caplog):
    def pretraining(place):
        tokens, pruned = place.done(place.tokenize()).artifact, place.done(place.prune()).artifact
        execution = Execution(checkpoint_every_steps=10, checkpoints_kept=4)
        return place.pretrain(pruned, tokens, steps=200, execution=execution)

    (tmp_path / "whole").mkdir()
    whole = type(machine)(tmp_path / "whole")
    expected = whole.done(pretraining(whole)).artifact

    task = pretraining(machine)

    def stop_later():
        while len(machine.checkpoints(task)) < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_later)
    stopper.start()
    _, outcome = machine.run(task)
    stopper.join()
    assert outcome.failure is FailureReason.STOPPED
    folder = Path(task.prefix.removeprefix("file://")) / "checkpoints"
    good, truncated, missing, unmarked = (folder / name for name in machine.checkpoints(task))
    shard = next(path.relative_to(good) for path in good.rglob("*_optim_states.pt"))
    os.truncate(truncated / shard, (truncated / shard).stat().st_size // 2)
    (missing / shard).unlink()
    (unmarked / "complete.json").unlink()

    caplog.set_level("INFO")
    resumed = machine.done(task, scratch="another")
    assert f"goes on from the checkpoint of step {int(good.name.split('-')[1])}" in caplog.text
    assert resumed.artifact.digest == expected.digest
