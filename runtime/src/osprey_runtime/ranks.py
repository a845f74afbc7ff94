"""The processes of a distributed stage within one pod: started, told to stop, and asked which failed first.

They are started here and not by torchrun, which hides the exit codes, kills ranks 30 s after SIGTERM whatever
the grace period, and costs the import of torch in one more process. Rendezvous is `init_process_group`'s own, by
the variables RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import ctypes
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from pydantic import ValidationError

from osprey_api.conditions import FailureReason
from osprey_api.stages import Outcome
from osprey_runtime import settings
from osprey_runtime.context import stopped

log = logging.getLogger("osprey_runtime")

WORKER_ARGUMENT = "--worker"
_POLL_S = 0.1
_FAILURE_GRACE_S = 10.0
"""From the first failure of a rank to SIGKILL of the others: they may hang in a collective that never ends."""
_RESERVE_S = 15.0
"""Of the pod's grace period, kept to write the outcome."""
_PR_SET_PDEATHSIG = 1


def folder(scratch: Path) -> Path:
    """Return the folder where each rank leaves its outcome."""
    return scratch / "ranks"


def leave(outcome: Outcome, scratch: Path, rank: int) -> None:
    """Leave a rank's outcome for the runner; it appears whole or not at all."""
    path = folder(scratch) / f"rank-{rank}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(outcome.model_dump_json())
    unfinished.rename(path)


def die_with_parent() -> None:
    """Let the kernel end this process when the runner is killed, so that no rank goes on without it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(
    module: str,
    *,
    scratch: Path,
    node: int,
    nodes: int,
    per_node: int,
    host: str,
    port: int,
    stop: threading.Event,
    grace_period_s: float,
) -> Outcome:
    """Run `python3 -m MODULE --worker` in `per_node` processes and return their outcome together.

    Args:
        module: runs the stage when called with `--worker`.
        scratch: folder of the stage.
        node: this pod's number.
        nodes: pods of the stage.
        per_node: processes of each pod.
        host: where rank 0 listens; "" for this pod.
        port: and its port; 0 for a free one of this pod.
        stop: set when the pod is told to stop.
        grace_period_s: the pod's.

    Returns:
        Without a failure, the outcome of this pod's first rank; else that of the rank that failed first, unless it
        failed only because another one was gone.
    """
    shutil.rmtree(folder(scratch), ignore_errors=True)
    folder(scratch).mkdir(parents=True)
    env = dict(settings.environment())
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // per_node)))
    env |= {
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": host or "127.0.0.1",
        "MASTER_PORT": str(port or _free_port()),
    }
    running: dict[int, subprocess.Popen[bytes]] = {}
    for local_rank in range(per_node):
        rank = node * per_node + local_rank
        running[rank] = subprocess.Popen(
            [sys.executable, "-m", module, WORKER_ARGUMENT],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)},
            start_new_session=True,
        )
    outcomes: dict[int, Outcome] = {}  # in the order in which the ranks ended
    deadline = float("inf")
    stopping = failing = False
    while running:
        for rank, process in list(running.items()):
            if process.poll() is not None:
                del running[rank]
                outcomes[rank] = _outcome(rank, process.returncode, scratch)
        ends = {outcome.failure for outcome in outcomes.values()} - {None}
        # A rank that stops learned of it from another pod's, where this pod was not told: the rest of its ranks stop
        # too, and may be saving a checkpoint.
        if (stop.is_set() or FailureReason.STOPPED in ends) and not stopping:
            stopping = True
            deadline = min(deadline, time.monotonic() + max(grace_period_s - _RESERVE_S, grace_period_s / 2))
            _signal(running, signal.SIGTERM)
        if ends - {FailureReason.STOPPED} and not failing:
            failing = True
            deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_S)
            _signal(running, signal.SIGTERM)
        if time.monotonic() > deadline:
            log.warning("ranks %s did not end in time: killed", sorted(running))
            _signal(running, signal.SIGKILL)
            for rank, process in running.items():
                process.wait()
                outcomes[rank] = _stopped()
            break
        time.sleep(_POLL_S)
    return _together(outcomes, node * per_node)


def _together(outcomes: dict[int, Outcome], first_rank: int) -> Outcome:
    peak = sum(outcome.peak_memory_bytes for outcome in outcomes.values())
    consequences = (None, FailureReason.STOPPED, FailureReason.PEER_LOST)
    failures = [outcome for outcome in outcomes.values() if outcome.failure is not None]
    causes = [outcome for outcome in failures if outcome.failure not in consequences]
    lost = [outcome for outcome in failures if outcome.failure is FailureReason.PEER_LOST]
    chosen = next(iter([*causes, *lost, *failures]), outcomes[first_rank])
    message = chosen.message
    if chosen.failure not in {None, FailureReason.STOPPED} and not message.startswith("rank "):
        rank = next(rank for rank, outcome in outcomes.items() if outcome is chosen)
        message = f"rank {rank}: {message}"
    return chosen.model_copy(update={"peak_memory_bytes": peak, "message": message})


def _outcome(rank: int, code: int, scratch: Path) -> Outcome:
    """Return what a rank that ended left, or what its exit code says."""
    path = folder(scratch) / f"rank-{rank}.json"
    try:
        return Outcome.model_validate_json(path.read_text())
    except (FileNotFoundError, ValidationError):
        pass
    if code == -signal.SIGTERM:  # before the rank could listen to it
        return _stopped()
    if code == -signal.SIGABRT:
        return Outcome(
            failure=FailureReason.PEER_LOST,
            message=f"rank {rank} aborted, as NCCL does when another process is gone; see the pod's log",
        )
    if code == -signal.SIGKILL:
        return Outcome(
            failure=FailureReason.OUT_OF_MEMORY,
            message=f"rank {rank} was killed, as the kernel does when memory runs out: lower sequenceLength, raise "
            "job.zeroStage (with optimizer AdamW), or give the pod more memory",
        )
    if code == -signal.SIGBUS:
        return Outcome(
            failure=FailureReason.OUT_OF_DISK,
            message=f"rank {rank} died of SIGBUS, as when a file that is mapped into memory finds no space left on the "
            "disk: mount a larger volume at /osprey/scratch by spec.job.template; on GPUs also at /dev/shm",
        )
    return Outcome(
        failure=FailureReason.INTERNAL_ERROR,
        message=f"rank {rank} ended with {code} and without a word; see the pod's log",
    )


def _stopped() -> Outcome:
    error = stopped()
    return Outcome(failure=error.reason, message=error.message)


def _signal(running: dict[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in running.values():
        process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
