"""Rows are read as they are written; a broken one is counted and named, and too many of them end the reading."""

import gzip
import hashlib
import io
import json
import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_api.stages import Pinned
from osprey_runtime.data import Ledger, TextRows, content_digest, documents, opened, pin, rows
from osprey_runtime.data import ledger as ledgers
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


def read(uri, storage, *, text=TextRows.DOCUMENT, digest=None, max_dropped=1.0):
    """Return the rows that are objects, and the ledger."""
    ledger = Ledger(uri, max_dropped)
    return list(rows(Pinned(uri=uri, digest=digest), storage, ledger, text=text)), ledger


@pytest.fixture
def values(source):
    """Return what the rows of a file hold: `values("x.jsonl", b"...")`."""

    def values(name: str, content: bytes, **options) -> list:
        found, ledger = read(*source(name, content), **options)
        assert ledger.read == len(found) + ledger.dropped.total()
        return [row.value for row in found]

    return values


@pytest.fixture
def refused(source):
    """Return the error of reading a file with that content."""

    def refuse(content: bytes, *, name: str = "x.jsonl", **options) -> StageError:
        uri, storage = source(name, content)
        with pytest.raises(StageError) as caught:
            read(uri, storage, **options)
        assert uri in caught.value.message
        assert caught.value.reason is FailureReason.INVALID_DATA
        return caught.value

    return refuse


# -------------------------------------------------------------------------------------------- JSON Lines


def test_rows_in_their_order(source):
    uri, storage = source("deep/x.jsonl", b'{"text": "one"}\n{"text": "two", "n": [1, null]}\n')
    found, ledger = read(uri, storage)
    assert [(row.line, row.value) for row in found] == [(1, {"text": "one"}), (2, {"text": "two", "n": [1, None]})]
    assert [row.text("text") for row in found] == ["one", "two"]
    assert (ledger.read, ledger.kept) == (2, 2)


def test_only_a_line_feed_ends_a_line(values):
    texts = ["a\u2028b", "c\u0085d", "e\x0bf\x0cg\x1ch", "\u00e4\U0001f600"]
    content = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)  # the last one unended
    assert [value["text"] for value in values("x.jsonl", b"\xef\xbb\xbf" + content.encode())] == texts


