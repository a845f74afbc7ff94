"""What an artifact is made of, written last: without its manifest, nothing that lies in a prefix counts.

<prefix>/manifest.json                          names the attempt and every file, size and SHA-256
<prefix>/doubted                                somebody read a file that was not what the manifest says
<prefix>/attempts/<attempt>/<digest>/<path>     the files
<prefix>/parts/<SHA-256>                        those that were uploaded before the end, see `parts`
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter, ValidationError

from osprey_api.base import Digest, StatusModel
from osprey_api.conditions import FailureReason
from osprey_api.stages import ArtifactRef, StageResult, StageTask, StorageLocation
from osprey_runtime.errors import StageError
from osprey_runtime.store import (
    DOWNLOAD_STREAMS,
    Content,
    Entry,
    Store,
    content_of,
    digest_of,
    join,
    open_store,
    out_of_disk,
    sha256_of,
)

NAME = "manifest.json"
DOUBT = "doubted"
PARTS = "parts"
PLAIN = "config.json"
"""Shows that a folder without a manifest is a model."""
_UPLOAD_TIME = timedelta(days=1)
"""An upload that began longer ago has nobody any more who goes on with it."""


def _inside(path: str) -> str:
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise ValueError("path leaves its folder")
    return path


class File(StatusModel):
    """One file of an artifact."""

    path: Annotated[str, AfterValidator(_inside)]
    """'/'-separated, relative to the artifact's folder."""
    size: int
    """Bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    part: bool = False
    """Uploaded while the stage still ran."""


def part_key(file: File) -> str:
    """Return the key of a part, relative to the artifact's prefix."""
    return f"{PARTS}/{file.sha256}"


def record_key(path: str) -> str:
    """Return the key of what says that a part is there, relative to the artifact's prefix. path: of the part."""
    return f"{PARTS}/records/{path}"


class Manifest(StatusModel):
    """An artifact: its files, and where they come from."""

    version: Literal[1] = 1
    """Of this format."""
    stage: str
    fingerprint: str
    resource: str
    attempt: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    digest: Digest
    files: tuple[File, ...]
    config: JsonValue
    inputs: dict[str, ArtifactRef]
    result: JsonValue
    """A `StageResult`; read by `result_of`, since one of another version may lack fields."""
    seconds: float
    peak_memory_bytes: int
    versions: dict[str, str]
    """Distribution -> version, of what made it."""
    commit: str | None = None
    """Git commit of the image."""

    @property
    def folder(self) -> str:
        """The key of the folder with the files, relative to the artifact's prefix.

        Named by attempt and by content: two pods of one Job may each believe to be the only one.
        """
        return f"attempts/{self.attempt}/{self.digest.removeprefix('sha256:')[:16]}"

    def key_of(self, file: File) -> str:
        """Return the key of one of the files, relative to the artifact's prefix."""
        return part_key(file) if file.part else f"{self.folder}/{file.path}"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def result_of(self) -> StageResult:
        """Return what the stage answered.

        Raises:
            StageError: INVALID_CONFIG, it was written by a version whose results hold less. The artifact is none the
                worse for it.
        """
        try:
            result: StageResult = TypeAdapter(StageResult).validate_python(self.result)
        except ValidationError as error:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the artifact {self.stage}/{self.fingerprint} was made by another version of Osprey, whose results "
                "this one can't read: use that version, or delete the artifact's folder, and it is made anew",
            ) from error
        return result


