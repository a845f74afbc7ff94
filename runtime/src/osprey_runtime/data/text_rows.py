"""Rows of plain text: a file is one document, or each of its lines is a prompt."""

import codecs
import io
from collections.abc import Iterator
from enum import Enum
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.data import opened
from osprey_runtime.data.ledger import DropError
from osprey_runtime.errors import StageError

_LARGEST_DOCUMENT = opened.LARGEST_BYTES


class TextRows(Enum):
    """What is a row of a .txt file. Its field is called as the value."""

    DOCUMENT = "text"
    LINE = "prompt"


def text_rows(reader: io.BufferedReader, what: TextRows, file: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a text file by the number of their line. Blank lines are none.

    Raises:
        StageError: INVALID_DATA, a document is too long to be one.
    """
    if what is TextRows.LINE:
        for number, line in opened.lines(reader):
            if line is None:
                yield number, DropError(DropReason.TOO_LONG, opened.TOO_LONG)
            else:
                yield number, _row(line.rstrip(b"\r\n"), what)
        return
    content = reader.read(_LARGEST_DOCUMENT + 1)
    if len(content) > _LARGEST_DOCUMENT:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"{file} is one document of more than {_LARGEST_DOCUMENT >> 20} MiB, since a text file is one document: "
            'write a file for each, or JSON Lines, {"text": …} on each line',
        )
    if content:
        yield 1, _row(content.removeprefix(codecs.BOM_UTF8), what)


def _row(content: bytes, what: TextRows) -> Any:
    try:
        return {what.value: content.decode()}
    except UnicodeDecodeError as error:
        where = content.count(b"\n", 0, error.start)
        which = f"byte {error.start + 1}" + (f", {where} lines further down," if where else "")
        return DropError(DropReason.NOT_UTF8, f"{which} (0x{content[error.start]:02x}) is not UTF-8")
