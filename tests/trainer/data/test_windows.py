import numpy as np
import pytest
import torch

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.data import shards
from osprey_trainer.data.shards import ShardWriter, TokenStream
from osprey_trainer.data.split import Split
from osprey_trainer.data.windows import RandomWindows


@pytest.fixture
def stream(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    writer = ShardWriter(tmp_path, vocab_size=1 << 20, document_separator_id=0)
    writer.append([list(range(1, 1000))])
    writer.finish()
    return TokenStream(tmp_path)


def windows(stream, *, rank=0, world_size=1, accumulation=1, batch=8, length=16, seed=0):
    split = Split(batch, rank, world_size, accumulation)
    return RandomWindows(stream, sequence_length=length, split=split, seed=seed)


def steps(source, count, accumulation):
    return [torch.cat([next(source).ids for _ in range(accumulation)]) for _ in range(count)]


def rows(step):
    return sorted(step.tolist())


def test_windows_are_contiguous_and_predict_sequence_length_tokens(stream):
    batch = next(windows(stream))
    assert batch.ids.shape == (8, 17)
    assert batch.tokens == 8 * 16
    assert torch.equal(batch.ids.diff(dim=1), torch.ones(8, 16, dtype=torch.int64))
    assert len(set(batch.ids[:, 0].tolist())) > 1


def test_every_place_can_be_drawn(stream):
    source = windows(stream, length=998)
    assert {next(source).ids[0, 0].item() for _ in range(20)} == {1, 2}


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 4), (2, 1), (4, 2), (2, 3), (8, 1)])
def test_the_batch_of_a_step_does_not_depend_on_the_processes(stream, world_size, accumulation):
    alone = steps(windows(stream), 3, 1)
    shared = [
        steps(windows(stream, rank=rank, world_size=world_size, accumulation=accumulation), 3, accumulation)
        for rank in range(world_size)
    ]
    for step in range(3):
        assert rows(torch.cat([one[step] for one in shared])) == rows(alone[step])


def test_the_saved_state_continues_exactly_on_another_number_of_processes(stream):
    source = windows(stream, accumulation=2)
    steps(source, 5, 2)
    state = source.state_dict()
    expected = steps(source, 2, 2)
    again = windows(stream)
    again.load_state_dict(state)
    assert [rows(step) for step in steps(again, 2, 1)] == [rows(step) for step in expected]


def test_another_seed_draws_other_windows(stream):
    assert rows(next(windows(stream)).ids) != rows(next(windows(stream, seed=1)).ids)


def test_text_shorter_than_a_window_is_refused(stream):
    with pytest.raises(StageError, match=r"1000 tokens.*sequenceLength") as caught:
        windows(stream, length=1000)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_a_batch_that_cannot_be_shared_evenly_is_refused():
    with pytest.raises(StageError, match="globalBatchSize is 6, which 4 processes") as caught:
        Split.plan(global_batch_size=6, sequence_length=8, rank=0, world_size=4)
    assert caught.value.reason is FailureReason.INVALID_CONFIG


@pytest.mark.parametrize(
    ("batch", "length", "world_size", "accumulation"),
    [(64, 4096, 32, 1), (2048, 4096, 32, 32), (2, 4096, 1, 1), (2, 9000, 1, 2), (24, 1024, 1, 3), (20, 1024, 1, 3)],
)
def test_micro_batches_have_a_bounded_number_of_tokens(batch, length, world_size, accumulation):
    split = Split.plan(global_batch_size=batch, sequence_length=length, rank=0, world_size=world_size)
    assert split.accumulation == accumulation
    places = np.concatenate([np.arange(batch)[split.members(i)] for i in range(accumulation)])
    assert places.tolist() == list(range(0, batch, world_size))
