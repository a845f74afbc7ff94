"""Run one stage as its pod does, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from osprey_api.stages import SERVER_URL_VARIABLE, TASK_VARIABLE, Outcome, StageName, StageTask

CLIENTS = (StageName.REGENERATE, StageName.BASELINE, StageName.EVALUATE)
"""The stages of the serving image."""


def run(task: StageTask, scratch: Path, environment: Mapping[str, str], *, server: str = "") -> Outcome:
    """Run a stage to its end.

    Args:
        task: of the stage.
        scratch: a folder of its own; its log is left there.
        environment: beside this process's own: keys of the storage, threads, claims.
        server: URL of the server that a client asks.

    Raises:
        SystemExit: it failed; the message is the stage's.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    answer = scratch / "outcome.json"
    answer.unlink(missing_ok=True)
    own = {
        TASK_VARIABLE: task.model_dump_json(),
        SERVER_URL_VARIABLE: server,
        "OSPREY_SCRATCH": str(scratch),
        "OSPREY_TERMINATION_LOG": str(answer),
        "OSPREY_METRICS_PORT": "0",
    }
    module = "osprey_serving" if task.stage in CLIENTS else "osprey_trainer"
    with (scratch / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", module, task.stage],
            env=os.environ | environment | own,  # noqa: TID251 - a command's own
            stdout=log,
            stderr=log,
            check=False,
        )
    outcome = Outcome.model_validate_json(answer.read_text()) if answer.exists() else None
    if done.returncode or outcome is None:
        raise SystemExit(f"{task.stage} failed ({done.returncode}), see {log.name}: {outcome and outcome.message}")
    return outcome
