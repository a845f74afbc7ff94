"""Checkpoints of a training stage: uploaded beside the training, and complete only with their marker.

    <prefix>/checkpoints/step-00000500-<attempt, 8 characters>/<path>
    <prefix>/checkpoints/step-00000500-<attempt, 8 characters>/complete.json       written last

In a Job of several pods each uploads its own files and a marker of its own (complete.json of pod 0,
complete-1.json, …): the checkpoint is complete with the last of them.
"""

import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from osprey_api.base import StatusModel
from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_runtime.manifest import File, files_of
from osprey_runtime.patience import Patience, at_once
from osprey_runtime.store import Content, Store, join

log = logging.getLogger("osprey_runtime")

FOLDER = "checkpoints"
_RETRIES_AFTER_S = (5.0, 15.0)
"""The store's client has tried for a minute by then. All of it must fit into a pod's grace period."""
_PASSING = {FailureReason.STORAGE_UNAVAILABLE, FailureReason.STORAGE_FULL}
"""Sweeping, or somebody who looks, may have made room by then."""
_NAME = re.compile(r"step-(\d{8,})-([A-Za-z0-9._-]{1,8})")


class Marker(StatusModel):
    """What one pod says when all its files of a checkpoint are there."""

    step: int
    parts: int
    """Pods that save a part each."""
    files: tuple[File, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    name: str
    step: int
    files: tuple[File, ...]


class Checkpoints:
    """The checkpoints of one artifact.

    Args:
        store: where they lie.
        prefix: of the artifact.
        attempt: UID of the Job.
        keep: complete checkpoints that are kept.
        part: number of this pod.
        parts: pods that save a part each.
    """

    def __init__(self, store: Store, prefix: str, attempt: str, keep: int, *, part: int = 0, parts: int = 1) -> None:
        self._store = store
        self._root = join(prefix, FOLDER)
        self.uri = f"{store.uri}/{self._root}"
        """Of the folder that holds them all."""
        self._attempt = attempt
        self._keep = keep
        self._part, self._parts = part, parts
        self._upload: threading.Thread | None = None
        self._failure: BaseException | None = None

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None.

        Where several processes train together, ask in one of them and tell the others: all must resume from
        the same.
        """
        entries = self._entries()
        for name in self._names(entries):
            checkpoint = self._complete(name, entries)
            if checkpoint is not None:
                return checkpoint
        return None

    def restore(self, checkpoint: Checkpoint, folder: Path, patiently: Patience = at_once) -> Path:
        """Download a checkpoint into a folder that is made anew, and return it. Every file is verified.

        Args:
            checkpoint: which one.
            folder: where to.
            patiently: downloads a file.

        Raises:
            StageError: CORRUPT_ARTIFACT, a file is not what was saved. The checkpoint is deleted, so that the
                next attempt resumes from the one before it.
        """
        if folder.exists():
            shutil.rmtree(folder)
        for file in checkpoint.files:
            key = join(self._root, checkpoint.name, file.path)
            try:
                content = patiently(partial(self._store.download, key, folder / file.path))
                is_right = content == Content(file.size, file.sha256)
            except FileNotFoundError:
                is_right = False
            if not is_right:
                self._delete([checkpoint.name])
                raise StageError(
                    FailureReason.CORRUPT_ARTIFACT,
                    f"file {file.path} of checkpoint {checkpoint.name} is damaged; the checkpoint was deleted, and the "
                    "next attempt resumes from the one before it",
                )
        return folder

    def save(self, folder: Path, step: int) -> None:
        """Take a folder over and upload it in the background as the checkpoint of a step.

        The folder is gone when this returns. One upload runs at a time: where the last one still does, this waits.
        The process must not end before `wait`, which the runner calls after every stage.

        That the storage was away for the last one is only logged: training goes on, and this one may be saved.

        Raises:
            StageError: the last upload failed for a reason that does not pass by itself, such as a full storage.
        """
        try:
            self.wait()
        except StageError as error:
            if error.reason is not FailureReason.STORAGE_UNAVAILABLE:
                raise
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        files = folder.rename(staging / "files")
        self._upload = threading.Thread(target=self._run, args=(files, step), name="checkpoint-upload")
        self._upload.start()

    def wait(self) -> None:
        """Return when nothing is being uploaded.

        Raises:
            StageError: the last upload failed.
        """
        if self._upload is not None:
            self._upload.join()
            self._upload = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, files: Path, step: int) -> None:
        try:
            self._put_patiently(files, step)
            self._sweep()
        except BaseException as error:  # noqa: BLE001 - a thread's failure is raised by the next save or wait
            log.error("the checkpoint of step %d was not saved: %r", step, error)  # noqa: TRY400 - raised again
            self._failure = error
            if isinstance(error, StageError) and error.reason is FailureReason.STORAGE_FULL:
                self._give_room_back(step)
        finally:
            shutil.rmtree(files.parent, ignore_errors=True)

    def _put_patiently(self, folder: Path, step: int) -> None:
        for delay_s in _RETRIES_AFTER_S:
            try:
                return self._put(folder, step)
            except StageError as error:
                if error.reason not in _PASSING:
                    raise
                log.warning("the checkpoint of step %d is tried again in %g s: %s", step, delay_s, error.message)
                time.sleep(delay_s)
        return self._put(folder, step)

    def _put(self, folder: Path, step: int) -> None:
        name = self._name(step)
        marker = Marker(step=step, parts=self._parts, files=files_of(folder))
        for file in marker.files:
            self._store.upload(folder / file.path, join(self._root, name, file.path))
        self._store.write(join(self._root, name, _marker(self._part)), marker.model_dump_json().encode())
        log.info("checkpoint %s saved", name)

    def _name(self, step: int) -> str:
        return f"step-{step:08d}-{self._attempt[:8]}"

    def _give_room_back(self, step: int) -> None:
        """Delete what was uploaded of a checkpoint that found no room: attempt after attempt would add to it."""
        try:
            entries = self._entries()
            if self._complete(self._name(step), entries) is None:
                self._delete([self._name(step)], entries)
        except (StageError, OSError) as error:
            log.warning("the unfinished checkpoint of step %d was not deleted: %s", step, error)

    def _sweep(self) -> None:
        """Delete what is older than the newest `keep` complete checkpoints; the incomplete ones among it too.

        The checkpoint is saved, so nothing that goes wrong here is a failure.
        """
        if self._part != 0:
            return
        try:
            entries = self._entries()
            names = self._names(entries)
            complete = [name for name in names if self._complete(name, entries)]
            if len(complete) >= 1:
                kept = set(complete[: self._keep])
                newest = names.index(complete[0])
                # Newer ones that are not complete may be under way in another pod.
                self._delete([name for name in names[newest:] if name not in kept], entries)
        except (StageError, OSError) as error:
            log.warning("old checkpoints were not deleted: %s", error)

    def _entries(self) -> dict[str, int]:
        return {entry.key: entry.size for entry in self._store.list(self._root)}

    def _names(self, entries: Iterable[str]) -> list[str]:
        """Return the checkpoints' names, newest first."""
        found = {key.removeprefix(f"{self._root}/").partition("/")[0] for key in entries}
        steps = {name: int(match[1]) for name in found if (match := _NAME.fullmatch(name))}
        return sorted(steps, key=lambda name: (steps[name], name), reverse=True)

    def _complete(self, name: str, entries: dict[str, int]) -> Checkpoint | None:
        files: list[File] = []
        part, parts = 0, 1
        while part < parts:
            key = join(self._root, name, _marker(part))
            if key not in entries:
                return None
            try:
                marker = Marker.model_validate_json(self._store.read(key))
            except (ValidationError, FileNotFoundError):
                return None
            files += marker.files
            part, parts = part + 1, marker.parts
        if any(entries.get(join(self._root, name, file.path)) != file.size for file in files):
            return None
        return Checkpoint(name, marker.step, tuple(files))

    def _delete(self, names: Iterable[str], entries: Iterable[str] | None = None) -> None:
        folders = [join(self._root, name) + "/" for name in names]
        keys = [key for key in entries or self._entries() for folder in folders if key.startswith(folder)]
        # Markers first: cut short, a deletion must not leave a checkpoint that looks complete.
        self._store.delete(sorted(keys, key=lambda key: not key.endswith(".json")))


def _marker(part: int) -> str:
    return "complete.json" if part == 0 else f"complete-{part}.json"
