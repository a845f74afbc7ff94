"""The machine that figures are of."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Self

import torch

_UNITS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "sve")


@dataclass(frozen=True)
class Machine:
    """What it computes with.

    Attributes:
        units: of its CPU, for products of matrices.
        threads: that a process uses.
    """

    processor: str
    cores: int
    units: tuple[str, ...]
    memory_gib: float
    threads: int
    torch: str

    @classmethod
    def this(cls) -> Self:
        """Describe this one."""
        fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
        names = {name.strip(): value.strip() for name, value in fields.items()}
        memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
        units = torch.cpu.get_capabilities()
        return cls(
            processor=names.get("model name", platform.machine()),
            cores=len(os.sched_getaffinity(0)),
            units=tuple(unit for unit in _UNITS if units.get(unit)),
            memory_gib=int(memory.split()[1]) / 2**20,
            threads=torch.get_num_threads(),
            torch=version("torch"),
        )

    def __str__(self) -> str:
        units = f" with {', '.join(self.units)}" if self.units else ""
        cores, threads = _counted(self.cores, "core"), _counted(self.threads, "thread")
        return f"{cores} of an {self.processor}{units}, {self.memory_gib:.0f} GiB, {threads}, torch {self.torch}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
