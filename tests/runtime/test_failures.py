"""What libraries raise when the disk is full, which says so of itself only in words or not at all."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from osprey_api.conditions import FailureReason
from osprey_runtime.failures import failure_of


@pytest.fixture
def torchs():
    with pytest.raises(RuntimeError, match="unexpected pos") as caught:
        torch.save(torch.zeros(100_000), "/dev/full")
    return caught.value


def test_full_disk_under_torch(torchs, tmp_path, monkeypatch):
    assert failure_of(torchs, tmp_path).reason is FailureReason.INTERNAL_ERROR  # there is room
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=4096))
    failure = failure_of(torchs, tmp_path)
    assert failure.reason is FailureReason.OUT_OF_DISK
    assert str(tmp_path) in failure.message


def test_full_disk_under_safetensors(tmp_path):
    """As of a full tmpfs; its half of a file is gone by then, so there is room again."""
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert failure_of(error, tmp_path).reason is FailureReason.OUT_OF_DISK
