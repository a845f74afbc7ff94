"""Rows are read as they are written, and a broken one is named."""

import hashlib
import json
from pathlib import Path

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import Pinned
from osprey_runtime.data import content_digest, pin, rows
from osprey_runtime.errors import StageError
from osprey_runtime.store import open_store


@pytest.fixture(params=["pvc", "s3"])
def source(request, tmp_path, monkeypatch):
    """Put content where a source of each kind finds it: `source("name.jsonl", b"...")` returns (URI, storage)."""
    location = request.getfixturevalue("s3_location" if request.param == "s3" else "local_location")
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path / "claims"))
    (tmp_path / "claims" / "data").mkdir(parents=True)

    def put(name: str, content: bytes):
        if request.param == "s3":
            open_store(location).write(name, content)
            return f"{location.uri}/{name}", location
        path = tmp_path / "claims" / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f"pvc://data/{name}", location

    return put


@pytest.fixture
def refused(source):
    """Return the error of reading a file with that content."""

    def read(content: bytes) -> StageError:
        uri, storage = source("x.jsonl", content)
        with pytest.raises(StageError) as caught:
            list(rows(Pinned(uri=uri), storage))
        assert uri in caught.value.message
        return caught.value

    return read


def test_rows_in_their_order(source):
    uri, storage = source("deep/x.jsonl", b'{"text": "one"}\n{"text": "two", "n": [1, null]}\n')
    found = list(rows(Pinned(uri=uri), storage))
    assert [(row.line, row.value) for row in found] == [(1, {"text": "one"}), (2, {"text": "two", "n": [1, None]})]
    assert [row.text("text") for row in found] == ["one", "two"]


def test_only_a_line_feed_ends_a_line(source):
    texts = ["a\u2028b", "c\u0085d", "e\x0bf\x0cg\x1ch", "\u00e4\U0001f600"]
    content = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)  # the last one unended
    uri, storage = source("x.jsonl", b"\xef\xbb\xbf" + content.encode())
    assert [row.text("text") for row in rows(Pinned(uri=uri), storage)] == texts


def test_long_line(source):
    text = "x" * (20 << 20)
    uri, storage = source("x.jsonl", json.dumps({"text": text}).encode() + b'\n{"text": "y"}')
    assert [len(row.text("text")) for row in rows(Pinned(uri=uri), storage)] == [len(text), 1]


def test_blank_lines_keep_the_count(source):
    uri, storage = source("x.jsonl", b'\n{"a": 1}\n  \r\n{"a": 2}\n\n')
    assert [row.line for row in rows(Pinned(uri=uri), storage)] == [2, 4]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "x"', "is no JSON"),
        (b'{"text": NaN}', "NaN is no number"),
        (b"text", "is no JSON"),
        (b'["text"]', "holds a list and not an object"),
        (b'"text"', "holds text and not an object"),
        (b'{"text": "\xc3\x28"}', "byte 11 of the line (0xc3) is not UTF-8"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"a": 1} {"a": 2}', "is no JSON"),
    ],
)
def test_broken_line_is_named(refused, line, words):
    error = refused(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}')
    assert error.reason is FailureReason.INVALID_DATA
    assert " line 3: " in error.message
    assert words in error.message


def test_whole_file_as_one_array(refused):
    assert "jq -c" in refused(b'[\n {"text": "x"},\n {"text": "y"}\n]').message
    assert "jq -c" in refused(b'[{"text": "x"}, {"text": "y"}]').message


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_no_row(refused, content):
    error = refused(content)
    assert error.reason is FailureReason.INVALID_DATA
    assert "no row" in error.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"prompt": "x"}, "there is no field 'text', the fields are: prompt"),
        ({"text": None}, "field 'text' holds null and no text"),
        ({"text": ["x"]}, "field 'text' holds a list and no text"),
        ({"text": True}, "field 'text' holds true or false and no text"),
        ({"text": 1.5}, "field 'text' holds a number and no text"),
        ({"text": "\ud800"}, "field 'text' holds half of a surrogate pair"),
    ],
)
def test_field_without_text(source, value, words):
    uri, storage = source("x.jsonl", b"{}\n" + json.dumps(value).encode())
    *_, row = rows(Pinned(uri=uri), storage)
    with pytest.raises(StageError, match=words) as caught:
        row.text("text")
    assert caught.value.reason is FailureReason.INVALID_DATA
    assert f"{uri} line 2:" in caught.value.message


