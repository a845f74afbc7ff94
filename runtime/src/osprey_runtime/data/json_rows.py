"""Rows of JSON: a value on each line, or one list of all. Both stream; a broken line costs that line alone."""

import codecs
import io
import json
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any, NoReturn

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_runtime.data import opened
from osprey_runtime.data.ledger import DropError
from osprey_runtime.errors import StageError

Numbered = Iterator[tuple[int, Any]]
"""Number and value of each row; where it can't be read, the `DropError` that says why."""

_READ_BYTES = 1 << 20
_LARGEST_ITEM = opened.LARGEST_BYTES
"""Characters."""
_SPACE = " \t\r\n"


def is_list(reader: io.BufferedReader) -> bool:
    """Say whether a file holds one JSON list, and not a value on each line, of which the first may be a list too."""
    head = reader.peek()
    first, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not first.startswith(b"["):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return not rest.strip()


def lines(reader: io.BufferedReader) -> Numbered:
    """Yield the value of each line that is not blank, by its number from 1.

    A line that is a list of one value stands for that value.
    """
    for number, line in opened.lines(reader):
        yield number, DropError(DropReason.NOT_JSON, opened.TOO_LONG) if line is None else _value(line)


def _value(line: bytes) -> Any:
    try:
        value = json.loads(line.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return DropError(DropReason.NOT_UTF8, f"byte {error.start + 1} of the line (0x{byte:02x}) is not UTF-8")
    except (ValueError, RecursionError) as error:
        return DropError(DropReason.NOT_JSON, f"is no JSON ({error})")
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def items(reader: io.BufferedReader, file: str) -> Numbered:
    """Yield the items of one list, by their numbers from 1.

    Raises:
        StageError: INVALID_DATA, the list is broken: of what follows nothing can be said.
    """
    text = _Text(reader)
    text.expect("[", file, 0)
    number = 0
    while text.next_character() != "]":
        if number:
            text.expect(",", file, number)
        number += 1
        yield number, text.value(file, number)
    text.skip()
    if text.next_character():
        text.broken(file, number, "something follows the end of the list")


class _Text:
    """The characters of a reader, as many of them at a time as one value needs."""

    def __init__(self, reader: io.BufferedReader) -> None:
        self._reader = reader
        # What is no UTF-8 becomes lone surrogates, which only the item that holds them is dropped for.
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape").decode
        self._constants: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._constants.append)
        self._text, self._at, self._line, self._ended = "", 0, 1, False

    def next_character(self) -> str:
        """Return the next one that is no space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self.skip()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Go past one character."""
        self._line += self._text[self._at] == "\n"
        self._at += 1

    def expect(self, character: str, file: str, number: int) -> None:
        """Go past the next character, which must be this one."""
        if self.next_character() != character:
            self.broken(file, number, f"{character!r} is missing")
        self.skip()

    def value(self, file: str, number: int) -> Any:
        """Go past the next value and return it."""
        self.next_character()
        while True:
            self._constants.clear()
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (JSONDecodeError, RecursionError) as error:
                if len(self._text) - self._at > _LARGEST_ITEM or not self._more():
                    self.broken(file, number, f"is no JSON ({error})")
                continue
            if end == len(self._text) and self._more():
                continue  # a number may go on
            self._line += self._text.count("\n", self._at, end)
            self._at = end
            if self._constants:
                return DropError(DropReason.NOT_JSON, f"is no JSON ({self._constants[0]} is no number of JSON)")
            return value

    def broken(self, file: str, number: int, what: str) -> NoReturn:
        """Say that the list can't be read on."""
        raise StageError(
            FailureReason.INVALID_DATA,
            f"{file} line {self._line}: {what}, at or after item {number} of the list, and beyond that a list "
            "cannot be read: mend it, or write one object a line, where a broken line costs itself: jq -c '.[]' FILE",
        )

    def _more(self) -> bool:
        """Read on, twice as much each time: a value is tried again from its beginning."""
        if self._ended:
            return False
        pending = self._text[self._at :]
        data = self._reader.read(max(_READ_BYTES, len(pending)))
        self._ended = not data
        self._text, self._at = pending + self._decode(data, final=self._ended), 0
        return True
