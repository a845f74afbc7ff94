"""What an exception means: the closed reason and the sentence in the outcome."""

import errno
import traceback

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

_LOST_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError"}
_LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


def failure_of(error: BaseException) -> StageError:
    """Return the reason and the sentence for whatever a stage raised. A bug's traceback goes to standard error."""
    if isinstance(error, StageError):
        return error
    name, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        where = f" of {error.filename}" if error.filename else ""  # a failed write names no file
        return StageError(FailureReason.OUT_OF_DISK, f"no space left on the disk{where}: mount a larger scratch volume")
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text:
        return StageError(
            FailureReason.OUT_OF_MEMORY,
            f"memory ran out ({text or name}): lower sequenceLength, raise job.zeroStage, or give the pod more",
        )
    traceback.print_exception(error)
    # Told apart by name: torch is not imported here, and gloo has no type of its own.
    module = type(error).__module__
    if (module.startswith("torch") and name in _LOST_PEER_TYPES) or (
        isinstance(error, RuntimeError) and "gloo" in text and any(word in text for word in _LOST_PEER_WORDS)
    ):
        return StageError(FailureReason.PEER_LOST, f"another process of the stage is gone: {text}")
    return StageError(FailureReason.INTERNAL_ERROR, f"{name}: {text}; the traceback is in the pod's log")
