"""The termination message: a stage's last word, which Kubernetes cuts at 4096 bytes."""

import logging
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_api.stages import TERMINATION_MESSAGE_LIMIT, Outcome
from osprey_runtime.settings import TERMINATION_LOG

log = logging.getLogger("osprey_runtime")

_SENTENCE_LIMIT = 2000
"""Characters. A condition's message holds 2048."""


def encode(outcome: Outcome) -> bytes:
    """Return an outcome as JSON that fits: a message that is too long loses its end.

    A result that does not fit becomes a failure, INVALID_CONFIG: only very long URIs make one.
    """
    message = _shortened(outcome.message, _SENTENCE_LIMIT)
    while True:
        data = outcome.model_copy(update={"message": message}).model_dump_json(exclude_none=True).encode()
        over = len(data) - TERMINATION_MESSAGE_LIMIT
        if over <= 0:
            return data
        if not message:
            text = f"the stage's answer is {over} bytes too long for Kubernetes: shorten the URIs of the data"
            return encode(Outcome(failure=FailureReason.INVALID_CONFIG, message=text, seconds=outcome.seconds))
        # A character takes at most 6 bytes of JSON, so this always gets shorter and never by far too much.
        message = _shortened(message, max(0, len(message) - max(2, over // 6)))


def write(outcome: Outcome, path: Path) -> None:
    """Write an outcome to where Kubernetes reads it; where there is no such file, only to the log."""
    data = encode(outcome)
    log.info("outcome: %s", data.decode())
    if path == TERMINATION_LOG and not path.exists():
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        log.warning("the outcome can't be written to %s: %s", path, error.strerror)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…" * (limit > 0)
