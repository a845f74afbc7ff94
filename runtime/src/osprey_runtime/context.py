"""What a stage is given to work with."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from osprey_api.conditions import FailureReason
from osprey_api.sources import S3Source
from osprey_api.stages import ArtifactRef, InputRole, Pinned, StageConfig, StageTask, StorageLocation
from osprey_runtime import settings
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.errors import StageError
from osprey_runtime.manifest import RemoteArtifact
from osprey_runtime.models import local_model
from osprey_runtime.parts import Parts
from osprey_runtime.patience import patiently
from osprey_runtime.progress import Progress
from osprey_runtime.sources import parsed

T = TypeVar("T")


@dataclass(frozen=True)
class StageContext:
    """What a stage is given to work with, the same in each process of a distributed stage.

    Attributes:
        task: all that the pod was told.
        attempt: UID of the Job.
        output: an empty folder; what lies in it in the end is published.
        scratch: a folder for everything else. The processes of a pod share it.
        progress: how far the stage is; silent except in rank 0.
        checkpoints: those of this artifact.
        parts: files of this artifact that need not wait for the end.
        stop: set by SIGTERM. A stage that sees it saves a checkpoint, where it has them, and raises
            `stopped()`; nothing is published after it was set.
        patience_s: how long a storage that is away is waited for.
        rank: this process among all of the stage.
        local_rank: this process among those of its pod.
        world_size: processes of the stage.
    """

    task: StageTask
    attempt: str
    output: Path
    scratch: Path
    progress: Progress
    checkpoints: Checkpoints
    parts: Parts
    stop: threading.Event = field(default_factory=threading.Event)
    patience_s: float = 300.0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def config(self) -> StageConfig:
        """The stage's config."""
        return self.task.config

    @property
    def storage(self) -> StorageLocation:
        """Where artifacts lie; its endpoint serves s3:// sources too."""
        return self.task.storage

    def input(self, role: InputRole) -> Path:
        """Return the folder of an input artifact, verified. Don't write to it.

        Raises:
            StageError: INVALID_CONFIG, the task has no such input.
        """
        self._asked(role)
        return self.scratch / "inputs" / role

    def patiently(self, action: Callable[[], T]) -> T:
        """Return what `action` does; while the storage is away, try again. It must bear being repeated."""
        return patiently(action, patience_s=self.patience_s, stop=self.stop)

    def remote_input(self, role: InputRole) -> RemoteArtifact:
        """Return an input artifact that is read where it lies.

        Raises:
            StageError: INVALID_CONFIG, the task has no such input; what `RemoteArtifact` raises.
        """
        return self.patiently(lambda: RemoteArtifact(self.storage, self._asked(role)))

    def _asked(self, role: InputRole) -> ArtifactRef:
        if role not in self.task.inputs:
            raise StageError(FailureReason.INVALID_CONFIG, f"stage {self.task.stage} was given no input {role!r}")
        return self.task.inputs[role]

    def model(self, pinned: Pinned, *, weights: bool = True) -> Path:
        """Return the local folder of a model, downloaded on first use. Don't write to it.

        Args:
            pinned: the model.
            weights: False where config and tokenizer are enough.

        Raises:
            StageError: see `local_model`.
        """
        # What lies in S3 never changes under its digest; what lies on a claim may, and is verified in each pod.
        kept = settings.model_cache() if isinstance(parsed(pinned.uri), S3Source) else None
        cache = kept or self.scratch / "models"
        return self.patiently(lambda: local_model(pinned, self.storage, cache=cache, weights=weights))


def stopped() -> StageError:
    """Return the error of a stage that ends because it was told to."""
    return StageError(FailureReason.STOPPED, "the pod was told to stop; the next attempt goes on")
