"""Every environment variable that the runtime reads, in one place."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osprey_api.naming import (
    CLAIM_MOUNT_ROOT,
    METRICS_PORT,
    MODEL_CACHE_PATH,
    RENDEZVOUS_PORT,
    RENDEZVOUS_VARIABLE,
    SCRATCH_PATH,
)
from osprey_api.stages import ATTEMPT_VARIABLE, GRACE_PERIOD_VARIABLE, TASK_VARIABLE

TERMINATION_LOG = Path("/dev/termination-log")
"""Kubernetes puts a file there for every container; elsewhere there is none."""


def environment() -> Mapping[str, str]:
    """Return the process's environment, as it is now."""
    return os.environ  # noqa: TID251 - this is the settings module


def claims_root() -> Path:
    """Return the folder under which claims are mounted: `OSPREY_CLAIMS_ROOT`, or the one of our pods."""
    return Path(environment().get("OSPREY_CLAIMS_ROOT", CLAIM_MOUNT_ROOT))


def model_cache() -> Path | None:
    """Return the folder that keeps models longer than a pod, `OSPREY_MODEL_CACHE` or the one of our pods, if any."""
    folder = Path(environment().get("OSPREY_MODEL_CACHE", MODEL_CACHE_PATH))
    return folder if folder.is_dir() else None


@dataclass(frozen=True)
class Settings:
    """What a stage's process is told by its environment.

    Attributes:
        task: `OSPREY_TASK`, JSON; empty where it is missing.
        attempt: `OSPREY_ATTEMPT`, UID of the Job.
        scratch: `OSPREY_SCRATCH`, the folder for downloads and for what the stage makes.
        termination_log: `OSPREY_TERMINATION_LOG`, where the outcome goes.
        metrics_port: `OSPREY_METRICS_PORT`.
        grace_period_s: `OSPREY_GRACE_PERIOD_SECONDS`, from SIGTERM to SIGKILL.
        storage_patience_s: `OSPREY_STORAGE_PATIENCE_SECONDS`, how long a storage that is away is waited for.
        node: `JOB_COMPLETION_INDEX`, this pod's number among those of an Indexed Job.
        rendezvous: `OSPREY_RENDEZVOUS`, host of pod 0, where rank 0 listens.
        rendezvous_port: `OSPREY_RENDEZVOUS_PORT`; 0 lets a Job of one pod find a free one.
        rank: `RANK`, this process among those of a distributed stage.
        local_rank: `LOCAL_RANK`, the same within the pod.
        commit: `OSPREY_COMMIT`, git commit of the image; empty where unknown.
    """

    task: str
    attempt: str
    scratch: Path
    termination_log: Path
    metrics_port: int
    grace_period_s: float
    storage_patience_s: float
    node: int
    rendezvous: str
    rendezvous_port: int
    rank: int
    local_rank: int
    commit: str

    @classmethod
    def read(cls) -> "Settings":
        """Read the environment.

        Raises:
            ValueError: a number is none.
        """
        env = environment()
        rendezvous = env.get(RENDEZVOUS_VARIABLE, "")
        return cls(
            task=env.get(TASK_VARIABLE, ""),
            attempt=env.get(ATTEMPT_VARIABLE, "").strip() or "local",
            scratch=Path(env.get("OSPREY_SCRATCH", SCRATCH_PATH)),
            termination_log=Path(env.get("OSPREY_TERMINATION_LOG", TERMINATION_LOG)),
            metrics_port=int(env.get("OSPREY_METRICS_PORT", METRICS_PORT)),
            grace_period_s=float(env.get(GRACE_PERIOD_VARIABLE, "300")),
            storage_patience_s=float(env.get("OSPREY_STORAGE_PATIENCE_SECONDS", "300")),
            node=int(env.get("JOB_COMPLETION_INDEX", "0")),
            rendezvous=rendezvous,
            rendezvous_port=int(env.get("OSPREY_RENDEZVOUS_PORT", RENDEZVOUS_PORT if rendezvous else 0)),
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            commit=env.get("OSPREY_COMMIT", ""),
        )
