import shutil

import numpy as np
import pytest
import torch

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.data import teacher as teachers
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.teacher import OnlineTeacher, capture

CPU = torch.device("cpu")


@pytest.fixture
def dialogues():
    random = np.random.default_rng(0)
    shapes = [(3, 4), (9, 2), (5, 20), (7, 7), (2, 3)]
    return [
        Dialogue(
            f"line {i}",
            "maths",
            random.integers(64, size=p).astype(np.int32),
            random.integers(64, size=a).astype(np.int32),
        )
        for i, (p, a) in enumerate(shapes)
    ]


class StoppedError(Exception):
    pass


def captured(folder, dialogues, target, *, local_rank=0, local_world_size=1, dtype=torch.float32, **options):
    settings = {
        "greedy": False,
        "dtype": dtype,
        "device": CPU,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "barrier": lambda: None,
        "check_stopped": lambda: None,
        **options,
    }
    return capture(folder, dialogues, target, **settings)


def assert_same(left, right, *, exact=False):
    tolerance = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-4, "rtol": 1e-4}
    assert left.names == right.names
    for name in ("ids", "lengths", "answer"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    for row, length in enumerate(left.lengths):
        for name in ("taps", "last_hidden"):
            torch.testing.assert_close(
                getattr(left.states, name)[row, :length], getattr(right.states, name)[row, :length], **tolerance
            )
        assert torch.equal(left.greedy[row, :length], right.greedy[row, :length])


def test_an_online_batch_is_what_the_target_says_of_each_dialogue(dialogues, target):
    batch = OnlineTeacher(target, greedy=False, device=CPU).batch(dialogues)
    for row, dialogue in enumerate(dialogues):
        alone = target.states(dialogue.ids[None])
        torch.testing.assert_close(batch.states.taps[row, : len(dialogue)], alone.taps[0], atol=1e-4, rtol=1e-4)
        likely = (alone.last_hidden[0] @ target.head.weight.T).argmax(-1)
        assert torch.equal(batch.greedy[row, : len(dialogue)], likely)
    assert batch.answer.sum(1).tolist() == [4, 2, 20, 7, 3]
    assert OnlineTeacher(target, greedy=True, device=CPU).batch(dialogues).greedy is None


def test_captured_states_are_the_online_ones(dialogues, target, tmp_path):
    online = OnlineTeacher(target, greedy=False, device=CPU)
    teacher = captured(tmp_path / "states", dialogues, target)
    for members in (dialogues, dialogues[3:1:-1], dialogues[4:]):
        assert_same(teacher.batch(members), online.batch(members))
    assert captured(tmp_path / "other", dialogues, target, greedy=True).batch(dialogues).greedy is None


def test_processes_of_one_machine_share_the_work(dialogues, target, tmp_path, monkeypatch):
    monkeypatch.setattr(teachers, "MICRO_BATCH_TOKENS", 20)
    alone = captured(tmp_path / "alone", dialogues, target)
    # One after the other: the second finds what the first has not yet declared complete.
    captured(tmp_path / "shared", dialogues, target, local_rank=0, local_world_size=2)
    (tmp_path / "shared" / "complete").unlink()
    teacher = captured(tmp_path / "shared", dialogues, target, local_rank=1, local_world_size=2)
    assert_same(teacher.batch(dialogues), alone.batch(dialogues), exact=True)


def test_complete_states_are_used_again_and_missing_ones_computed_to_the_same_bits(
    dialogues, target, tmp_path, monkeypatch
):
    first = captured(tmp_path / "a", dialogues, target, dtype=torch.bfloat16).batch(dialogues)
    with monkeypatch.context() as patch:
        patch.setattr(target, "states", lambda _ids: pytest.fail("the target ran again"))
        again = captured(tmp_path / "a", dialogues, target, dtype=torch.bfloat16).batch(dialogues)
        assert_same(again, first, exact=True)
    (tmp_path / "a" / "complete").unlink()
    again = captured(tmp_path / "a", dialogues, target, dtype=torch.bfloat16).batch(dialogues)
    assert_same(again, first, exact=True)


def test_a_stopped_capture_is_not_complete(dialogues, target, tmp_path):
    def stop():
        raise StoppedError

    with pytest.raises(StoppedError):
        captured(tmp_path / "a", dialogues, target, check_stopped=stop)
    assert not (tmp_path / "a" / "complete").exists()


def test_states_that_do_not_fit_the_disk_are_refused_first(dialogues, target, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(StageError, match=r"teacher\.mode to Online") as caught:
        captured(tmp_path / "a", dialogues, target)
    assert caught.value.reason is FailureReason.OUT_OF_DISK
    assert not list((tmp_path / "a").glob("*.bin"))
