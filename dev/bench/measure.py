"""Time and memory of a step, each repeat in a process of its own, and their medians."""

import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dev.settings import REPOSITORY

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Spread:
    """Several values of one figure."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Measurement:
    """Of one process.

    Attributes:
        seconds: of each step.
        cpu_seconds: of these, what the process's threads computed: other work on the machine matters less to it.
        peak_bytes: the most that one of them took, above what there was before.
        losses: by step of the unroll, weighted as they are added.
        facts: what else the process tells.
    """

    seconds: Sequence[float]
    cpu_seconds: Sequence[float]
    peak_bytes: int
    losses: Sequence[float]
    facts: Mapping[str, Any]


def peak_bytes(step: Callable[[], object]) -> int:
    """Run a step, and return the most memory that the process held meanwhile above what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text(_RESET_PEAK)  # VmHWM begins again at VmRSS
    before = _status_bytes("VmRSS")
    step()
    return max(0, _status_bytes("VmHWM") - before)


def seconds(step: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Run a step several times, and return the seconds that each took, and those of the process's threads."""
    found, computed = [], []
    for _ in range(repeats):
        started, before = time.perf_counter(), time.process_time()
        step()
        found.append(time.perf_counter() - started)
        computed.append(time.process_time() - before)
    return found, computed


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def in_process(module: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m MODULE TASK`, and return the JSON of the last line that it prints.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", module, json.dumps(task)]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} of {task} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def answer(measurement: Measurement) -> str:
    """Write what `in_process` reads."""
    return json.dumps(asdict(measurement))
