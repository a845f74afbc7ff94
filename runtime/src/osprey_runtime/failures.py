"""What an exception means: the closed reason and the sentence in the outcome."""

import errno
import shutil
import traceback
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_runtime.store import out_of_disk

_NO_ROOM_BYTES = 1 << 20
"""Less than this is free where a file did not fit."""
_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


def failure_of(error: BaseException, scratch: Path) -> StageError:
    """Return the reason and the sentence for whatever a stage raised. A bug's traceback goes to standard error.

    Args:
        error: what was raised.
        scratch: where the stage writes its files.
    """
    if isinstance(error, StageError):
        return error
    name, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        where = f" of {error.filename}" if error.filename else ""  # a failed write names no file
        return StageError(FailureReason.OUT_OF_DISK, f"no space left on the disk{where}: mount a larger scratch volume")
    # safetensors says why in words alone, and torch's writer of archives not even so.
    if "No space left on device" in text or (
        "unexpected pos" in text and shutil.disk_usage(scratch).free < _NO_ROOM_BYTES
    ):
        return out_of_disk(scratch)
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
        return StageError(
            FailureReason.OUT_OF_MEMORY,
            f"memory ran out ({text or name}): lower sequenceLength, raise job.zeroStage (with optimizer AdamW), or "
            "give the pod more",
        )
    traceback.print_exception(error)
    # Told apart by name: torch is not imported here, and gloo has no type of its own.
    module = type(error).__module__
    if (module.startswith("torch") and name in _LOST_PEER_TYPES) or (
        isinstance(error, RuntimeError) and "gloo" in text and any(word in text for word in _LOST_PEER_WORDS)
    ):
        return StageError(FailureReason.PEER_LOST, f"another process of the stage is gone: {text}")
    return StageError(FailureReason.INTERNAL_ERROR, f"{name}: {text}; the traceback is in the pod's log")
