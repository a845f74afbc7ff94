"""Two processes train as one does: the same global batches, and about the same losses."""

import json

import pytest

from osprey_api.stages import Execution

ALONE, PAIR = Execution(), Execution(processes_per_node=2, zero_stage=1)
SHARED = Execution(processes_per_node=2, zero_stage=1, teacher_tensor_parallel=2)


def losses(machine, task):
    outcome = machine.done(task)
    report = json.loads((machine.files(outcome.artifact) / "training.json").read_text())
    return outcome.result, [loss for _, loss in report["losses"]]


@pytest.fixture
def other_machine(machine, tmp_path):
    """The same artifacts would be found on the same one."""
    (tmp_path / "other").mkdir()
    return type(machine)(tmp_path / "other")


def test_pretraining(machine, other_machine):
    results = []
    for place, execution in ((machine, ALONE), (other_machine, PAIR)):
        pruned = place.done(place.prune()).artifact
        tokens = place.done(place.tokenize()).artifact
        results.append(losses(place, place.pretrain(pruned, tokens, steps=12, execution=execution)))
    (alone, alone_losses), (pair, pair_losses) = results
    assert pair_losses == pytest.approx(alone_losses, rel=1e-3)
    assert pair.tokens == alone.tokens


@pytest.mark.parametrize("pair", [PAIR, SHARED], ids=["each its own target", "one shared target"])
def test_distillation(machine, other_machine, greedy_answers, pair, capfd):
    results = []
    for place, execution in ((machine, ALONE), (other_machine, pair)):
        answers = place.answers(greedy_answers)
        pruned = place.done(place.prune()).artifact
        initial = place.done(place.convert(answers, backbone=pruned)).artifact
        results.append(losses(place, place.distil(initial, answers, epochs=2, execution=execution)))
    # One rank counts what all of them need.
    assert capfd.readouterr().err.count("a process needs at least") == 1
    (alone, alone_losses), (together, losses_together) = results
    assert losses_together == pytest.approx(alone_losses, rel=1e-3)
    assert together.supervised_tokens == alone.supervised_tokens
    assert together.simulated_acceptance_length == pytest.approx(alone.simulated_acceptance_length, rel=0.05)
