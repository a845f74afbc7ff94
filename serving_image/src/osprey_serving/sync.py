"""The sidecar of a server: keeps the wanted drafter on the disk and in the server, and tells what is where.

The wanted files are read from a mounted ConfigMap, again and again, so a restarted container converges by itself. A
drafter that changes under a running server is swapped live. It talks only to the server of its own pod, and a
failure of its own costs that server nothing: the old drafter goes on, and the failure shows in the metrics.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import httpx
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from osprey_api.conditions import FailureReason
from osprey_api.serving import ServerFiles
from osprey_runtime.errors import StageError
from osprey_serving import versions
from osprey_serving.fetch import digest_of, fetch_drafter, read_wanted
from osprey_serving.plugin import VERSION_KEY
from osprey_serving.plugin.swap import PREFIX

POLL_S = 5.0
"""The kubelet itself takes up to a minute to bring a changed ConfigMap to the pod."""
BACK_OFF_LIMIT_S = 300.0
ANSWER_S = 60.0
SWAP_S = 600.0

log = logging.getLogger("osprey_serving")


@dataclass(frozen=True)
class State:
    """What was seen in the last pass. Digests are those of drafters; None: none, or not known."""

    wanted: str | None = None
    on_disk: str | None = None
    """The one that a restarted server would load."""
    loaded: str | None = None
    """The one that the running server drafts with."""
    plugin: str | None = None
    """Version of Osprey's plugin in the server."""
    ready: bool = False
    """The server answers, its plugin is ours, and it drafts with what is wanted."""
    error: str = ""
    swaps: int = 0
    failures: int = 0


