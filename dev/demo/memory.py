"""Peak memory of the whole machine above its state at the start: everything that the demonstration started."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

MEMINFO = Path("/proc/meminfo")


class PeakMemory:
    """Samples how much memory is not available, in the background."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self._interval_s = interval_s
        self._start = used_bytes()
        self._peak = self._start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def gib(self) -> float:
        """The peak so far, in GiB above the start."""
        return (self._peak - self._start) / 2**30

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._peak = max(self._peak, used_bytes())

    def __enter__(self) -> Self:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()


def used_bytes() -> int:
    """Return memory that is in use and could not be given to another program."""
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return (int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])) * 1024
