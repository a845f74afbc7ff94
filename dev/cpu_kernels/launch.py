"""Start SGLang on a CPU: the one place that knows the environment and the flags for it.

Standard library only. As a script it replaces itself by the server:

    .venv/bin/python dev/cpu_kernels/launch.py --model MODEL [--drafter DRAFTER] [--port 30000] [SGLANG FLAGS ...]
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STAND_IN = Path(__file__).parent / "pythonpath"
"""Put this folder on PYTHONPATH of a server, and of nothing else: it shadows a real ``sgl_kernel``."""

SERVER_ARGUMENTS = (
    "--device", "cpu",
    "--dtype", "float32",
    "--mem-fraction-static", "0.3",
    "--max-total-tokens", "20000",
    "--skip-server-warmup",
    "--sleep-on-idle",  # without it the scheduler spins and takes a whole core
    "--enable-metrics",
    "--log-level-http", "warning",
)  # fmt: skip
"""Flags of every server on a CPU. Later flags win, so a caller may append another ``--dtype``."""

SPECULATION_ARGUMENTS = (
    "--speculative-algorithm", "EAGLE3",
    "--speculative-num-steps", "5",
    "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "6",
    "--speculative-draft-attention-backend", "intel_amx",
)  # fmt: skip
"""Flags of a server with a drafter, beside ``--speculative-draft-model-path``: a chain of five drafts."""


class ServerDidNotStartError(RuntimeError):
    """The server ended, or was not healthy in time; the message has the end of its log."""

    def __init__(self, message: str, returncode: int | None) -> None:
        super().__init__(message)
        self.returncode = returncode


@dataclass(frozen=True)
class Server:
    """A running server: its address, its process, and the file that takes its output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def environment(base: Mapping[str, str], *, threads: int = 1) -> dict[str, str]:
    """Environment of a server on a CPU: ``base`` with the stand-in kernels first on PYTHONPATH."""
    path = [str(STAND_IN), *filter(None, [base.get("PYTHONPATH")])]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_USE_CPU_ENGINE": "1",
        # The models that SGLang looks through first; it imports its own 200 (4 s) only for another one.
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_cpu_kernels.models",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        # A few small functions are compiled at their first call otherwise, by g++, anew in every pod.
        "TORCHDYNAMO_DISABLE": "1",
        # glibc would map and unmap every activation of some megabytes anew, and each page of it would fault.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_TOP_PAD_": "67108864",
    }


def arguments(
    model: Path | str,
    drafter: Path | str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    admin_key: str | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """Arguments after ``python -m sglang.launch_server``."""
    speculation = () if drafter is None else ("--speculative-draft-model-path", str(drafter))
    return [
        *("--model-path", str(model), "--host", host, "--port", str(port)),
        *SERVER_ARGUMENTS,
        *(() if drafter is None else SPECULATION_ARGUMENTS),
        *speculation,
        *(() if admin_key is None else (f"--admin-api-key={admin_key}",)),
        *extra,
    ]


@contextmanager
def sglang_server(
    model: Path | str,
    drafter: Path | str | None = None,
    *,
    log: Path,
    base_environment: Mapping[str, str],
    extra_args: Sequence[str] = (),
    admin_key: str | None = None,
    threads: int = 1,
    timeout_s: float = 240,
    python: str = sys.executable,
) -> Iterator[Server]:
    """A healthy server on a free port of this machine; its whole process group is gone afterwards.

    Raises:
        ServerDidNotStartError: it ended, or did not answer ``/health`` within ``timeout_s`` seconds.
    """
    port = _free_port()
    command = [
        *(python, "-m", "sglang.launch_server"),
        *arguments(model, drafter, port=port, admin_key=admin_key, extra=extra_args),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(base_environment, threads=threads),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        _wait_until_healthy(server, timeout_s)
        yield server
    finally:
        _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        returncode = server.process.poll()
        if returncode is not None:
            tail = server.log.read_text(errors="replace")[-4000:]
            raise ServerDidNotStartError(f"SGLang ended with exit code {returncode}:\n{tail}", returncode)
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):  # noqa: S310  always http
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    tail = server.log.read_text(errors="replace")[-4000:]
    raise ServerDidNotStartError(f"SGLang was not healthy within {timeout_s:.0f} s:\n{tail}", None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, then whatever is left of the process group that it leads."""
    # Only the leader gets SIGTERM: if its scheduler ends first, it waits 5 s for diagnostics of a crash.
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Replace this process by the server."""
    parser = argparse.ArgumentParser(description="Start SGLang on a CPU; unknown flags go to SGLang.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--admin-key")
    parser.add_argument("--threads", type=int, default=1)
    known, extra = parser.parse_known_args()
    command = arguments(
        known.model,
        known.drafter,
        host=known.host,
        port=known.port,
        admin_key=known.admin_key,
        extra=extra,
    )
    os.execve(  # noqa: S606  no shell is wanted
        sys.executable,
        [sys.executable, "-m", "sglang.launch_server", *command],
        environment(os.environ, threads=known.threads),  # noqa: TID251  this is the entry point
    )


if __name__ == "__main__":
    main()
