"""A folder of this machine as a store: for work without S3, and for mounted claims."""

import errno
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_runtime.store import CHUNK_BYTES, Entry, Store, join, out_of_disk

_UNFINISHED = ".osprey-unfinished-"


class LocalStore(Store):
    """Keys are files. A file appears with all its content or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"file://{root}"

    def read(self, key: str) -> bytes:
        """Return the content of a small key."""
        with self._errors(), self._path(key).open("rb") as file:
            return file.read()

    def stream(self, key: str) -> Iterator[bytes]:
        """Yield the content of a key in pieces."""
        with self._errors(), self._path(key).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of a key's content."""
        with self._errors(), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def write(self, key: str, data: bytes, *, only_if_absent: bool = False) -> bool:
        """Write a small key and return whether it was written."""
        with self._errors():
            return self._place(key, iter([data]), only_if_absent=only_if_absent)

    def upload(self, path: Path, key: str) -> None:
        """Copy a file to a key."""
        with self._errors(), path.open("rb") as file:
            self._place(key, iter(lambda: file.read(CHUNK_BYTES), b""), only_if_absent=False)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield all keys below a folder."""
        with self._errors():
            for folder, folders, names in os.walk(self._path(prefix), onerror=_raise, followlinks=True):
                if "lost+found" in folders:
                    folders.remove("lost+found")  # of the file system, at the root of a claim, and closed to us
                for name in names:
                    path = Path(folder, name)
                    if not name.startswith(_UNFINISHED):
                        yield Entry(path.relative_to(self.root).as_posix(), path.stat().st_size)

    def exists(self, key: str) -> bool:
        """Say whether a key is there."""
        with self._errors():
            return self._path(key).is_file()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys. Their folders stay: another process may be about to write there."""
        with self._errors():
            for key in keys:
                self._path(key).unlink(missing_ok=True)

    def forget_uploads(self, prefix: str, *, older_than: timedelta) -> None:
        """Do nothing: a folder of one machine is its user's to tidy up."""

    def probe(self) -> None:
        """Check that the folder can be written."""
        key = ".osprey-probe"
        self.write(key, b"")
        self.delete([key])

    def _path(self, key: str) -> Path:
        if ".." in key.split("/"):
            raise ValueError(f"key {key!r} leaves its store")
        return self.root / join(key)

    def _place(self, key: str, chunks: Iterator[bytes], *, only_if_absent: bool) -> bool:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        try:
            with unfinished.open("xb") as file:  # not tempfile's: others may read it, as far as the umask lets them
                for chunk in chunks:
                    file.write(chunk)
            if not only_if_absent:
                unfinished.replace(path)
                return True
            try:
                path.hardlink_to(unfinished)  # unlike a rename, fails where the name is taken
            except FileExistsError:
                return False
            return True
        finally:
            unfinished.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise StageError(
                FailureReason.STORAGE_ACCESS_DENIED,
                f"no access to {error.filename}: make it readable and writable for user {os.getuid()}",
            ) from error
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise out_of_disk(self.root) from error
            if error.errno == errno.EIO:
                raise StageError(
                    FailureReason.STORAGE_UNAVAILABLE, f"the disk of {self.root} fails: {error.strerror}"
                ) from error
            raise


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # a folder that isn't there has no keys
        raise error
