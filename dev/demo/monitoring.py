"""The operator's figures while the servers work: asked of Prometheus, or of the operator's own page."""

import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

Ask = Callable[[str, Mapping[str, str]], float | None]
"""Name and labels of a series -> its value; None where there is none yet."""


def prometheus(url: str) -> Ask:
    """Ask a Prometheus server."""

    def ask(name: str, labels: Mapping[str, str]) -> float | None:
        selector = ",".join(f'{label}="{value}"' for label, value in labels.items())
        query = urllib.parse.urlencode({"query": f"{name}{{{selector}}}"})
        with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:  # noqa: S310 - our own
            return _only([float(result["value"][1]) for result in json.load(answer)["data"]["result"]], name)

    return ask


def page(url: str) -> Ask:
    """Ask a page of metrics."""

    def ask(name: str, labels: Mapping[str, str]) -> float | None:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own http address
            families = text_string_to_metric_families(answer.read().decode())
            samples = [sample for family in families for sample in family.samples if sample.name == name]
        return _only([float(s.value) for s in samples if labels.items() <= s.labels.items()], name)

    return ask


def _only(values: Sequence[float], name: str) -> float | None:
    if len(values) > 1:
        raise ValueError(f"{name} has {len(values)} series")
    return values[0] if values else None


class Follow:
    """Asks for series again and again in the background and keeps each one's last value."""

    def __init__(self, ask: Ask, names: Sequence[str], labels: Mapping[str, str], interval_s: float = 5) -> None:
        self._ask = ask
        self._names = names
        self._labels = labels
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.values: dict[str, float] = {}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for name in self._names:
                try:
                    value = self._ask(name, self._labels)
                except OSError:
                    continue  # asked again in a moment; `wait` says if it never answers
                if value is not None:
                    self.values[name] = value

    def wait(self, seconds: float) -> None:
        """Return when every series has a value.

        Raises:
            TimeoutError: one has none in time.
        """
        end = time.monotonic() + seconds
        while missing := [name for name in self._names if name not in self.values]:
            if time.monotonic() > end:
                raise TimeoutError(f"no value of {missing[0]} after {seconds:.0f} s")
            time.sleep(1)

    def __enter__(self) -> Self:
        """Start asking."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop asking."""
        self._stop.set()
        self._thread.join()
