"""A storage that refuses for a moment costs a moment; one that is full ends the stage, which goes on with more room."""

import os
import signal
from collections import Counter

import pytest

from dev.gate import Phase, Refusal, lets_all_pass
from osprey_api.conditions import FailureReason
from osprey_api.stages import Execution
from osprey_runtime import checkpoint, patience

OFTEN = Execution(checkpoint_every_steps=10, checkpoints_kept=2)
ANSWERS_OF_FULL_STORES = [(507, "XMinioStorageFull"), (400, "XMinioAdminBucketQuotaExceeded"), (403, "QuotaExceeded")]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(patience, "_DELAYS_S", (0.01,))
    monkeypatch.setattr(checkpoint, "_RETRIES_AFTER_S", (0.01,) * 20)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


@pytest.fixture
def machine(behind_gate):
    return behind_gate("storage")


@pytest.fixture
def pretraining(machine):
    pruned = machine.done(machine.prune()).artifact
    tokens = machine.done(machine.tokenize()).artifact
    return machine.pretrain(pruned, tokens, steps=60, execution=OFTEN)


class RefusesOnce:
    """Answers each request once as a storage does that is too busy, and then lets it pass."""

    def __init__(self):
        self.refused = Counter()

    def __call__(self, request, phase):
        if phase is not Phase.BEFORE:
            return None
        self.refused[request] += 1
        return Refusal(503, "SlowDown") if self.refused[request] == 1 else None

    def of(self, folder: str) -> int:
        return sum(folder in request.path for request in self.refused)


class Full:
    """Takes no more once a file has come whose key ends so."""

    def __init__(self, after: str, refusal: Refusal):
        self.after, self.refusal, self.is_full = after, refusal, False

    def __call__(self, request, phase):
        if request.method != "PUT":
            return None
        if phase is Phase.BEFORE:
            return self.refusal if self.is_full else None
        self.is_full |= phase is Phase.AFTER and request.path.endswith(self.after)
        return None


def test_each_request_of_each_stage_may_fail_once(machine, gate, greedy_answers):
    answers = machine.answers(greedy_answers)
    gate.guard = guard = RefusesOnce()
    backbone = machine.done(machine.prune()).artifact
    tokens = machine.done(machine.tokenize()).artifact
    machine.done(machine.pretrain(backbone, tokens, execution=OFTEN))
    initial = machine.done(machine.convert(answers, backbone=backbone)).artifact
    states = machine.done(machine.capture(answers, execution=Execution(captured_shard_bytes=20_000))).artifact
    machine.done(machine.distil(initial, answers, states=states, execution=OFTEN))
    machine.done(machine.distil(initial, answers, execution=OFTEN))
    assert guard.of("/parts/") > 4
    assert guard.of("/checkpoints/") > 4


def test_so_may_each_request_of_a_stage_that_goes_on(machine, gate, pretraining, caplog):
    def stops_with_a_checkpoint(request, phase):
        if phase is Phase.AFTER and request.path.endswith("/complete.json"):
            gate.guard = lets_all_pass
            os.kill(os.getpid(), signal.SIGTERM)

    gate.guard = stops_with_a_checkpoint
    _, outcome = machine.run(pretraining)
    assert outcome.failure is FailureReason.STOPPED
    gate.guard = guard = RefusesOnce()
    machine.done(pretraining, scratch="another")
    assert "goes on from the checkpoint of step" in caplog.text
    assert guard.of("/checkpoints/") > 4


@pytest.mark.parametrize(("status", "code"), ANSWERS_OF_FULL_STORES)
@pytest.mark.parametrize("after", ["complete.json", "model.safetensors"], ids=["checkpoint", "result"])
def test_a_full_storage_ends_it_and_with_more_room_it_goes_on(machine, gate, pretraining, caplog, after, status, code):  # noqa: PLR0917 - cases
    gate.guard = Full(after, Refusal(status, code))
    exit_code, outcome = machine.run(pretraining)
    assert (exit_code, outcome.failure) == (75, FailureReason.STORAGE_FULL), outcome.message
    assert f"is full ({status} {code}): free space or raise the quota" in outcome.message
    kept = machine.checkpoints(pretraining)
    assert kept
    folders = {key.split("/checkpoints/")[1].split("/")[0] for key in machine.keys(pretraining, "checkpoints")}
    assert folders == set(kept)  # what came of others takes no room
    assert not machine.keys(pretraining, "attempts")

    gate.guard = lets_all_pass
    machine.done(pretraining, scratch="another")
    assert f"goes on from the checkpoint of step {int(kept[-1].split('-')[1])}" in caplog.text
