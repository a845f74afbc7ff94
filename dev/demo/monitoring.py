"""Prometheus on the cluster: what it scrapes, and what it answers."""

import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self


def scrape_configs(**targets: str) -> list[Mapping[str, Any]]:
    """Return a job for each target, `name="host:port"`.

    Debian's Prometheus is built without Kubernetes service discovery, so it is told where the Services are.
    """
    return [
        # The operator's figures are about resources of other namespaces than its own.
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [address]}]}
        for name, address in targets.items()
    ]


def ask(url: str, query: str) -> float | None:
    """Return the value of an instant query with one result; None where there is none yet.

    Raises:
        OSError: Prometheus does not answer.
        ValueError: the query has several results.
    """
    address = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - our own http address
        results = json.load(answer)["data"]["result"]
    if len(results) > 1:
        raise ValueError(f"{query} has {len(results)} results")
    return float(results[0]["value"][1]) if results else None


class Follow:
    """Asks queries again and again in the background and keeps each one's last answer."""

    def __init__(self, url: str, queries: Mapping[str, str], interval_s: float = 5) -> None:
        self._url = url
        self._queries = queries
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.answers: dict[str, float] = {}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for name, query in self._queries.items():
                value = ask(self._url, query)
                if value is not None:
                    self.answers[name] = value

    def wait(self, seconds: float) -> None:
        """Return when every query has an answer.

        Raises:
            TimeoutError: one has none in time.
        """
        end = time.monotonic() + seconds
        while missing := [query for name, query in self._queries.items() if name not in self.answers]:
            if time.monotonic() > end:
                raise TimeoutError(f"Prometheus has no answer to {missing[0]} after {seconds:.0f} s")
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
