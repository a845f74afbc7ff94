import numpy as np
import pytest
import torch

from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.teacher import OnlineTeacher

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


def test_an_online_batch_is_what_the_target_says_of_each_dialogue(dialogues, target):
    batch = OnlineTeacher(target, greedy=False, device=CPU).batch(dialogues)
    taps, greedy = batch.by_dialogue(batch.states.taps), batch.by_dialogue(batch.greedy)
    for index, dialogue in enumerate(dialogues):
        alone = target.states(dialogue.ids[None])
        torch.testing.assert_close(taps[index], alone.taps[0], atol=1e-4, rtol=1e-4)
        likely = (alone.last_hidden[0] @ target.head.weight.T).argmax(-1)
        assert torch.equal(greedy[index], likely)
    assert [int(marks.sum()) for marks in batch.by_dialogue(batch.answer)] == [4, 2, 20, 7, 3]
    assert OnlineTeacher(target, greedy=True, device=CPU).batch(dialogues).greedy is None
