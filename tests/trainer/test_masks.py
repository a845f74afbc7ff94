"""Masks and shifts on a dialogue small enough to check by eye."""

import pytest
import torch

from osprey_runtime.errors import StageError
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.masks import asked_rows, supervise
from osprey_trainer.models.target import TargetStates

# position:  0    1    2    3    4    5    6    7    8    9
# token:    BOS  "2"  "+"  "2"  "is" "4"  "."  EOS  "?"  "!"
# answer:    -    -    -    -    A    A    A    A    -    A
ANSWER = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
IDS = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 18, 19])


def states(length):
    return TargetStates(torch.zeros(length, 3), torch.zeros(length, 1))


def batch(answer=ANSWER, ids=IDS, greedy=None):
    return DialogueBatch(ids, (len(ids),), answer, states(len(ids)), greedy, ("d",))


def rows_of(answer, steps, *lengths):
    """By step, the rows that serving asks for."""
    ends = torch.cat([torch.full((n,), sum(lengths[: i + 1]) - 1) for i, n in enumerate(lengths)])
    return [mask.nonzero().flatten().tolist() for mask in asked_rows(answer, ends, steps)]


def test_rows_that_serving_asks_for():
    table = {  # step: rows. Row 3 is the prompt's last token: the first row asked for.
        0: [3, 4, 5],  # inputs x4 x5 x6, predicted x5 x6 x7
        1: [3, 4],  # predicted x6 x7
        2: [3],  # predicted x7
        3: [],
    }
    assert dict(enumerate(rows_of(ANSWER, 4, 10))) == table


def test_the_definition_of_the_mask():
    answer = torch.rand(90, generator=torch.Generator().manual_seed(0)) < 0.8
    lengths = (30, 1, 2, 40, 17)
    for k, found in enumerate(rows_of(answer, 3, *lengths)):
        expected = []
        for index, length in enumerate(lengths):
            start = sum(lengths[:index])
            for i in range(start, start + length):
                needed = range(i + 1, i + 3 + k)
                expected += [i] * all(j < start + length and bool(answer[j]) for j in needed)
        assert found == expected


def test_labels_and_teachers_of_the_toy_dialogue():
    supervision = supervise(batch(), torch.ones(20, dtype=torch.bool), 3)
    assert supervision.rows.tolist() == [3, 4, 5]
    assert supervision.labels[0].tolist() == [15, 16, 17]
    assert supervision.labels[1, :2].tolist() == [16, 17]
    assert supervision.labels[2, :1].tolist() == [17]
    assert supervision.teachers[0].tolist() == [4, 5, 6]
    assert supervision.teachers[1, :2].tolist() == [5, 6]
    assert supervision.asked.sum(-1).tolist() == [3, 2, 1]


def test_the_dialogue_packed_behind_it_changes_nothing():
    alone = supervise(batch(), torch.ones(20, dtype=torch.bool), 3)
    packed = DialogueBatch.collate([IDS, IDS], [ANSWER] * 2, [states(10)] * 2, ["a", "b"])
    both = supervise(packed, torch.ones(20, dtype=torch.bool), 3)
    for name in ("asked", "scored", "labels"):
        assert torch.equal(getattr(both, name), getattr(alone, name).repeat(1, 2)), name
    assert torch.equal(both.rows, torch.cat([alone.rows, alone.rows + 10]))
    assert torch.equal(both.teachers, torch.cat([alone.teachers, alone.teachers + 10], dim=1))


def test_rows_whose_token_cannot_be_drafted_have_no_loss_but_are_asked():
    t2d = torch.ones(20, dtype=torch.bool)
    t2d[16] = False
    supervision = supervise(batch(), t2d, 2)
    assert supervision.asked[0].tolist() == [True, True, True]
    assert supervision.scored[0].tolist() == [True, False, True]
    assert supervision.scored[1, :2].tolist() == [False, True]


def test_sampled_answers_are_judged_by_the_targets_most_likely_token():
    t2d = torch.ones(20, dtype=torch.bool)
    t2d[3] = False
    greedy = torch.full((10,), 5)
    greedy[5] = 3  # after position 5: the teacher of row 4 at step 0 and of row 3 at step 1
    supervision = supervise(batch(greedy=greedy), t2d, 2)
    assert supervision.scored[0].tolist() == [True, False, True]
    assert supervision.scored[1, :2].tolist() == [False, True]


def test_two_answers_of_one_dialogue_do_not_touch():
    answer = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert rows_of(answer, 2, 8) == [[0, 1, 5], [0]]


def test_a_dialogue_needs_a_prompt():
    with pytest.raises(StageError, match="Dialogue x begins with the target's answer"):
        DialogueBatch.collate([torch.tensor([1, 2])], [torch.tensor([True, True])], [states(2)], names=["x"])
