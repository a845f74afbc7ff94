"""External inputs: what a source's URI names in S3 or on a claim, and the digest of its content."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from osprey_api.conditions import FailureReason
from osprey_api.sources import ClaimSource, HubSource, S3Source, parse
from osprey_api.stages import StorageLocation
from osprey_runtime import settings
from osprey_runtime.errors import StageError
from osprey_runtime.store import Content, Entry, Store, digest_of, join, open_store, sha256_of
from osprey_runtime.store.local import LocalStore

_SOURCE_REASON = {
    FailureReason.STORAGE_NOT_FOUND: FailureReason.SOURCE_NOT_FOUND,
    FailureReason.STORAGE_ACCESS_DENIED: FailureReason.SOURCE_ACCESS_DENIED,
}


@dataclass(frozen=True)
class Located:
    """A file or a folder of a store."""

    uri: str
    store: Store
    key: str
    """Of the file, or of the folder; "" for all of a bucket or a claim."""

    @property
    def is_file(self) -> bool:
        """Whether it is one file."""
        with errors(self.uri):
            return self.key != "" and self.store.exists(self.key)

    def files(self) -> list[Entry]:
        """Return the files below the folder, in the order of their keys.

        Raises:
            StageError: SOURCE_NOT_FOUND, there is none.
        """
        with errors(self.uri):
            found = sorted(self.store.list(self.key), key=lambda entry: entry.key)
        if not found:
            raise StageError(FailureReason.SOURCE_NOT_FOUND, f"there is nothing at {self.uri}: correct the URI")
        return found

    def relative(self, entry: Entry) -> str:
        """Return the path of one of `files` below the folder."""
        return entry.key[len(self.key) + 1 :] if self.key else entry.key


def parsed(uri: str) -> HubSource | S3Source | ClaimSource:
    """Take a URI apart.

    Raises:
        StageError: INVALID_CONFIG, it is none of a source.
    """
    try:
        return parse(uri)
    except ValueError as error:
        raise StageError(FailureReason.INVALID_CONFIG, str(error)) from error


def locate(uri: str, storage: StorageLocation) -> Located:
    """Return where an s3:// or pvc:// source lies.

    Args:
        uri: of the source.
        storage: whose endpoint and region are used for s3://.

    Raises:
        StageError: INVALID_CONFIG, the URI is of another kind; SOURCE_NOT_FOUND, the claim is not mounted.
    """
    match parsed(uri):
        case S3Source(bucket, key):
            bucket_store = open_store(storage.model_copy(update={"uri": f"s3://{bucket}"}))
            return Located(uri, bucket_store, join(key))
        case ClaimSource(claim, path):
            root = settings.claims_root() / claim
            if not root.is_dir():
                raise StageError(
                    FailureReason.SOURCE_NOT_FOUND,
                    f"claim {claim!r} of {uri} is not mounted: correct the URI",
                )
            return Located(uri, LocalStore(root), join(path))
        case HubSource():
            raise StageError(FailureReason.INVALID_CONFIG, f"{uri} is of the hub: name an s3:// or pvc:// source here")


def content_digest(uri: str, storage: StorageLocation) -> str:
    """Return the digest of an s3:// or pvc:// source, by reading all of it.

    A file's is the SHA-256 of its bytes; a folder's that of the canonical JSON of its sorted
    [path, size, SHA-256], as an artifact's.

    Raises:
        StageError: SOURCE_NOT_FOUND or SOURCE_ACCESS_DENIED.
    """
    located = locate(uri, storage)
    with errors(uri):
        if located.is_file:
            return f"sha256:{sha256_of(located.store, located.key)}"
        return digest_of(
            {
                located.relative(entry): Content(entry.size, sha256_of(located.store, entry.key))
                for entry in located.files()
            }
        )


@contextmanager
def errors(uri: str) -> Iterator[None]:
    """Raise a store's errors as those of the source that lies in it."""
    try:
        yield
    except StageError as error:
        if error.reason not in _SOURCE_REASON:
            raise
        raise StageError(_SOURCE_REASON[error.reason], f"{uri}: {error.message}") from error
    except FileNotFoundError as error:
        raise StageError(FailureReason.SOURCE_NOT_FOUND, f"there is nothing at {uri}: correct the URI") from error


def changed(uri: str) -> StageError:
    """Return the error for a source that is no longer what `resolve` found."""
    return StageError(
        FailureReason.INVALID_DATA,
        f"{uri} changed since it was resolved: annotate the resource with osprey.dev/retry=NEW-VALUE to use it as it "
        "is now, or put the old content back",
    )
