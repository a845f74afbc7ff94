"""How far a stage is: as Prometheus metrics of its pod, as a bar on a terminal, as lines in a log."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self, TextIO

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from tqdm import tqdm

from osprey_api import progress as names
from osprey_api.naming import METRICS_PORT

log = logging.getLogger("osprey_runtime")

_LINE_EVERY_S = 15.0
_HELP = {
    names.STEP: "Optimizer steps, prompts or documents done.",
    names.TOTAL_STEPS: "Optimizer steps, or prompts, in all.",
    names.LOSS: "Last loss, in nats per token.",
    names.TOKENS_PER_SECOND: "Tokens per second.",
    names.ETA_SECONDS: "Seconds left, as estimated.",
    names.SIMULATED_ACCEPTANCE_LENGTH: "Acceptance length as the trainer simulates it.",
}


class Progress:
    """Steps done out of a total: `begin` once the total is known, then `update` as often as you like.

    Without `begin` the total is unknown: neither it nor the time left is told.

    Args:
        label: the stage's name, for the bar and the log.
        port: where the metrics are served, 0 for any free port, None for nowhere. A port that is taken is a
            warning: progress is not worth a training run.
        out: where the bar or the lines go; standard error if not given.

    Attributes:
        port: where the metrics are served; None: nowhere.
    """

    def __init__(self, label: str = "", *, port: int | None = METRICS_PORT, out: TextIO | None = None) -> None:
        self._label = label
        self._out = out or sys.stderr
        self._total: int | None = None
        self._first = 0
        self._step = 0
        self._began = time.monotonic()
        self._next_line = -math.inf
        self._bar: tqdm | None = None
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self.port = None
        if port is not None:
            try:
                self._server, self._thread = start_http_server(port, registry=self._registry)
            except OSError as error:
                log.warning("progress is not served: port %d: %s", port, error.strerror)
            else:
                self.port = self._server.server_port

    def begin(self, total: int, done: int = 0) -> None:
        """Start to count.

        Args:
            total: steps, or prompts, in all.
            done: those of them that an earlier attempt did; they count for the ratio and not for the rate.
        """
        self._total, self._first, self._step = total, done, done
        self._began = time.monotonic()
        self._set(names.TOTAL_STEPS, total)
        self._set(names.STEP, done)
        if self._out.isatty():
            self._bar = tqdm(total=total, initial=done, desc=self._label, file=self._out, dynamic_ncols=True)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        simulated_acceptance_length: float | None = None,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Tell that `step` steps, or prompts, are done. A figure that is not given keeps its last value.

        Args:
            step: done in all, those of earlier attempts included.
            loss: nats per token.
            tokens_per_second: of all processes together.
            simulated_acceptance_length: tokens per verify step, counted as SGLang counts.
            more: further figures by name, which are shown and not served.
        """
        self._step = step
        self._set(names.STEP, step)
        figures = {
            names.LOSS: loss,
            names.TOKENS_PER_SECOND: tokens_per_second,
            names.SIMULATED_ACCEPTANCE_LENGTH: simulated_acceptance_length,
        }
        for name, value in figures.items():
            if value is not None:
                self._set(name, value)
        eta_s = self._eta_s()
        if eta_s is not None:
            self._set(names.ETA_SECONDS, eta_s)
        shown = {
            "loss": loss,
            "tokens/s": tokens_per_second,
            "simulated acceptance length": simulated_acceptance_length,
            **more,
        }
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now >= self._next_line or step == self._total:
            self._next_line = now + _LINE_EVERY_S
            left = "" if eta_s is None else f", {eta_s:.0f} s left"
            total = "" if self._total is None else f"/{self._total}"
            print(f"{self._label} {step}{total}{left}{text and ', '}{text}", file=self._out, flush=True)

    def close(self) -> None:
        """Stop serving and leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self.port = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eta_s(self) -> float | None:
        done = self._step - self._first
        if done <= 0 or self._total is None:
            return None
        return (time.monotonic() - self._began) / done * max(0, self._total - self._step)

    def _set(self, name: str, value: float) -> None:
        # Made on first use: a gauge that nobody has set would say 0.
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, _HELP[name], registry=self._registry)
        self._gauges[name].set(value)