def files_of(folder: Path) -> tuple[File, ...]:
    """Return the files of a folder, in the order of their paths."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = content_of(path)
            found.append(File(path=path.relative_to(folder).as_posix(), size=content.size, sha256=content.sha256))
    return tuple(found)


def find(store: Store, prefix: str = "") -> Manifest | None:
    """Return the manifest of the artifact at a prefix, or None where there is none.

    Raises:
        StageError: CORRUPT_ARTIFACT, it is no manifest or contradicts itself.
    """
    try:
        data = store.read(join(prefix, NAME))
    except FileNotFoundError:
        return None
    where = join(prefix, NAME)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise _corrupt(f"{store.uri}/{where}", f"is no manifest ({error.error_count()} errors)") from error
    if not manifest.files or _digest_of(manifest.files) != manifest.digest:
        raise _corrupt(f"{store.uri}/{where}", "does not have the digest that it names")
    return manifest


def damaged(store: Store, prefix: str, manifest: Manifest) -> tuple[File, ...]:
    """Return the files of an artifact that are missing or are not what the manifest says.

    Sizes are compared. The content is read only where a reader doubted it, since that may be terabytes. A doubt without
    a reason is removed.
    """
    folders = (manifest.folder, PARTS) if any(file.part for file in manifest.files) else (manifest.folder,)
    sizes = {entry.key: entry.size for folder in folders for entry in store.list(join(prefix, folder))}
    is_doubted = store.exists(join(prefix, DOUBT))

    def is_right(file: File) -> bool:
        key = join(prefix, manifest.key_of(file))
        return sizes.get(key) == file.size and (not is_doubted or sha256_of(store, key) == file.sha256)

    wrong = tuple(file for file in manifest.files if not is_right(file))
    if is_doubted and not wrong:
        store.delete([join(prefix, DOUBT)])
    return wrong


def set_aside(store: Store, prefix: str, attempt: str, *, kept: Iterable[File] = ()) -> None:
    """Rename the manifest of a damaged artifact, so that the artifact is made anew.

    Args:
        store: where it lies.
        prefix: of the artifact.
        attempt: that makes it anew.
        kept: parts that are none the worse: their stage finds them again.
    """
    good = {file.path: file for file in kept}
    keys = {join(prefix, part_key(file)) for file in good.values()}
    for file in good.values():
        store.write(join(prefix, record_key(file.path)), file.model_dump_json().encode())
        keys.add(join(prefix, record_key(file.path)))
    store.delete([entry.key for entry in store.list(join(prefix, PARTS)) if entry.key not in keys])
    store.write(join(prefix, f"manifest.corrupt-{attempt}.json"), store.read(join(prefix, NAME)))
    store.delete([join(prefix, NAME)])
    store.delete([join(prefix, DOUBT)])


def publish(
    store: Store,
    prefix: str,
    attempt: str,
    folder: Path,
    *,
    task: StageTask,
    result: StageResult,
    seconds: float = 0.0,
    peak_memory_bytes: int = 0,
    versions: Mapping[str, str] | None = None,
    commit: str | None = None,
    parts: Iterable[File] = (),
) -> Manifest:
    """Upload a folder and complete the artifact at a prefix by its manifest.

    Args:
        store: where.
        prefix: of the artifact.
        attempt: UID of the Job.
        folder: the files.
        task: that was done.
        result: of the stage.
        seconds: that it took.
        peak_memory_bytes: of its processes.
        versions: of the distributions that made it.
        commit: of the image.
        parts: files of the artifact that are uploaded already.

    Returns:
        The manifest that is there now: this one, or that of another attempt which was faster. The files of
        the attempt that lost are deleted.

    Raises:
        ValueError: the folder has no file.
        StageError: the store can't be used.
    """
    made = files_of(folder)
    files = tuple(sorted((*made, *parts), key=lambda file: file.path))
    if not files:
        raise ValueError(f"stage {task.stage} made no file in {folder}")
    manifest = Manifest(
        stage=task.stage,
        fingerprint=task.fingerprint,
        resource=task.resource,
        attempt=attempt,
        digest=_digest_of(files),
        files=files,
        config=task.config.model_dump(mode="json"),
        inputs={role.value: ref for role, ref in task.inputs.items()},
        result=result.model_dump(mode="json"),
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        versions=dict(versions or {}),
        commit=commit,
    )
    keys = [join(prefix, manifest.key_of(file)) for file in made]
    try:
        for file, key in zip(made, keys, strict=True):
            store.upload(folder / file.path, key)
    except StageError as error:
        if error.reason is FailureReason.STORAGE_FULL:  # attempt after attempt would add to it
            with suppress(StageError):
                store.delete(keys)
        raise
    data = manifest.model_dump_json(indent=1).encode()
    if store.write(join(prefix, NAME), data, only_if_absent=True):
        return manifest
    winner = find(store, prefix)
    if winner is None:
        raise StageError(
            FailureReason.STORAGE_UNAVAILABLE,
            f"{store.uri}/{join(prefix, NAME)} was there and is gone: somebody deletes artifacts; it is tried again",
        )
    if winner.folder != manifest.folder:
        store.delete(keys)
    return winner


def sweep(store: Store, prefix: str, manifest: Manifest) -> None:
    """Delete what a finished artifact no longer needs: its checkpoints, and what came of attempts that were killed."""
    kept = {join(prefix, manifest.key_of(file)) for file in manifest.files}
    folders = (join(prefix, "attempts"), join(prefix, PARTS), join(prefix, "checkpoints"))
    store.delete([entry.key for folder in folders for entry in store.list(folder) if entry.key not in kept])
    store.forget_uploads(prefix, older_than=_UPLOAD_TIME)


class RemoteArtifact:
    """A finished artifact, read where it lies.

    Attributes:
        manifest: what it is made of.
    """

    def __init__(self, location: StorageLocation, artifact: ArtifactRef) -> None:
        """Read the manifest.

        Args:
            location: storage whose endpoint and region are used; the artifact may lie in another bucket of it.
            artifact: which one.

        Raises:
            StageError: SOURCE_NOT_FOUND, there is no manifest; CORRUPT_ARTIFACT, it has another digest; or the
                storage can't be used.
        """
        self._uri = artifact.uri
        self._store = open_store(location.model_copy(update={"uri": artifact.uri}))
        found = find(self._store)
        if found is None:
            raise StageError(
                FailureReason.SOURCE_NOT_FOUND,
                f"there is no finished artifact at {artifact.uri}: name the folder that holds {NAME}, or the {PLAIN} "
                "of a published model",
            )
        if found.digest != artifact.digest:
            raise _other_digest(artifact, found.digest)  # nothing is damaged, so nothing is to be deleted
        self.manifest = found
        self._files = {file.path: file for file in found.files}

    def file(self, path: str) -> File:
        """Return one of the files.

        Raises:
            StageError: CORRUPT_ARTIFACT, the manifest names no such file.
        """
        if path not in self._files:
            raise _corrupt(self._uri, f"has no file {path}")
        return self._files[path]

    def download(self, file: File, path: Path) -> None:
        """Download one file, and verify it.

        Raises:
            StageError: CORRUPT_ARTIFACT, it is missing or not what the manifest says, of which a note is left; or the
                storage can't be used.
        """
        try:
            content = self._store.download(self.manifest.key_of(file), path)
        except FileNotFoundError as error:
            raise _corrupt(self._uri, f"lacks its file {file.path}") from error
        if (content.size, content.sha256) != (file.size, file.sha256):
            raise self.doubted(file)

    def read(self, file: File, start: int, length: int) -> bytes:
        """Return a part of a file. It is not verified: compare a checksum, and raise `doubted` where it differs.

        Raises:
            StageError: CORRUPT_ARTIFACT, the file is missing; or the storage can't be used.
        """
        try:
            return self._store.read_range(self.manifest.key_of(file), start, length)
        except FileNotFoundError as error:
            raise _corrupt(self._uri, f"lacks its file {file.path}") from error

    def doubted(self, file: File) -> StageError:
        """Leave a note that a file is not what the manifest says, and return the error that says so."""
        with suppress(StageError):  # this pod may only read there
            self._store.write(DOUBT, b"")
        return _corrupt(self._uri, f"has another {file.path} than its manifest says")


def fetch(location: StorageLocation, artifact: ArtifactRef, folder: Path) -> Path:
    """Download an artifact and return `folder`, which then holds exactly its files, each of them verified.

    A published model, which has a config.json and no manifest, is one too: all files of its folder, with a digest that
    is defined in the same way.

    Where a file is not what the manifest says, a note is left for the stage that made it: run again, that stage
    reads all of the artifact, and makes it anew if it is damaged.

    Args:
        location: storage whose endpoint and region are used; the artifact may lie in another bucket of it.
        artifact: what to download.
        folder: where to; appears only when all is there, and replaces what was there before.

    Raises:
        StageError: SOURCE_NOT_FOUND, there is neither manifest nor config; CORRUPT_ARTIFACT, a digest does not match,
            or a published model has a key that leaves its folder; OUT_OF_DISK; or the storage can't be used.
    """
    store = open_store(location.model_copy(update={"uri": artifact.uri}))
    if not store.exists(NAME) and store.exists(PLAIN):
        return _fetch_plain(store, artifact, folder)
    remote = RemoteArtifact(location, artifact)
    manifest = remote.manifest
    with _filled(folder, manifest.size) as unfinished, ThreadPoolExecutor(DOWNLOAD_STREAMS) as pool:
        list(pool.map(lambda file: remote.download(file, unfinished / file.path), manifest.files))
    return folder


def _fetch_plain(store: Store, artifact: ArtifactRef, folder: Path) -> Path:
    """Download a model that Osprey did not make: the folder has no manifest, so that its digest is found by reading."""
    entries = list(store.list(""))
    for entry in entries:
        try:
            _inside(entry.key)  # S3 takes any
        except ValueError as error:
            raise StageError(
                FailureReason.CORRUPT_ARTIFACT,
                f"{artifact.uri} holds the key {entry.key!r}, which is no path of a file in a folder: rename or delete "
                "it",
            ) from error
    with _filled(folder, sum(entry.size for entry in entries)) as unfinished:

        def download(entry: Entry) -> Content:
            return store.download(entry.key, unfinished / entry.key)

        with ThreadPoolExecutor(DOWNLOAD_STREAMS) as pool:
            contents = dict(zip((entry.key for entry in entries), pool.map(download, entries), strict=True))
        if digest_of(contents) != artifact.digest:
            raise _other_digest(artifact, digest_of(contents))
    return folder


@contextmanager
def _filled(folder: Path, size: int) -> Iterator[Path]:
    """Give an empty folder beside `folder`, which replaces it when all went well.

    Raises:
        StageError: OUT_OF_DISK, there is no room for `size` bytes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < size:
        raise out_of_disk(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
        files = Path(unfinished, "files")
        yield files
        if folder.exists():
            shutil.rmtree(folder)
        files.rename(folder)


def _other_digest(artifact: ArtifactRef, found: str) -> StageError:
    return StageError(
        FailureReason.CORRUPT_ARTIFACT,
        f"{artifact.uri} has digest {found} and not {artifact.digest}: correct the digest in spec.import, or let the "
        "stage that made it run again",
    )


def _corrupt(where: str, what: str) -> StageError:
    return StageError(FailureReason.CORRUPT_ARTIFACT, f"{where} {what}: delete that folder, and it is made anew")


def _digest_of(files: tuple[File, ...]) -> str:
    return digest_of({file.path: Content(file.size, file.sha256) for file in files})