LONG = {
    "a text": lambda size: {"text": "x" * size},
    "a text with one wide character": lambda size: {"text": "\U0001f600" + "x" * size},
    "a text full of escapes": lambda size: {"text": '"\n' * (size // 4)},
    "many turns": lambda size: {"messages": [{"role": "user", "content": "hi there"}] * (size // 40)},
}
AROUND = {
    "a line": b'{"text": "a"}\n%b\n{"text": "b"}',
    "a line that is a list of one": b'{"text": "a"}\n[%b]\n{"text": "b"}',
    "an item": b'[{"text": "a"},\n%b,\n{"text": "b"}]',
}


@pytest.mark.parametrize("source", ["pvc"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "around"),
    [
        *((kind, "a line") for kind in LONG),
        ("a text with one wide character", "a line that is a list of one"),
        ("many turns", "an item"),
    ],
)
def test_a_row_of_20_mb_is_read_in_proportional_time_and_memory(source, kind, around):
    """Of 20 MB: within a second, and 4 times the row's size, or 11 times for many turns and wide characters."""

    def read_with(size):
        row = LONG[kind](size)
        content = AROUND[around] % json.dumps(row, ensure_ascii=False).encode()
        uri, storage = source(f"{size}.jsonl", content)
        seconds = []
        for _ in range(3):  # the least of them: what a busy machine adds is not the reader's
            began = time.process_time()
            found, _ledger = read(uri, storage)
            seconds.append(time.process_time() - began)
        assert [one.value for one in found] == [{"text": "a"}, row, {"text": "b"}]
        return min(seconds), uri, storage, len(content)

    quarter, *_ = read_with(5_000_000)
    whole, uri, storage, size = read_with(20_000_000)
    assert whole < 8 * quarter + 0.5  # fresh memory of a virtual machine may cost more than the reading
    tracemalloc.start()
    read(uri, storage)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15 * size


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_above_the_limit_costs_itself(source, monkeypatch, packed):
    monkeypatch.setattr(opened, "LARGEST_BYTES", 1000)
    exact = json.dumps({"text": "x" * 988}).encode() + b"\r\n"
    assert len(exact) == 1002  # what ends a line is not of it
    content = exact + json.dumps({"text": "x" * 3_000_000}).encode() + b'\n{"text": "b"}\n' + b"y" * 2000
    uri, storage = source("x.jsonl", gzip.compress(content) if packed else content)
    found, ledger = read(uri, storage)
    assert [row.line for row in found] == [1, 3]
    assert ledger.examples == {
        DropReason.NOT_JSON: [f"{uri} line 2: is longer than 256 MiB", f"{uri} line 4: is longer than 256 MiB"]
    }


def test_so_does_a_prompt_of_a_text_file(source, monkeypatch):
    monkeypatch.setattr(opened, "LARGEST_BYTES", 1000)
    found, ledger = read(*source("x.txt", b"one\n" + b"y" * 2000 + b"\nthree"), text=TextRows.LINE)
    assert [(row.line, row.value["prompt"]) for row in found] == [(1, "one"), (3, "three")]
    assert ledger.dropped == {DropReason.TOO_LONG: 1}


def test_blank_lines_keep_the_count(source):
    found, ledger = read(*source("x.jsonl", b'\n{"a": 1}\n  \r\n{"a": 2}\n\n'))
    assert [row.line for row in found] == [2, 4]
    assert ledger.read == 2


BROKEN = [
    (b'{"text": "x"', DropReason.NOT_JSON, "is no JSON"),
    (b'{"text": NaN}', DropReason.NOT_JSON, "NaN is no number"),
    (b"text", DropReason.NOT_JSON, "is no JSON"),
    (b'["text"]', DropReason.NOT_AN_OBJECT, "holds text and not an object"),
    (b'[{"text": "x"}, {"text": "y"}]', DropReason.NOT_AN_OBJECT, "holds a list and not an object"),
    (b"null", DropReason.NOT_AN_OBJECT, "holds null and not an object"),
    (b'{"text": "\xc3\x28"}', DropReason.NOT_UTF8, "byte 11 of the line (0xc3) is not UTF-8"),
    (b"[" * 100_000, DropReason.NOT_JSON, "is no JSON"),
    (b'{"a": 1} {"a": 2}', DropReason.NOT_JSON, "is no JSON"),
]


@pytest.mark.parametrize(("line", "reason", "words"), BROKEN)
def test_a_broken_line_costs_itself_and_is_named(source, line, reason, words):
    uri, storage = source("x.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "also"}')
    found, ledger = read(uri, storage)
    assert [row.value["text"] for row in found] == ["fine", "also"]
    assert ledger.dropped == {reason: 1}
    assert (ledger.read, ledger.kept) == (3, 2)
    (example,) = ledger.examples[reason]
    assert example.startswith(f"{uri} line 3: ")
    assert words in example


def test_all_kinds_of_broken_lines_add_up(source, tmp_path):
    good = [json.dumps({"text": f"good {n}"}).encode() for n in range(100)]
    lines = [line for n, one in enumerate(good) for line in (one, BROKEN[n % len(BROKEN)][0])]
    found, ledger = read(*source("x.jsonl", b"\n".join(lines)))
    assert [row.value["text"] for row in found] == [f"good {n}" for n in range(100)]
    expected = [BROKEN[n % len(BROKEN)][1] for n in range(100)]
    assert ledger.dropped == {reason: expected.count(reason) for reason in expected}
    ledgers.write(tmp_path, sources=[ledger])
    (written,) = json.loads((tmp_path / "rows.json").read_text())["sources"]
    assert written["read"] == written["kept"] + sum(written["dropped"].values()) == 200
    assert {reason: len(found) for reason, found in written["examples"].items()} == dict.fromkeys(written["dropped"], 5)


@pytest.mark.parametrize(("broken", "allowed"), [(5, True), (6, False)])
def test_one_in_twenty_may_be_broken(source, broken, allowed):
    uri, storage = source("x.jsonl", b"\n".join([b'{"text": "x"}'] * (100 - broken) + [b"{"] * broken))
    ledger = Ledger(uri)
    found = rows(Pinned(uri=uri), storage, ledger, text=TextRows.DOCUMENT)
    if allowed:
        assert len(list(found)) == 95
        return
    with pytest.raises(StageError) as caught:
        list(found)
    assert "6 of 100 rows cannot be used (NotJson 6)" in caught.value.message
    assert "maxDropped" in caught.value.message
    assert f"{uri} line 95: " in caught.value.message
    assert f"{uri} line 97: " in caught.value.message


def test_a_large_loss_ends_the_reading_before_the_end(source, monkeypatch):
    monkeypatch.setattr(ledgers, "_CHECKED_EARLY", 100)
    uri, storage = source("x.jsonl", b'{"a": 1}\n' * 90 + b"{\n" * 900)
    ledger = Ledger(uri)
    with pytest.raises(StageError, match="NotJson 10"):
        list(rows(Pinned(uri=uri), storage, ledger, text=TextRows.DOCUMENT))
    assert ledger.read == 100


@pytest.mark.parametrize(("limit", "fails"), [(2, False), (3, False), (4, True), (None, True)])
def test_of_a_small_part_the_share_says_nothing(source, limit, fails):
    uri, storage = source("x.jsonl", b'{"text": "a"}\n{\n{"text": "b"}\n{"text": "c"}\n')
    ledger = Ledger(uri)
    found = documents(Pinned(uri=uri), "text", storage, ledger, limit=limit)
    if fails:  # all of it was read
        with pytest.raises(StageError, match="1 of 4 rows cannot be used"):
            list(found)
    else:
        assert list(found) == ["a", "b", "c"][:limit]
    assert ledger.dropped == {DropReason.NOT_JSON: 1}


def test_of_a_small_part_something_is_kept(source):
    uri, storage = source("x.jsonl", b'{"txt": "a"}\n' * 9)
    with pytest.raises(StageError, match="none of 2 rows can be used"):
        list(documents(Pinned(uri=uri), "text", storage, Ledger(uri), limit=2))


def test_a_file_of_another_encoding(refused):
    message = refused('{"text": "x"}\n{"text": "y"}'.encode("utf-16")).message
    assert "none of 2 rows" in message
    assert "is not UTF-8" in message


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"[]"])
def test_no_row(refused, content):
    assert "no row" in refused(content).message


# ---------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        ({"prompt": "x"}, DropReason.NO_FIELD, "there is no field 'text', the fields are: prompt"),
        ({"text": None}, DropReason.WRONG_TYPE, "field 'text' holds null and no text"),
        ({"text": ["x"]}, DropReason.WRONG_TYPE, "field 'text' holds a list and no text"),
        ({"text": True}, DropReason.WRONG_TYPE, "field 'text' holds true or false and no text"),
        ({"text": 1.5}, DropReason.WRONG_TYPE, "field 'text' holds a number and no text"),
        ({"text": "\ud800"}, DropReason.BAD_CHARACTER, "field 'text' holds half of a surrogate pair"),
        ({"text": " \n"}, DropReason.BLANK_TEXT, "is blank"),
    ],
)
def test_a_row_without_text_is_dropped(source, value, reason, words):
    uri, storage = source("x.jsonl", b'{"text": "a"}\n' + json.dumps(value).encode() + b'\n{"text": "b"}')
    ledger = Ledger(uri, 1.0)
    assert list(documents(Pinned(uri=uri), "text", storage, ledger)) == ["a", "b"]
    assert ledger.dropped == {reason: 1}
    assert ledger.examples[reason][0].startswith(f"{uri} line 2: ")
    assert words in ledger.examples[reason][0]


def test_blank_texts_are_counted_and_no_loss(source):
    uri, storage = source("x.jsonl", b'{"text": "a"}\n' + b'{"text": ""}\n' * 9)
    ledger = Ledger(uri)
    assert list(documents(Pinned(uri=uri), "text", storage, ledger)) == ["a"]
    assert (ledger.read, ledger.kept, ledger.dropped) == (10, 1, {DropReason.BLANK_TEXT: 9})


def test_a_field_that_no_row_has(source):
    uri, storage = source("x.jsonl", b'{"prompt": "a"}\n' * 3)
    with pytest.raises(StageError, match=r"none of 3 rows can be used \(NoField 3\).*the fields are: prompt"):
        list(documents(Pinned(uri=uri), "text", storage, Ledger(uri, 1.0)))


# --------------------------------------------------------------------------------------------- JSON lists


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_whole_file_as_one_list(values, name, indent):
    wanted = [{"text": "one", "n": [1, {"a": "]"}]}, {"text": "ä\u2028"}, {"text": "x" * 3_000_000}, {"text": "end"}]
    content = json.dumps(wanted, indent=indent, ensure_ascii=False).encode()
    assert values(name, b"\xef\xbb\xbf \n" + content + b"\r\n") == wanted


def test_odd_items_of_a_list_are_dropped_one_by_one(source):
    content = b'[{"text": "a"},\n [1, 2], 3, {"text": NaN},\n {"text": "\xc3\x28"}, {"text": "b"}]'
    uri, storage = source("x.json", content)
    ledger = Ledger(uri, 1.0)
    assert list(documents(Pinned(uri=uri), "text", storage, ledger)) == ["a", "b"]
    assert ledger.dropped == {DropReason.NOT_AN_OBJECT: 2, DropReason.NOT_JSON: 1, DropReason.BAD_CHARACTER: 1}
    assert ledger.examples[DropReason.NOT_JSON][0].startswith(f"{uri} item 4: ")


@pytest.mark.parametrize(
    ("content", "line", "item"),
    [
        (b'[\n{"a": 1},\n{"a": 2}\n{"a": 3}\n]', 4, 2),
        (b'[\n{"a": 1},\n{"a": \n', 3, 2),
        (b'[\n{"a": 1}\n', 3, 1),
        (b'[\n{"a": 1}\n] {"a": 2}', 3, 1),
    ],
)
def test_a_broken_list_is_refused_where_it_breaks(refused, content, line, item):
    message = refused(content).message
    assert f" line {line}: " in message
    assert f"item {item} " in message
    assert "jq -c '.[]'" in message


def test_lines_that_are_lists_of_one(values):
    rows_wanted = [{"text": f"{n}", "n": [n]} for n in range(5)]
    content = "\n".join(json.dumps([value]) for value in rows_wanted)
    assert values("x.jsonl", content.encode()) == rows_wanted
    assert values("x.jsonl", json.dumps(rows_wanted[:1]).encode()) == rows_wanted[:1]


def test_a_field_that_changes_its_type_between_rows(values):
    wanted = [{"content": "text"}, {"content": [{"type": "text", "text": "part"}]}, {"content": None}]
    assert values("x.jsonl", "\n".join(map(json.dumps, wanted)).encode()) == wanted


# ------------------------------------------------------------------------- Parquet, plain text, compression


def parquet(values: list[dict], **options) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values), file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["x.parquet", "misnamed.jsonl"])
def test_parquet(source, name):
    wanted = [{"text": f"ä {n}", "messages": [{"role": "user", "content": f"{n}"}]} for n in range(1300)]
    content = parquet(wanted, row_group_size=100)
    uri, storage = source(name, content)
    found, ledger = read(uri, storage, digest=pin(uri, storage).digest)
    assert [row.value for row in found] == wanted
    assert found[-1].place == f"{uri} row 1300"
    assert ledger.read == 1300


