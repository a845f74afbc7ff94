"""Bytes as they come, decompressed where they are compressed, and looked at before they are read."""

import codecs
import gzip
import io
from collections.abc import Iterator
from typing import cast

WINDOW_BYTES = 32 << 20
"""So much of a file can be looked at before it is read: a very long first line is seen whole."""
LARGEST_BYTES = 256 << 20
"""Of a line, an item of a list, or a text that is one row. What is longer is taken to be broken: to read it takes up to
eleven times as much memory."""
TOO_LONG = f"is longer than {LARGEST_BYTES >> 20} MiB"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PIECE_BYTES = 1 << 20


class _Chunks(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        """Fill the buffer as far as there is content: `peek` of the reader above sees all of its window."""
        target = memoryview(cast(bytearray, buffer))
        done = 0
        while done < len(target):
            if not self._left:
                piece = next(self._chunks, None)
                if piece is None:
                    break
                self._left = memoryview(piece)
                continue
            part = self._left[: len(target) - done]
            target[done : done + len(part)] = part
            self._left = self._left[len(part) :]
            done += len(part)
        return done


def opened(chunks: Iterator[bytes]) -> io.BufferedReader:
    """Return a reader of what the chunks hold. Gzip and Zstandard are known by their first bytes."""
    reader: io.BufferedReader = io.BufferedReader(_Chunks(chunks), WINDOW_BYTES)
    head = reader.peek(4)[:4]
    if head.startswith(_GZIP):
        unzipped = gzip.GzipFile(fileobj=reader)
        return io.BufferedReader(_Chunks(iter(lambda: unzipped.read(_PIECE_BYTES), b"")), WINDOW_BYTES)
    if head == _ZSTD:
        import pyarrow as pa  # noqa: PLC0415 - heavy, and not needed for other files

        stream = pa.CompressedInputStream(pa.PythonFile(reader, mode="r"), "zstd")
        return io.BufferedReader(_Chunks(iter(lambda: stream.read(_PIECE_BYTES), b"")), WINDOW_BYTES)
    return reader


def lines(reader: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line that is not blank, by its number from 1; None for one of more than `LARGEST_BYTES`.

    Lines end in LF alone, so that U+2028, U+0085 and a lone CR are content; CRLF is accepted, and so is a byte order
    mark before the first.
    """
    number = 0
    while line := reader.readline(LARGEST_BYTES + len(b"\r\n")):
        number += 1
        if len(line.rstrip(b"\r\n")) > LARGEST_BYTES:
            while line and not line.endswith(b"\n"):
                line = reader.readline(_PIECE_BYTES)
            yield number, None
            continue
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield number, content
