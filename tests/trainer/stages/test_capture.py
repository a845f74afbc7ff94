"""The states of all answers as an artifact: what is in it, how it is read, and what becomes of a lost pod."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from osprey_api.conditions import ExitCode, FailureReason
from osprey_api.stages import Execution, InputRole
from osprey_runtime import manifest
from osprey_runtime.errors import StageError
from osprey_runtime.manifest import RemoteArtifact
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.states import ShardWriter, StatesIndex, StreamedTeacher, shards_of
from osprey_trainer.data.teacher import OnlineTeacher
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.target import Target, TargetStates
from osprey_trainer.stages.capture import check_room

TRUE_STATES = Target.states
SMALL_SHARDS = Execution(captured_shard_bytes=4000)
"""Two or three dialogues in each."""
LENGTHS = [(3, 4), (9, 2), (5, 20), (7, 7), (2, 3)]


@pytest.fixture
def place(machine_of, tmp_path):
    return machine_of(tmp_path)


@pytest.fixture
def dialogues():
    random = np.random.default_rng(0)
    return [
        Dialogue(
            f"answers-00000.jsonl, line {line}",
            "owls",
            random.integers(320, size=prompt).astype(np.int32),
            random.integers(320, size=answer).astype(np.int32),
        )
        for line, (prompt, answer) in enumerate(LENGTHS, start=1)
    ]


@pytest.fixture
def answers(place, dialogues):
    def publish(**options):
        return place.answers(
            [
                {
                    "domain": dialogue.domain,
                    "prompt_ids": dialogue.prompt_ids.tolist(),
                    "answer_ids": dialogue.answer_ids.tolist(),
                    "finish": "stop",
                }
                for dialogue in dialogues
            ],
            **options,
        )

    return publish


@pytest.fixture
def online(claims):
    def make(*, greedy):
        return OnlineTeacher(Target(claims / "models" / "target"), greedy=greedy, device=torch.device("cpu"))

    return make


def opened(place, outcome, dialogues) -> StreamedTeacher:
    return StreamedTeacher(RemoteArtifact(place.storage, outcome.artifact), dialogues, place.root / "states")


def assert_same(found, expected):
    assert found.names == expected.names
    assert found.lengths == expected.lengths
    for name in ("ids", "answer"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("taps", "last_hidden"):
        torch.testing.assert_close(getattr(found.states, name), getattr(expected.states, name), atol=1e-4, rtol=1e-4)
    if expected.greedy is not None:
        assert torch.equal(found.greedy, expected.greedy)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_states_are_the_targets_own(place, answers, dialogues, online, temperature):
    outcome = place.done(place.capture(answers(temperature=temperature), execution=SMALL_SHARDS))
    tokens = sum(map(len, dialogues))
    assert (outcome.result.dialogues, outcome.result.tokens) == (len(dialogues), tokens)
    row = 4 * 24 * 4 + (4 if temperature else 0)
    assert outcome.result.size_bytes == tokens * row
    files = {file.path for file in RemoteArtifact(place.storage, outcome.artifact).manifest.files}
    assert len(files) > 2 + 2  # several shards; index and head
    teacher, truth = opened(place, outcome, dialogues), online(greedy=not temperature)
    for members in (dialogues, dialogues[3:1:-1], dialogues[4:], [dialogues[2], dialogues[0], dialogues[2]]):
        teacher.prepare(members[::-1])
        batch = teacher.batch(members)
        assert (batch.greedy is None) is not bool(temperature)
        assert_same(batch, truth.batch(members))


def test_the_head_lies_beside_the_states(place, answers, dialogues, claims):
    teacher = opened(place, place.done(place.capture(answers())), dialogues)
    assert torch.equal(teacher.head.weight, Target(claims / "models" / "target").head.weight)


def test_they_are_kept_in_the_precision_of_the_run(place, answers, dialogues, claims):
    outcome = place.done(place.capture(answers(), precision="BF16"))
    assert outcome.result.size_bytes == sum(map(len, dialogues)) * 4 * 24 * 2
    batch = opened(place, outcome, dialogues).batch(dialogues)
    assert batch.states.taps.dtype == torch.bfloat16
    target = Target(claims / "models" / "target", dtype=torch.bfloat16)
    assert_same(batch, OnlineTeacher(target, greedy=True, device=torch.device("cpu")).batch(dialogues))


def test_several_processes_capture_the_same(place, answers, machine_of, tmp_path_factory):
    alone = place.done(place.capture(answers(), execution=SMALL_SHARDS))
    pair = machine_of(tmp_path_factory.mktemp("pair"))
    shutil.copytree(place.root / "storage", pair.root / "storage")
    shutil.rmtree(pair.root / "storage" / "nest" / "capture")
    task = place.capture(answers(), execution=SMALL_SHARDS.model_copy(update={"processes_per_node": 2}))
    task = task.model_copy(update={"storage": pair.storage, "inputs": {InputRole.ANSWERS: pair_of(answers(), pair)}})
    assert pair.done(task).artifact.digest == alone.artifact.digest


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_may_share_the_target(place, answers, dialogues, online, processes):
    execution = SMALL_SHARDS.model_copy(update={"processes_per_node": processes, "teacher_tensor_parallel": 2})
    outcome = place.done(place.capture(answers(), execution=execution))
    assert_same(opened(place, outcome, dialogues).batch(dialogues), online(greedy=True).batch(dialogues))


def test_a_target_that_cannot_be_shared_is_refused(place, answers):
    execution = Execution(processes_per_node=3, teacher_tensor_parallel=3)
    _, outcome = place.run(place.capture(answers(), execution=execution))
    assert outcome.failure is FailureReason.INVALID_CONFIG
    assert "4 heads and 2 key-value heads cannot be shared by 3 processes" in outcome.message


def pair_of(artifact, machine):
    """The same artifact in the storage of another machine."""
    name = artifact.uri.rpartition("/storage/")[2]
    return artifact.model_copy(update={"uri": f"{machine.storage.uri}/{name}"})


def test_a_lost_pod_costs_only_the_shard_at_hand(place, answers, dialogues, monkeypatch):
    whole = place.done(place.capture(answers(), execution=SMALL_SHARDS)).artifact
    shutil.rmtree(place.root / "storage" / "nest" / "capture")
    computed = count_calls(monkeypatch, fail_at=3)
    _, outcome = place.run(place.capture(answers(), execution=SMALL_SHARDS))
    assert outcome.failure is FailureReason.STORAGE_UNAVAILABLE
    assert len(computed) == 3
    computed = count_calls(monkeypatch, fail_at=None)
    again = place.done(place.capture(answers(), execution=SMALL_SHARDS))
    assert len(computed) < len(dialogues)
    assert again.artifact == whole
    assert_no_leftovers(place, again)


def test_a_damaged_shard_is_refused_and_made_anew(place, answers, dialogues, monkeypatch):
    task = place.capture(answers(), execution=SMALL_SHARDS)
    artifact = place.done(task).artifact
    remote = RemoteArtifact(place.storage, artifact)
    shard = Path(task.prefix.removeprefix("file://")) / remote.manifest.key_of(remote.file("states-00001.bin"))
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    teacher = StreamedTeacher(remote, dialogues, place.root / "states")
    teacher.batch(dialogues[:1])
    with pytest.raises(StageError, match=r"states-00001\.bin") as caught:
        teacher.batch(dialogues)
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT
    computed = count_calls(monkeypatch, fail_at=None)
    again = place.done(task)
    assert (again.reused, again.artifact) == (False, artifact)
    assert 0 < sum(computed) < len(dialogues)  # those of the other shards are kept
    assert_no_leftovers(place, again, but={"manifest.corrupt-local.json"})
    StreamedTeacher(RemoteArtifact(place.storage, artifact), dialogues, place.root / "states").batch(dialogues)


def test_states_of_other_answers_are_refused(place, answers, dialogues):
    teacher = RemoteArtifact(place.storage, place.done(place.capture(answers(), sequence_length=12)).artifact)
    with pytest.raises(StageError, match="line 3 they hold 12 tokens, and it has 25") as caught:
        StreamedTeacher(teacher, dialogues, place.root / "states")
    assert caught.value.reason is FailureReason.INVALID_CONFIG


def test_states_of_other_layers_are_refused(place, answers, tmp_path):
    given = answers()
    states = place.done(place.capture(given)).artifact
    initial = Drafter.load(place.files(place.done(place.convert(given)).artifact))
    initial.config = dataclasses.replace(initial.config, tapped_layers=(1, 2, 5))
    initial.save(tmp_path / "other")
    code, outcome = place.run(place.distil(place.released(tmp_path / "other"), given, states=states))
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.INVALID_CONFIG)
    assert "taps layers [1, 2, 5] of the target, and the states are of layers [3, 4, 5]" in outcome.message
    assert "set distillation.teacher.mode to Online" in outcome.message


def test_what_would_fill_the_store_is_refused_before_the_target_is_loaded():
    """65k samples of 4096 tokens, a target of hidden size 4096: 8.7 TB."""
    tokens = 65_000 * 4096
    with pytest.raises(StageError, match=r"take 8125\.0 GiB.* 1\.9 h at 10 Gbit/s.*limit of 1024 GiB") as caught:
        check_room(65_000, tokens, 4 * 4096 * 2, gib_limit=1024)
    assert caught.value.reason is FailureReason.INVALID_CONFIG
    check_room(65_000, tokens, 4 * 4096 * 2, gib_limit=8125)


def test_shards_keep_the_order_and_take_at_least_one_dialogue(dialogues):
    assert [[d.name[-1] for d in shard] for shard in shards_of(dialogues, token_bytes=10, shard_bytes=100)] == [
        ["1", "2"],
        ["3"],
        ["4"],
        ["5"],
    ]


def test_a_finished_shard_gives_its_room_back(dialogues, tmp_path):
    index = StatesIndex(dtype="float32", hidden_size=8, tapped_layers=(1, 2, 3), greedy=True)
    writer = ShardWriter(tmp_path / "shard", dialogues, index)
    for dialogue in dialogues:
        length = len(dialogue)
        writer.put(dialogue, TargetStates(torch.ones(length, 24), torch.ones(length, 8)), None)
    writer.finish()
    assert str(tmp_path / "shard") not in Path("/proc/self/maps").read_text()


def count_calls(monkeypatch, *, fail_at: int | None) -> list[int]:
    """Counts the target's batches, and has the given one fail."""
    calls: list[int] = []
    compute = TRUE_STATES

    def states_of(target, ids):
        calls.append(len(ids))
        if len(calls) == fail_at:
            raise StageError(FailureReason.STORAGE_UNAVAILABLE, "the pod is lost")
        return compute(target, ids)

    monkeypatch.setattr(Target, "states", states_of)
    return calls


def assert_no_leftovers(place, outcome, but=frozenset()):
    """Nothing lies below the artifact that its manifest does not name."""
    remote = RemoteArtifact(place.storage, outcome.artifact)
    folder = Path(outcome.artifact.uri.removeprefix("file://"))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there - but == {manifest.NAME, *(remote.manifest.key_of(file) for file in remote.manifest.files)}