def test_a_damaged_table(refused):
    assert "damaged Parquet" in refused(parquet([{"text": "x"}])[:-20], name="x.parquet").message


def test_odd_rows_of_a_table_are_dropped_one_by_one(source):
    """Neither a text nor a time is looked at when a table is written, and Python can't have all that it may hold."""
    texts = [b"%d" % n for n in range(1300)]
    texts[600] = b"a\xff"
    times = list(range(1300))
    times[1200] = 2**62
    table = pa.table(
        {
            "text": pa.StringArray.from_buffers(1300, *pa.array(texts, pa.binary()).buffers()[1:]),
            "at": pa.array(times, pa.timestamp("us")),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file)
    uri, storage = source("x.parquet", file.getvalue())
    found, ledger = read(uri, storage)
    assert [row.value["text"] for row in found] == [f"{n}" for n in range(1300) if n not in {600, 1200}]
    assert [row.line for row in found] == [n + 1 for n in range(1300) if n not in {600, 1200}]
    assert ledger.examples == {
        DropReason.NOT_UTF8: [f"{uri} row 601: field 'text': byte 2 (0xff) is not UTF-8"],
        DropReason.WRONG_TYPE: [f"{uri} row 1201: field 'at' can't be read (date value out of range)"],
    }


def test_plain_text_is_a_document_or_prompts(values):
    content = "\ufefffirst line\r\n\nsecond\u2028line".encode()
    (document,) = values("x.txt", content)
    assert document == {"text": "first line\r\n\nsecond\u2028line"}
    prompts = values("x.txt", content, text=TextRows.LINE)
    assert prompts == [{"prompt": "first line"}, {"prompt": "second\u2028line"}]


def test_a_line_of_text_that_is_no_utf8(source):
    found, ledger = read(*source("x.txt", b"one\n\xc3\x28\nthree"), text=TextRows.LINE)
    assert [row.line for row in found] == [1, 3]
    assert ledger.dropped == {DropReason.NOT_UTF8: 1}


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files(source, ending):
    content = b"".join(b'{"text": "%d"}\n' % n for n in range(1000))
    packed = gzip.compress(content) if ending == ".gz" else pa.Codec("zstd").compress(content, asbytes=True)
    for name in (f"x.jsonl{ending}", f"x.txt{ending}", "x"):
        uri, storage = source(name, packed)
        found, _ = read(uri, storage, digest="sha256:" + hashlib.sha256(packed).hexdigest())
        assert found[0].value == ({"text": content.decode()} if ".txt" in name else {"text": "0"})
        assert len(found) == (1 if ".txt" in name else 1000)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_cut_compressed_file(refused, ending):
    content = b"".join(b'{"text": "%d"}\n' % n for n in range(1000))
    packed = gzip.compress(content) if ending == ".gz" else pa.Codec("zstd").compress(content, asbytes=True)
    assert "damaged compressed" in refused(packed[:-100], name=f"x.jsonl{ending}").message


# ------------------------------------------------------------------------------------------------ folders


@pytest.fixture
def folder(source):
    """Put files into a folder and return its URI and the storage."""

    def put(files: dict[str, bytes]):
        for name, content in files.items():
            uri, storage = source(f"folder/{name}", content)
            base = uri.removesuffix(f"/{name}")
        return base, storage

    return put


def test_a_folder_is_read_in_the_order_of_its_paths(folder):
    uri, storage = folder(
        {
            "b.jsonl": b'{"n": 3}\n{"n"',
            "a/2.jsonl.gz": gzip.compress(b'{"n": 2}'),
            "a/1.jsonl": b'{"n": 1}',
            "README.md": b"# not data",
            "_SUCCESS": b"",
        }
    )
    found, ledger = read(uri, storage, digest=pin(uri, storage).digest)
    assert [row.value["n"] for row in found] == [1, 2, 3]
    assert found[0].place == f"{uri}/a/1.jsonl line 1"
    assert ledger.examples[DropReason.NOT_JSON][0].startswith(f"{uri}/b.jsonl line 2: ")


def test_a_folder_of_documents(folder):
    uri, storage = folder({"1.txt": b"one", "2.txt": b"two\n\nmore"})
    assert list(documents(Pinned(uri=uri), "text", storage, Ledger(uri))) == ["one", "two\n\nmore"]


def test_a_folder_of_several_formats(folder):
    uri, storage = folder({"a.jsonl": b"{}", "b.parquet": parquet([{"a": 1}]), "c.jsonl": b"{}"})
    with pytest.raises(StageError, match=r"several formats, such as a\.jsonl and b\.parquet: name one file") as caught:
        read(uri, storage)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_a_folder_that_changed(folder):
    uri, storage = folder({"a.jsonl": b'{"a": 1}', "b.jsonl": b'{"a": 2}', "notes": b"x"})
    pinned = pin(uri, storage)
    assert len(read(uri, storage, digest=pinned.digest)[0]) == 2
    folder({"notes": b"y"})
    with pytest.raises(StageError, match="changed since it was resolved"):
        read(uri, storage, digest=pinned.digest)


# ------------------------------------------------------------------------------------------ pinned content


def test_file_is_pinned_by_its_bytes(source):
    uri, storage = source("x.jsonl", b'{"a": 1}\r\n')
    pinned = pin(uri, storage)
    assert pinned == Pinned(uri=uri, digest="sha256:" + hashlib.sha256(b'{"a": 1}\r\n').hexdigest())
    assert len(read(uri, storage, digest=pinned.digest)[0]) == 1


def test_changed_file_is_refused(source):
    uri, storage = source("x.jsonl", b'{"a": 1}\n')
    pinned = pin(uri, storage)
    source("x.jsonl", b'{"a": 2}\n')
    with pytest.raises(StageError, match="changed since it was resolved") as caught:
        read(uri, storage, digest=pinned.digest)
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
        for look in (pin, read):
            with pytest.raises(StageError) as caught:
                look(missing, storage)
            assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND
            assert missing in caught.value.message


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
        read(uri, local_location)
    assert caught.value.reason is FailureReason.INVALID_CONFIG
