"""Where artifacts, checkpoints and data lie: an S3 bucket, or a folder of this machine.

Keys are '/'-separated and relative to the store's URI.
"""

import errno
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from osprey_api.conditions import FailureReason
from osprey_api.fingerprint import sha256
from osprey_api.stages import StorageLocation
from osprey_runtime.errors import StageError

CHUNK_BYTES = 1 << 20
"""Files are read and written in pieces of this size."""
DOWNLOAD_STREAMS = 4
"""Files of one artifact, or model, that are downloaded at a time."""


@dataclass(frozen=True)
class Entry:
    """One key of a store, with its size in bytes."""

    key: str
    size: int


@dataclass(frozen=True)
class Content:
    """Size in bytes and hex SHA-256 of a file."""

    size: int
    sha256: str


class Store(Protocol):
    """A flat space of keys.

    Every method raises `StageError` with a `STORAGE_…` reason, or OUT_OF_DISK, when the store can't be used,
    and `FileNotFoundError` when it asks for the content of a key that is not there.
    """

    uri: str
    """Without a slash at its end."""

    def read(self, key: str) -> bytes:
        """Return the content of a small key."""
        ...

    def stream(self, key: str) -> Iterator[bytes]:
        """Yield the content of a key in pieces; a broken connection is resumed where it broke."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a key from byte `start` on; fewer where it ends before."""
        ...

    def write(self, key: str, data: bytes, *, only_if_absent: bool = False) -> bool:
        """Write a small key and return whether it was written.

        It isn't where `only_if_absent` and the key is there already: of several writers just one wins.
        """
        ...

    def upload(self, path: Path, key: str) -> None:
        """Write a file to a key."""
        ...

    def download(self, key: str, path: Path) -> Content:
        """Write a key's content to a file, whose folder is made, and return what it was."""
        digest, size = hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for chunk in self.stream(key):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise out_of_disk(path) from error
            raise
        return Content(size, digest.hexdigest())

    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield all keys below a folder ("" for all), in no order."""
        ...

    def exists(self, key: str) -> bool:
        """Say whether a key is there."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; those that aren't there are deleted already."""
        ...

    def forget_uploads(self, prefix: str, *, older_than: timedelta) -> None:
        """Delete what uploads below a folder left whose process was killed: it is no key, but is paid for."""
        ...

    def probe(self) -> None:
        """Check that the store can be used as artifacts need it.

        Raises:
            StageError: it is missing, forbids something, or ignores If-None-Match (STORAGE_UNSUPPORTED), without
                which two attempts could overwrite each other's manifest.
        """
        ...


def open_store(location: StorageLocation) -> Store:
    """Return the store at a location. Nothing is asked of it yet.

    Raises:
        StageError: INVALID_CONFIG, the URI is of no kind that can store.
    """
    # Imported here, since boto3 takes half a second and a local folder does without.
    if location.uri.startswith("s3://"):
        from osprey_runtime.store.s3 import S3Store  # noqa: PLC0415

        return S3Store(location)
    if location.uri.startswith("file:///"):
        from osprey_runtime.store.local import LocalStore  # noqa: PLC0415

        return LocalStore(Path(location.uri.removeprefix("file://")))
    raise StageError(
        FailureReason.INVALID_CONFIG,
        f"{location.uri!r} is no storage: write s3://BUCKET/PREFIX, or file:///FOLDER on one machine",
    )


def join(*parts: str) -> str:
    """Return a key made of parts, empty ones left out."""
    return "/".join(part.strip("/") for part in parts if part.strip("/"))


def content_of(path: Path) -> Content:
    """Return size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Content(size, digest.hexdigest())


def sha256_of(store: Store, key: str) -> str:
    """Return the hex SHA-256 of a key's content, by reading all of it."""
    digest = hashlib.sha256()
    for chunk in store.stream(key):
        digest.update(chunk)
    return digest.hexdigest()


def digest_of(contents: Mapping[str, Content]) -> str:
    """Return the digest of a folder: SHA-256 of the canonical JSON of the sorted [path, size, SHA-256]."""
    return "sha256:" + sha256([[path, content.size, content.sha256] for path, content in sorted(contents.items())])


def out_of_disk(path: Path) -> StageError:
    """Return the error for a full disk at a path."""
    return StageError(
        FailureReason.OUT_OF_DISK,
        f"no space left on the disk of {path}: raise the node's ephemeral storage, or mount a larger volume "
        "at /osprey/scratch by spec.job.template",
    )
