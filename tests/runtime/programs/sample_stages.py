"""An image's `python3 -m`, with stages that do what the test asks for by `SAMPLE` in the environment."""

import os
import signal
import sys
import time
from pathlib import Path

from osprey_api.conditions import FailureReason
from osprey_api.stages import InputRole, PruneResult, StageName
from osprey_runtime.context import StageContext, stopped
from osprey_runtime.errors import StageError
from osprey_runtime.runner import Stage, main

SAMPLE = os.environ["SAMPLE"]  # noqa: TID251 - how the test tells its pod what to do


def run(ctx: StageContext) -> PruneResult:
    what, _, argument = SAMPLE.partition(":")
    print(f"rank {ctx.rank} of {ctx.world_size} runs {what}", flush=True)  # noqa: T201 - the test waits for this line
    match what:
        case "write":
            (ctx.output / "weights").write_text(argument)
        case "save-and-write":
            save(ctx, step=1)
            (ctx.output / "weights").write_text(argument)
        case "copy":
            (ctx.output / "weights").write_bytes((ctx.input(InputRole.BACKBONE) / "weights").read_bytes() + b"+")
        case "nothing":
            pass
        case "fail":
            raise StageError(FailureReason[argument], "as asked: do otherwise")
        case "bug":
            raise KeyError("nobody\nexpects this")
        case "memory":
            bytearray(1 << 60)
        case "disk":
            with Path("/dev/full").open("w") as full:
                full.write("x")
        case "wait":
            train(ctx, steps=10_000)
        case "ignore":
            ctx.stop.wait()
        case "ranks":
            return distributed(ctx, argument)
    return PruneResult(parameters=len(argument))


def train(ctx: StageContext, steps: int) -> None:
    """Count to `steps` from where the last attempt stopped."""
    found = ctx.checkpoints.latest()
    first = found.step if found else 0
    ctx.progress.begin(steps, done=first)
    for step in range(first + 1, steps + 1):
        time.sleep(0.01)
        ctx.progress.update(step)
        if ctx.stop.is_set():
            save(ctx, step)
            raise stopped()


def save(ctx: StageContext, step: int) -> None:
    state = ctx.scratch / "state"
    state.mkdir()
    (state / "step").write_text(str(step))
    ctx.checkpoints.save(state, step)


def distributed(ctx: StageContext, argument: str) -> PruneResult:
    """Do as told in `argument`, HOW or HOW@RANK; with "gloo-" in front, amid collectives of torch."""
    how, _, rank = argument.removeprefix("gloo-").partition("@")
    total = None
    if argument.startswith("gloo-"):
        import torch  # noqa: PLC0415 - takes seconds, and most tests of ranks do without
        import torch.distributed as dist  # noqa: PLC0415 - as torch

        dist.init_process_group("gloo")
        total = torch.tensor([ctx.rank + 1])
        dist.all_reduce(total)
    if rank == str(ctx.rank):
        while how == "stop" and not (ctx.scratch / "waiting-0").exists():
            time.sleep(0.01)  # until the other one can hear
        fail(how)
    (ctx.scratch / f"waiting-{ctx.rank}").touch()
    if how == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (ctx.scratch / f"deaf-{ctx.rank}").touch()
        time.sleep(600)
    if total is not None:
        dist.all_reduce(total)  # where the others learn that one is gone
        dist.destroy_process_group()
    elif how != "done":
        ctx.stop.wait()
        if how == "stop":
            time.sleep(1)  # as for an upload
            (ctx.scratch / "saved").touch()
        raise stopped()
    (ctx.output / f"rank-{ctx.rank}").write_text(str(ctx.local_rank))
    return PruneResult(parameters=int(total) if total is not None else ctx.world_size)


def fail(how: str) -> None:
    match how:
        case "fail":
            raise StageError(FailureReason.DIVERGED, "the loss is no number: lower learningRate")
        case "bug":
            raise ValueError("no such thing")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            raise stopped()
        case "exit":
            os._exit(3)
        case "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        case "abort":
            os.abort()
        case "terminate":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


STAGES = {
    StageName.PRUNE: Stage(run, distributed=SAMPLE.startswith("ranks"), publishes=True),
    StageName.RESOLVE: Stage(run, publishes=False),
}

if __name__ == "__main__":
    sys.exit(main(STAGES, worker_module="sample_stages", argv=sys.argv[1:]))
