"""Waiting for a storage that is away: a moment of its absence must not cost an attempt, and with it hours of work."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

T = TypeVar("T")
log = logging.getLogger("osprey_runtime")

_DELAYS_S = (5.0, 10.0, 20.0, 30.0)
"""The last one again and again. The store's client has tried for a while by itself."""


class Patience(Protocol):
    """Does what asks the storage, again where that is away for a while."""

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return what `action` does. It must bear being repeated."""
        ...


def at_once(action: Callable[[], T], /) -> T:
    """Have no patience."""
    return action()


def patiently(action: Callable[[], T], *, patience_s: float, stop: threading.Event) -> T:
    """Return what `action` does; while the storage is away, try again. It must bear being repeated.

    Args:
        action: asks the storage.
        patience_s: how long to go on trying.
        stop: set when the pod is told to stop, which ends the waiting.

    Raises:
        StageError: STORAGE_UNAVAILABLE, it was away for too long, or the pod has to stop; any other at once.
    """
    end = time.monotonic() + patience_s
    for delay_s in itertools.chain(_DELAYS_S, itertools.repeat(_DELAYS_S[-1])):
        try:
            return action()
        except StageError as error:
            if error.reason is not FailureReason.STORAGE_UNAVAILABLE or time.monotonic() + delay_s > end:
                raise
            log.warning("tried again in %g s: %s", delay_s, error.message)
            if stop.wait(delay_s):
                raise
    raise AssertionError  # pragma: no cover - the delays never end
