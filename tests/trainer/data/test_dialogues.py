from collections import Counter

import numpy as np
import pytest

from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.dialogues import DialogueBatches
from osprey_trainer.data.split import Split


class Names:
    """In place of the target's states, which these tests do not need: a batch is the names of its dialogues."""

    announced = None

    def prepare(self, dialogues):
        self.announced = [dialogue.name for dialogue in dialogues]

    def batch(self, dialogues):
        names = [dialogue.name for dialogue in dialogues]
        assert self.announced in [None, names]  # what is announced is what is asked for
        return names


def dialogues(count):
    lengths = np.random.default_rng(0).integers(2, 200, size=count)
    return [
        Dialogue(str(i), "maths", np.zeros(3, np.int32), np.zeros(length, np.int32)) for i, length in enumerate(lengths)
    ]


def batches(count=100, *, batch=4, rank=0, world_size=1, accumulation=1, seed=0):
    split = Split(batch, rank, world_size, accumulation)
    return DialogueBatches(dialogues(count), Names(), split=split, seed=seed)


def steps(source, count, accumulation=1):
    return [[name for _ in range(accumulation) for name in next(source)] for _ in range(count)]


@pytest.mark.parametrize(("count", "batch"), [(100, 4), (96, 4), (5, 4), (33, 2)])
def test_every_dialogue_is_seen_once_an_epoch(count, batch):
    source = batches(count, batch=batch)
    chunk = min(8, count // batch) * batch
    seen = Counter(name for step in steps(source, 3 * count * chunk // batch) for name in step)
    assert set(seen.values()) == {3 * chunk}


def test_a_batch_larger_than_the_data_repeats_it_evenly():
    seen = Counter(steps(batches(3, batch=8), 1)[0])
    assert sorted(seen.values()) == [2, 3, 3]


def test_dialogues_of_a_batch_are_alike_in_length_and_batches_come_in_no_order():
    items = dialogues(400)
    source = batches(400)
    lengths = [[len(items[int(name)]) for name in step] for step in steps(source, 100)]
    spread = np.mean([max(step) - min(step) for step in lengths])
    assert spread < 35  # 120 where four are drawn at random
    firsts = [step[0] for step in lengths[:8]]
    assert firsts != sorted(firsts)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 3), (2, 1), (4, 1), (2, 2)])
def test_the_batch_of_a_step_does_not_depend_on_the_processes(world_size, accumulation):
    alone = steps(batches(), 30)
    shared = [
        steps(batches(rank=rank, world_size=world_size, accumulation=accumulation), 30, accumulation)
        for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        assert sorted(name for one in shared for name in one[step]) == sorted(whole)


def test_the_saved_state_continues_exactly():
    source = batches(accumulation=2)
    steps(source, 13, 2)
    state = source.state_dict()
    expected = steps(source, 40, 2)
    again = batches(accumulation=2)
    again.load_state_dict(state)
    assert steps(again, 40, 2) == expected


def test_another_seed_gives_another_order():
    assert steps(batches(), 5) != steps(batches(seed=1), 5)
