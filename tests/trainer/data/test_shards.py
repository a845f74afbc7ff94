import json

import numpy as np
import pytest

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.data import shards
from osprey_trainer.data.shards import End, ShardIndex, ShardWriter, TokenStream

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12, 13, 14, 15]]
STREAM = [5, 6, 7, 1, 1, 8, 1, 9, 10, 11, 12, 13, 14, 15, 1]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 4)


def write(folder, *, vocab_size=16):
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=vocab_size, document_separator_id=1)
    writer.append(DOCUMENTS[:1])
    writer.append(DOCUMENTS[1:])
    return writer.finish()


def test_documents_are_one_stream_over_shards_of_fixed_size(tmp_path):
    index = write(tmp_path / "a")
    assert [shard.tokens for shard in index.shards] == [4, 4, 4, 3]
    assert (index.tokens, index.rows) == (15, 4)
    stream = TokenStream(tmp_path / "a")
    assert len(stream) == 15
    for start in range(15):
        for count in range(16 - start):
            assert stream.read(start, count).tolist() == STREAM[start : start + count]


def test_ids_are_counted_over_all_shards(tmp_path):
    write(tmp_path / "a")
    assert TokenStream(tmp_path / "a").counts(20).tolist() == np.bincount(STREAM, minlength=20).tolist()


def test_files_are_as_documented(tmp_path):
    write(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert index == {
        "dtype": "uint16",
        "vocab_size": 16,
        "shards": [{"file": f"shard-0000{i}.bin", "tokens": n} for i, n in enumerate([4, 4, 4, 3])],
        "tokens": 15,
        "rows": 4,
        "document_separator_id": 1,
    }
    assert np.fromfile(tmp_path / "a" / "shard-00001.bin", "<u2").tolist() == STREAM[4:8]


def test_the_ends_of_full_shards_are_those_of_the_text(tmp_path):
    write(tmp_path / "a")
    # 5 6 7 1 | 1 8 1 9 | 10 11 12 13 | 14 15 1
    ends = [json.loads((tmp_path / "a" / f"shard-0000{i}.end.json").read_text()) for i in range(3)]
    assert [End(**end) for end in ends] == [End(1, 0), End(3, 1), End(3, 5)]
    assert not (tmp_path / "a" / "shard-00003.end.json").exists()


@pytest.mark.parametrize("finished", [0, 1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_writer_goes_on_where_full_shards_end(tmp_path, finished, at_once):
    write(tmp_path / "whole")
    ends = [End(), *(End(**json.loads(p.read_text())) for p in sorted((tmp_path / "whole").glob("*.end.json")))]
    begin = ends[finished]
    rest = tmp_path / "rest"
    rest.mkdir()
    taken = []
    writer = ShardWriter(
        rest,
        vocab_size=16,
        document_separator_id=1,
        shards=finished,
        begin=begin,
        full=lambda shard, end: taken.append((shard.name, End(**json.loads(end.read_text())))),
    )
    left = DOCUMENTS[begin.documents :]
    for start in range(0, len(left), at_once):
        writer.append(left[start : start + at_once])
    writer.finish()
    assert taken == [(f"shard-0000{i}.bin", ends[i + 1]) for i in range(finished, 3)]
    assert (rest / "index.json").read_bytes() == (tmp_path / "whole" / "index.json").read_bytes()
    for number in range(finished, 4):
        name = f"shard-0000{number}.bin"
        assert (rest / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("vocab_size", "dtype", "width"), [(65536, "uint16", 2), (65537, "uint32", 4)])
def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path, vocab_size, dtype, width):
    index = write(tmp_path / "a", vocab_size=vocab_size)
    assert index.dtype == dtype
    assert (tmp_path / "a" / "shard-00000.bin").stat().st_size == 4 * width
    assert TokenStream(tmp_path / "a").read(0, 15).tolist() == STREAM


def test_a_cut_shard_is_refused(tmp_path):
    write(tmp_path / "a")
    shard = tmp_path / "a" / "shard-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StageError, match=r"shard-00002\.bin") as caught:
        ShardIndex.read(tmp_path / "a")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT


@pytest.mark.parametrize("content", [None, "{", "{}", '{"shards": [{"name": 1}]}'])
def test_an_unusable_index_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(StageError, match=r"index\.json"):
        ShardIndex.read(tmp_path)


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=100, document_separator_id=0)
    with pytest.raises(OverflowError, match="token 70000 is not of a vocabulary of 100"):
        writer.append([[1, 70_000]])