class Sync:
    """Brings one server to what is wanted, a pass at a time."""

    def __init__(self, server_url: str, admin_key: str | None, wanted: Path, drafter: Path) -> None:
        """Nothing is asked or written yet.

        Args:
            server_url: of the pod's own server.
            admin_key: SGLang's.
            wanted: the mounted `ServerFiles`.
            drafter: the folder in which the server finds its drafter.
        """
        self.state = State()
        self._wanted_path = wanted
        self._drafter = drafter
        self._flush_due = False
        self._may_be_paused = True
        self._http = httpx.Client(
            base_url=server_url,
            headers={} if admin_key is None else {"Authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(ANSWER_S, connect=5.0),
            trust_env=False,  # a proxy of the cluster must not see the key
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run(self, stop: threading.Event, poll_s: float = POLL_S) -> None:
        """Make passes until `stop`; after a failure, wait twice as long each time."""
        wait_s = poll_s
        while not stop.is_set():
            fine = self.step()
            # A server that is still paused answers nobody: no patience with that.
            wait_s = poll_s if fine or self._may_be_paused else min(2 * wait_s, BACK_OFF_LIMIT_S)
            stop.wait(wait_s)

    def step(self) -> bool:
        """Make one pass and return whether nothing failed; that the server is not up yet is no failure."""
        try:
            wanted = read_wanted(self._wanted_path.read_bytes(), str(self._wanted_path))
            self._converge(wanted)
        except (StageError, OSError, httpx.HTTPError) as error:
            log.warning("%s", error)
            self.state = replace(self.state, ready=False, error=str(error), failures=self.state.failures + 1)
            return False
        self.state = replace(self.state, error="")
        return True

    def _converge(self, wanted: ServerFiles) -> None:
        digest = wanted.drafter.digest if wanted.drafter else None
        folder = fetch_drafter(wanted.drafter, wanted.storage, self._drafter) if wanted.drafter else None
        on_disk = self._on_disk()
        try:
            loaded, plugin = self._loaded(on_disk), self._plugin()
        except httpx.TransportError:  # it is starting, or was restarted
            self.state = replace(self.state, wanted=digest, on_disk=on_disk, loaded=None, plugin=None, ready=False)
            return
        self.state = replace(self.state, wanted=digest, on_disk=on_disk, loaded=loaded, plugin=plugin, ready=False)
        if self._may_be_paused:  # by a sidecar that ended in the middle of a swap
            self._resume()
        if folder is not None and digest is not None:
            if plugin != version("osprey-serving"):
                raise StageError(
                    FailureReason.SERVER_FAILED,
                    f"the server runs Osprey's plugin in version {plugin or 'none'}, and "
                    f"{version('osprey-serving')} is wanted: look at the init container `plugin`",
                )
            if loaded != digest:
                self._swap(folder, digest)
            # Only now: a server that is restarted loads what has proved to load.
            versions.show(self._drafter, folder)
            versions.remove_others(self._drafter, folder)
            loaded = digest
        if self._flush_due:
            self._flush_due = not self._flushed()
        self.state = replace(self.state, on_disk=self._on_disk(), loaded=loaded, ready=True)

    def _on_disk(self) -> str | None:
        name = versions.shown(self._drafter)
        return None if name is None else digest_of(name)

    def _loaded(self, on_disk: str | None) -> str | None:
        """Return what the server drafts with: what a swap has noted in it, else what it found when it started."""
        noted = str(self._get("/model_info").get("weight_version"))
        return noted if noted.startswith("sha256:") else on_disk

    def _plugin(self) -> str | None:
        found = {state.get(VERSION_KEY) for state in self._get("/server_info")["internal_states"]}
        return found.pop() if len(found) == 1 else None

    def _swap(self, folder: Path, digest: str) -> None:
        """Replace the drafter of the running server; its requests wait, and none is lost.

        The prefix cache is flushed later, when no request is in the way: until then cached prefixes keep the old
        drafter's keys, which costs acceptance and nothing else.
        """
        began = time.monotonic()
        self._may_be_paused = True
        self._post("/pause_generation", {"mode": "in_place"})
        try:
            self._post(
                "/update_weights_from_disk",
                {"model_path": f"{PREFIX}{folder}", "flush_cache": False, "weight_version": digest},
                timeout_s=SWAP_S,
            )
        finally:
            self._resume()
        self._flush_due = True
        self.state = replace(self.state, swaps=self.state.swaps + 1)
        log.info("the drafter is now %s; requests waited %.1f s", digest, time.monotonic() - began)

    def _resume(self) -> None:
        self._post("/continue_generation", {})
        self._may_be_paused = False

    def _flushed(self) -> bool:
        return self._http.post("/flush_cache").is_success

    def _get(self, path: str) -> dict[str, Any]:
        answer = self._http.get(path)
        answer.raise_for_status()
        value: dict[str, Any] = answer.json()
        return value

    def _post(self, path: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> None:
        answer = self._http.post(path, json=body, timeout=timeout_s)
        if not answer.is_success:
            raise StageError(
                FailureReason.SERVER_FAILED, f"the server refuses {path} ({answer.status_code}): {answer.text[:500]}"
            )


class _Metrics(Collector):
    """The state as Prometheus reads it, made at each scrape, so that no digest outlives its drafter."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def collect(self) -> Iterator[Metric]:
        state = self._sync.state
        drafters = GaugeMetricFamily("osprey_sync_drafter", "Digest of the drafter", labels=("place", "digest"))
        for place, digest in (("wanted", state.wanted), ("disk", state.on_disk), ("server", state.loaded)):
            if digest is not None:
                drafters.add_metric((place, digest), 1)
        yield drafters
        yield GaugeMetricFamily("osprey_sync_ready", "The server drafts with what is wanted", value=state.ready)
        yield CounterMetricFamily("osprey_sync_swaps", "Drafters replaced under the running server", value=state.swaps)
        yield CounterMetricFamily("osprey_sync_failures", "Passes that failed", value=state.failures)


class StateServer:
    """Serves `/metrics`, and `/readyz`: the state as JSON, with 200 when the server is ready and else 503."""

    def __init__(self, sync: Sync, port: int) -> None:
        """Listen on all addresses; port 0 takes a free one."""
        registry = CollectorRegistry()
        registry.register(_Metrics(sync))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry))
                elif self.path == "/readyz":
                    state = sync.state
                    self._answer(200 if state.ready else 503, "application/json", json.dumps(asdict(state)).encode())
                else:
                    self._answer(404, "text/plain", b"try /metrics or /readyz\n")

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Probes are not worth a line."""

        self._server = ThreadingHTTPServer(("", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
