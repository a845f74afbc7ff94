"""What is away for a moment is waited for; what is wrong is told at once."""

import threading
import time

import pytest

from osprey_api.conditions import FailureReason
from osprey_runtime import patience
from osprey_runtime.errors import StageError
from osprey_runtime.patience import patiently


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(patience, "_DELAYS_S", (0.01, 0.02))


class Away:
    """Fails so many times, and then answers."""

    def __init__(self, times, reason=FailureReason.STORAGE_UNAVAILABLE):
        self.left, self.reason = times, reason

    def __call__(self):
        self.left -= 1
        if self.left >= 0:
            raise StageError(self.reason, "nobody is there")
        return "here"


def test_storage_that_comes_back_in_time():
    assert patiently(Away(5), patience_s=60, stop=threading.Event()) == "here"


def test_storage_that_stays_away():
    began = time.monotonic()
    with pytest.raises(StageError, match="nobody is there"):
        patiently(Away(1_000_000), patience_s=0.2, stop=threading.Event())
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("reason", [FailureReason.STORAGE_ACCESS_DENIED, FailureReason.STORAGE_FULL])
def test_what_does_not_pass_by_itself_is_told_at_once(reason):
    asked = Away(1, reason)
    with pytest.raises(StageError) as error:
        patiently(asked, patience_s=60, stop=threading.Event())
    assert error.value.reason is reason
    assert asked.left == 0


def test_a_pod_that_has_to_stop_does_not_wait(monkeypatch):
    monkeypatch.setattr(patience, "_DELAYS_S", (600.0,))
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(StageError):
        patiently(Away(1), patience_s=3600, stop=stop)
