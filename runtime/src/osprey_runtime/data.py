"""Rows of a data source: JSON Lines in S3 or on a claim, or a data set of the hub."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from pydantic import JsonValue

from osprey_api.conditions import FailureReason
from osprey_api.sources import HubSource
from osprey_api.stages import Pinned, StorageLocation
from osprey_runtime import hub, sources
from osprey_runtime.errors import StageError
from osprey_runtime.sources import content_digest, locate, parsed

__all__ = ["Row", "content_digest", "pin", "rows"]

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One JSON object of a source."""

    uri: str
    line: int
    """From 1, as an editor counts; for a hub data set the number of the row."""
    value: dict[str, JsonValue]

    def text(self, field: str) -> str:
        """Return a field that must hold text.

        Raises:
            StageError: INVALID_DATA, it is missing or is no text; source, line and field are named.
        """
        if field not in self.value:
            fields = ", ".join(sorted(self.value)) or "none"
            _broken(self.uri, self.line, f"there is no field {field!r}, the fields are: {fields}", "name one of them")
        value = self.value[field]
        if not isinstance(value, str):
            _broken(self.uri, self.line, f"field {field!r} holds {_kind(value)} and no text")
        try:
            value.encode()
        except UnicodeEncodeError:
            _broken(self.uri, self.line, f"field {field!r} holds half of a surrogate pair, which is no character")
        return value


def pin(uri: str, storage: StorageLocation, revision: str = "main") -> Pinned:
    """Return a data source as it is now: a hub data set at its commit, all else with the digest of its content.

    Raises:
        StageError: SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED or HUB_UNAVAILABLE.
    """
    source = parsed(uri)
    if not isinstance(source, HubSource):
        return Pinned(uri=uri, digest=content_digest(uri, storage))
    from huggingface_hub import HfApi  # noqa: PLC0415 - heavy, and not needed by other sources

    with hub.errors(uri):
        return Pinned(uri=uri, revision=HfApi().dataset_info(source.repository, revision=revision).sha)


def rows(source: Pinned, storage: StorageLocation) -> Iterator[Row]:
    """Yield the rows of a source in their order.

    A file is read as JSON Lines in UTF-8: one object a line, lines end in LF (CRLF is accepted; no other
    character ends a line), a byte order mark at the beginning and blank lines are skipped.

    Args:
        source: as `resolve` found it.
        storage: whose endpoint and region are used for s3://.

    Raises:
        StageError: INVALID_DATA, a broken line, no line at all, or (after the last row) content that is not
            what was resolved; SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED, HUB_UNAVAILABLE.
    """
    match parsed(source.uri):
        case HubSource(repository, options):
            yield from _hub_rows(source, repository, options)
        case _:
            yield from _file_rows(source, storage)


def _file_rows(source: Pinned, storage: StorageLocation) -> Iterator[Row]:
    uri = source.uri
    located = locate(uri, storage)
    if not located.is_file:
        found = located.files()  # says so where there is nothing at all
        raise StageError(
            FailureReason.INVALID_DATA,
            f"{uri} is a folder with {len(found)} files: name one JSON Lines file, such as "
            f"{uri.rstrip('/')}/{located.relative(found[0])}",
        )
    digest = hashlib.sha256()
    empty = True
    with sources.errors(uri):
        for number, line in enumerate(_lines(located.store.stream(located.key), digest), start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if content.strip():
                empty = False
                yield Row(uri, number, _object(uri, number, content))
    if empty:
        raise StageError(FailureReason.INVALID_DATA, f"{uri} has no row: put a JSON object on each line")
    if source.digest is not None and source.digest != f"sha256:{digest.hexdigest()}":
        raise sources.changed(uri)


def _lines(chunks: Iterator[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
    """Split at LF alone: U+2028, U+0085 and a lone CR are content."""
    begun: list[bytes] = []  # pieces of a line that spans chunks; joined once, since a line may be long
    for chunk in chunks:
        digest.update(chunk)
        first, *rest = chunk.split(b"\n")
        begun.append(first)
        for piece in rest:
            yield b"".join(begun)
            begun = [piece]
    yield b"".join(begun)


def _object(uri: str, number: int, line: bytes) -> dict[str, JsonValue]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        _broken(uri, number, f"byte {error.start + 1} of the line (0x{line[error.start]:02x}) is not UTF-8")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        whole = text.lstrip().startswith("[") and number == 1
        fix = "write one object a line: jq -c '.[]' FILE" if whole else "fix or remove the line"
        _broken(uri, number, f"is no JSON ({error})", fix)
    if not isinstance(value, dict):
        _broken(uri, number, f"holds {_kind(value)} and not an object", "write one object a line: jq -c '.[]' FILE")
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _kind(value: JsonValue) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _broken(uri: str, line: int, what: str, fix: str = "fix or remove the line") -> NoReturn:
    raise StageError(FailureReason.INVALID_DATA, f"{uri} line {line}: {what}; {fix}")


def _hub_rows(source: Pinned, repository: str, options: dict[str, str]) -> Iterator[Row]:
    import datasets  # noqa: PLC0415 - heavy, and not needed by other sources
    from huggingface_hub import HfApi  # noqa: PLC0415 - as datasets

    unknown = set(options) - {"name", "split"}
    if unknown:
        raise StageError(
            FailureReason.INVALID_CONFIG, f"{source.uri}: {min(unknown)!r} is no option, write ?name=…&split=…"
        )
    number = 0
    with hub.errors(source.uri):
        # Asked first, since load_dataset says of a gated data set that it isn't there.
        HfApi().dataset_info(repository, revision=source.revision)
        try:
            found = datasets.load_dataset(
                repository,
                options.get("name"),
                split=options.get("split", "train"),
                revision=source.revision,
                streaming=True,
            )
        except (FileNotFoundError, ValueError) as error:  # no file of data, or no such configuration or split
            raise StageError(FailureReason.SOURCE_NOT_FOUND, f"{source.uri}: {error}") from error
        for number, value in enumerate(found, start=1):
            yield Row(source.uri, number, value)
    if number == 0:
        raise StageError(FailureReason.INVALID_DATA, f"{source.uri} has no row: name another split")
