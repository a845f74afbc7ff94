"""Files that are written whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text to a file, which is the old one or the new one, whenever this is interrupted."""
    put_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def put_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, and put it there when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    write(part)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
