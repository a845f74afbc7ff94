"""`python3 -m osprey_trainer STAGE`: one stage of the trainer image, as the container of its pod.

In a pod the task comes in the variable OSPREY_TASK. To try a stage on one machine, give it as a file, with a folder
as its storage ("uri": "file:///...") and OSPREY_CLAIMS_ROOT as the folder in which `pvc://NAME/...` is looked up:

    python3 -m osprey_trainer STAGE --task FILE [--scratch FOLDER]
"""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from osprey_api.stages import TASK_VARIABLE, InputRole, StageName, StageResult
from osprey_runtime.context import StageContext
from osprey_runtime.ranks import WORKER_ARGUMENT
from osprey_runtime.runner import Stage, main


def _stage(
    name: StageName,
    *,
    distributed: bool = False,
    publishes: bool = True,
    remote: frozenset[InputRole] = frozenset(),
) -> Stage:
    def run(ctx: StageContext) -> StageResult:
        # Imported when it is wanted: DeepSpeed alone takes seconds, and most stages do without.
        module = importlib.import_module(f"osprey_trainer.stages.{name}")
        result: StageResult = module.run(ctx)
        return result

    return Stage(run, distributed=distributed, publishes=publishes, remote=remote)


STAGES = {
    StageName.RESOLVE: _stage(StageName.RESOLVE, publishes=False),
    StageName.PRUNE: _stage(StageName.PRUNE),
    StageName.TOKENIZE: _stage(StageName.TOKENIZE),
    StageName.PRETRAIN: _stage(StageName.PRETRAIN, distributed=True),
    StageName.CAPTURE: _stage(StageName.CAPTURE, distributed=True),
    StageName.ADOPT: _stage(StageName.ADOPT),
    StageName.CONVERT: _stage(StageName.CONVERT),
    StageName.DISTIL: _stage(StageName.DISTIL, distributed=True, remote=frozenset({InputRole.STATES})),
}


def run(argv: Sequence[str]) -> int:
    """Runs what the command line asks for, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m osprey_trainer", description="Run one training stage of Osprey.")
    parser.add_argument("stage", nargs="?", choices=[str(name) for name in STAGES], help="the stage")
    parser.add_argument("--task", help="file with the StageTask, in place of the variable OSPREY_TASK")
    parser.add_argument("--scratch", help="folder for downloads and unfinished work; default: a temporary one")
    parser.add_argument(WORKER_ARGUMENT, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.worker:
        return main(STAGES, worker_module="osprey_trainer", argv=[WORKER_ARGUMENT])
    if asked.stage is None:
        parser.error("name a stage")
    with ExitStack() as cleanup:
        if asked.task is not None:
            scratch = asked.scratch or cleanup.enter_context(tempfile.TemporaryDirectory(prefix="osprey-"))
            # The runner and the processes it starts read the environment, as in a pod.
            task, folder = Path(asked.task).read_text(encoding="utf-8"), str(Path(scratch).resolve())
            os.environ.update({TASK_VARIABLE: task, "OSPREY_SCRATCH": folder})  # noqa: TID251
        return main(STAGES, worker_module="osprey_trainer", argv=[asked.stage])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
