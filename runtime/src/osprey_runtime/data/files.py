"""Rows of files in S3 or on a claim: which format a file has, and whether it is what was resolved.

The format follows from the file. `.parquet`, or a file that begins as one does, is Parquet; `.txt` is plain text; all
else is JSON: one list if the file is one, and otherwise a value on each line. `.gz` and `.zst` may be added. Of a
folder the files are read in the order of their paths; they must be of one format, as their endings say. Files without
an ending of a data file (a README, `_SUCCESS`) are passed over, unless there is no other.
"""

import gzip
import hashlib
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_api.stages import Pinned, StorageLocation
from osprey_runtime import sources
from osprey_runtime.data import json_rows, parquet_rows
from osprey_runtime.data.ledger import DropError, Ledger
from osprey_runtime.data.opened import opened
from osprey_runtime.data.row import Row, Unit, kind, place
from osprey_runtime.data.text_rows import TextRows, text_rows
from osprey_runtime.errors import StageError
from osprey_runtime.sources import locate
from osprey_runtime.store import Content, Store, digest_of, sha256_of
from osprey_runtime.store.local import LocalStore

_DATA_ENDINGS = {".jsonl", ".ndjson", ".json", ".parquet", ".txt"}
_COMPRESSED = {".gz", ".zst"}


def file_rows(source: Pinned, storage: StorageLocation, ledger: Ledger, text: TextRows) -> Iterator[Row]:
    """Yield the rows of a file, or of all files of a folder.

    Raises:
        StageError: INVALID_DATA: a file can't be read at all, a folder mixes formats, or (after the last row) the
            content is not what was resolved; SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED.
    """
    uri = source.uri
    located = locate(uri, storage)
    with sources.errors(uri):
        if located.is_file:
            content = yield from stored_rows(located.store, located.key, uri, ledger, text)
            digest = f"sha256:{content.sha256}"
        else:
            entries = {located.relative(entry): entry for entry in located.files()}
            contents: dict[str, Content] = {}
            for path in _data_files(uri, entries):
                file = f"{uri.rstrip('/')}/{path}"
                contents[path] = yield from stored_rows(located.store, entries[path].key, file, ledger, text)
            for path in entries.keys() - contents.keys():
                contents[path] = Content(entries[path].size, sha256_of(located.store, entries[path].key))
            digest = digest_of(contents)
    if source.digest not in {None, digest}:
        raise sources.changed(uri)


def stored_rows(store: Store, key: str, file: str, ledger: Ledger, text: TextRows) -> Generator[Row, None, Content]:
    """Yield the rows of one file that are objects, and count all of them; return what the file was.

    Args:
        store: holds it.
        key: of it.
        file: its URI.
        ledger: of the source.
        text: what is a row, if it is plain text.
    """
    ending = _ending(key)
    if ending == ".parquet":
        return (yield from _table_rows(store, key, file, ledger))
    digest = hashlib.sha256()
    size = 0

    def chunks() -> Iterator[bytes]:
        nonlocal size
        for chunk in store.stream(key):
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    arriving = chunks()
    with _errors(file, ledger):
        reader = opened(arriving)
        if reader.peek(4).startswith(parquet_rows.MAGIC):
            return (yield from _table_rows(store, key, file, ledger))
        if ending == ".txt":
            yield from _rows(text_rows(reader, text, file), file, "line", ledger)
        elif json_rows.is_list(reader):
            yield from _rows(json_rows.items(reader, file), file, "item", ledger)
        else:
            yield from _rows(json_rows.lines(reader), file, "line", ledger)
        for _ in arriving:  # what a format did not need is part of the content all the same
            pass
    return Content(size, digest.hexdigest())


def _table_rows(store: Store, key: str, file: str, ledger: Ledger) -> Generator[Row, None, Content]:
    """Yield the rows of a table, whose end is read before its beginning: from S3 it is fetched first."""
    with tempfile.TemporaryDirectory(prefix="osprey-") as folder:
        if isinstance(store, LocalStore):
            path = store.root / key
            content = Content(path.stat().st_size, sha256_of(store, key))
        else:
            path = Path(folder, "table.parquet")
            content = store.download(key, path)
        yield from _rows(parquet_rows.table_rows(path, file), file, "row", ledger)
    return content


def _rows(values: Iterable[tuple[int, object]], file: str, unit: Unit, ledger: Ledger) -> Iterator[Row]:
    for number, value in values:
        ledger.read += 1
        if isinstance(value, dict):
            yield Row(file, number, value, unit)
        elif isinstance(value, DropError):
            ledger.drop(value.reason, place(file, number, unit), value.detail)
        else:
            ledger.drop(DropReason.NOT_AN_OBJECT, place(file, number, unit), f"holds {kind(value)} and not an object")


def _ending(path: str) -> str:
    pure = PurePosixPath(path)
    return PurePosixPath(pure.stem).suffix.lower() if pure.suffix.lower() in _COMPRESSED else pure.suffix.lower()


def _data_files(uri: str, paths: Iterable[str]) -> list[str]:
    """Return the files of a folder that hold its rows, in their order."""
    shown = [path for path in sorted(paths) if not PurePosixPath(path).name.startswith((".", "_"))]
    data = [path for path in shown if _ending(path) in _DATA_ENDINGS] or shown
    first = {_ending(path): path for path in reversed(data)}
    if len(first) > 1:
        one, other, *_ = sorted(first.values())
        raise StageError(
            FailureReason.INVALID_DATA,
            f"the folder {uri} holds files of several formats, such as {one} and {other}: name one file, or a folder "
            "with files of one format",
        )
    return data


@contextmanager
def _errors(file: str, ledger: Ledger) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not _is_damage(error):
            raise
        raise StageError(
            FailureReason.INVALID_DATA, f"{file} is a damaged compressed file, after {ledger.read} rows: {error}"
        ) from error


def _is_damage(error: OSError) -> bool:
    """Say whether it is of the content: of Zstandard pyarrow says so without a number, which those of a disk have."""
    return isinstance(error, gzip.BadGzipFile) or (type(error) is OSError and error.errno is None)