# ------------------------------------------------------------------------------------------ pinned content


def test_file_is_pinned_by_its_bytes(source):
    uri, storage = source("x.jsonl", b'{"a": 1}\r\n')
    pinned = pin(uri, storage)
    assert pinned == Pinned(uri=uri, digest="sha256:" + hashlib.sha256(b'{"a": 1}\r\n').hexdigest())
    assert len(list(rows(pinned, storage))) == 1


def test_changed_file_is_refused(source):
    uri, storage = source("x.jsonl", b'{"a": 1}\n')
    pinned = pin(uri, storage)
    source("x.jsonl", b'{"a": 2}\n')
    with pytest.raises(StageError, match="changed since it was resolved") as caught:
        list(rows(pinned, storage))
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_folder_is_pinned_by_paths_and_bytes(source):
    for name, content in (("m/b", b"2"), ("m/a/c", b"1"), ("more", b"0")):
        uri, storage = source(name, content)
    folder = uri.removesuffix("/more") + "/m"
    lines = [[path, 1, hashlib.sha256(data).hexdigest()] for path, data in (("a/c", b"1"), ("b", b"2"))]
    expected = hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()
    assert content_digest(folder, storage) == content_digest(folder + "/", storage) == f"sha256:{expected}"


def test_nothing_there(source):
    uri, storage = source("x.jsonl", b"{}")
    for missing in (uri + "x", uri.replace("x.jsonl", "folder/"), uri + "/below-a-file"):
        for read in (lambda uri: pin(uri, storage), lambda uri: list(rows(Pinned(uri=uri), storage))):
            with pytest.raises(StageError) as caught:
                read(missing)
            assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND
            assert missing in caught.value.message


def test_folder_has_no_rows(source):
    uri, storage = source("folder/x.jsonl", b"{}")
    with pytest.raises(StageError, match=r"name one JSON Lines file, such as .*/folder/x\.jsonl"):
        list(rows(Pinned(uri=uri.removesuffix("/x.jsonl")), storage))


def test_root_of_a_claim_with_its_file_systems_own_folder(tmp_path, monkeypatch, local_location):
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    (tmp_path / "data" / "a").write_bytes(b"1")
    before = content_digest("pvc://data", local_location)
    (tmp_path / "data" / "lost+found" / "b").write_bytes(b"2")
    assert content_digest("pvc://data", local_location) == before


def test_claim_that_is_not_mounted(local_location):
    with pytest.raises(StageError, match="claim 'nowhere'") as caught:
        pin("pvc://nowhere/x.jsonl", local_location)
    assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND


def test_unreadable_claim_file(tmp_path, monkeypatch, local_location):
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    (tmp_path / "data").mkdir()
    # Root may read anything, so a link that leads nowhere stands for what can't be read.
    Path(tmp_path, "data", "x.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(StageError) as caught:
        pin("pvc://data/x.jsonl", local_location)
    assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND


def test_wrong_keys_for_a_source(s3_location, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StageError) as caught:
        pin(f"{s3_location.uri}/x.jsonl", s3_location)
    assert caught.value.reason is FailureReason.SOURCE_ACCESS_DENIED


@pytest.mark.parametrize("uri", ["http://x/y", "pvc://data/../../etc/passwd", "hf://name"])
def test_what_is_no_source(local_location, uri):
    with pytest.raises(StageError) as caught:
        list(rows(Pinned(uri=uri), local_location))
    assert caught.value.reason is FailureReason.INVALID_CONFIG
