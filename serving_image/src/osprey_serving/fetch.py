"""Put a server's files on the pod's disk before it starts: the target, and the drafter with its digests verified."""

import logging
from pathlib import Path

from pydantic import ValidationError

from osprey_api.conditions import FailureReason
from osprey_api.serving import ServerFiles
from osprey_api.sources import ClaimSource
from osprey_api.stages import ArtifactRef, Pinned, StorageLocation
from osprey_runtime import manifest
from osprey_runtime.errors import StageError
from osprey_runtime.models import local_model
from osprey_runtime.sources import parsed
from osprey_serving import versions

log = logging.getLogger("osprey_serving")


def read_wanted(text: str | bytes, where: str) -> ServerFiles:
    """Return what a pod is to have on its disk.

    Raises:
        StageError: INVALID_CONFIG: it does not say.
    """
    try:
        return ServerFiles.model_validate_json(text)
    except ValidationError as error:
        raise StageError(FailureReason.INVALID_CONFIG, f"{where} does not name a server's files: {error}") from error


def fetch(wanted: ServerFiles, *, model: Path, drafter: Path, cache: Path | None) -> None:
    """Bring target and drafter to the paths at which the server looks for them.

    Args:
        wanted: what to bring.
        model: folder in which the target appears, unless it lies on a claim, where the server reads it itself.
        drafter: folder in which the drafter appears.
        cache: folder that outlives the pod, for models from S3; None: `model` itself keeps them. The hub has its own.

    Raises:
        StageError: a source, the storage or the hub can't be used, or a digest does not match.
    """
    fetch_target(wanted.target, wanted.storage, model, cache or model)
    if wanted.drafter is not None:
        folder = fetch_drafter(wanted.drafter, wanted.storage, drafter)
        versions.show(drafter, folder)
        versions.remove_others(drafter, folder)


def fetch_target(target: Pinned, storage: StorageLocation, model: Path, cache: Path) -> None:
    """Bring the target to `model`; only look for it where it lies on a claim."""
    folder = local_model(target, storage, cache=cache)
    if not (folder / "config.json").is_file():
        raise StageError(
            FailureReason.SOURCE_NOT_FOUND,
            f"{target.uri} holds no config.json: name the folder of a model in the Hugging Face layout",
        )
    if not isinstance(parsed(target.uri), ClaimSource):
        versions.show(model, folder)
    log.info("target %s is at %s", target.uri, folder)


def fetch_drafter(artifact: ArtifactRef, storage: StorageLocation, drafter: Path) -> Path:
    """Return the drafter's folder below `drafter`, named by its digest; it appears only when it is whole."""
    folder = drafter / folder_name(artifact.digest)
    if not folder.is_dir():
        manifest.fetch(storage, artifact, folder)
        log.info("drafter %s is at %s", artifact.uri, folder)
    return folder


def folder_name(digest: str) -> str:
    """Return the name of a digest's folder; a colon would end a path in many a tool."""
    return digest.replace(":", "-")


def digest_of(name: str) -> str:
    """Return the digest of which a folder has the name."""
    return name.replace("-", ":")
