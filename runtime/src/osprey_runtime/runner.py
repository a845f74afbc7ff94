"""The main process of a stage's container.

It returns at once where the artifact is there, fetches the inputs, runs the stage (in this process, or in one
for each GPU), publishes what it made, and tells the outcome in the termination message and the exit code.
"""

import importlib.metadata
import logging
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from osprey_api.conditions import EXIT_CODE_OF, ExitCode, FailureReason
from osprey_api.stages import ArtifactRef, InputRole, Outcome, StageName, StageResult, StageTask
from osprey_runtime import manifest as manifests
from osprey_runtime import ranks, result
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.context import StageContext, stopped
from osprey_runtime.errors import StageError
from osprey_runtime.failures import failure_of
from osprey_runtime.manifest import File, Manifest
from osprey_runtime.parts import Parts
from osprey_runtime.patience import patiently
from osprey_runtime.progress import Progress
from osprey_runtime.settings import Settings
from osprey_runtime.store import Store, join, open_store

__all__ = ["Stage", "StageContext", "main"]

T = TypeVar("T")
log = logging.getLogger("osprey_runtime")

_DISTRIBUTIONS = (
    "osprey-api",
    "osprey-runtime",
    "osprey-trainer",
    "osprey-serving",
    "torch",
    "deepspeed",
    "transformers",
)


@dataclass(frozen=True)
class Stage:
    """How a stage is run.

    Attributes:
        run: does it. It raises `StageError` for what can be expected, and `stopped()` when `context.stop` is set;
            whatever it returns then is not published.
        distributed: it runs in `execution.nodes` x `execution.processes_per_node` processes; else in one.
        publishes: it makes an artifact; else its result is all there is.
        remote: inputs that it reads where they lie, since they may be larger than the pod's disk.
    """

    run: Callable[[StageContext], StageResult]
    distributed: bool = False
    publishes: bool = True
    remote: frozenset[InputRole] = frozenset()


def main(stages: Mapping[StageName, Stage], *, worker_module: str, argv: Sequence[str]) -> int:
    """Run the stage named by `argv`, tell its outcome, and return the exit code.

    Args:
        stages: those of the image.
        worker_module: module whose `python3 -m` calls this function: a distributed stage's processes run it with
            the argument `--worker`.
        argv: without the program: the stage's name.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = Settings.read()
    with _stop_on_signal() as stop:
        if list(argv) == [ranks.WORKER_ARGUMENT]:
            ranks.die_with_parent()
            outcome = _work(stages, settings, stop)
            ranks.leave(outcome, settings.scratch, settings.rank)
        else:
            outcome = _run(stages, argv, worker_module, settings, stop)
            result.write(outcome, settings.termination_log)
    return ExitCode.DONE if outcome.failure is None else EXIT_CODE_OF[outcome.failure]


def _run(
    stages: Mapping[StageName, Stage],
    argv: Sequence[str],
    worker_module: str,
    settings: Settings,
    stop: threading.Event,
) -> Outcome:
    """Do all that the pod is there for."""
    began = time.monotonic()
    try:
        task, stage = _asked(stages, settings, argv)
        store, prefix = open_store(task.storage), prefix_of(task)

        def wait_for(action: Callable[[], T]) -> T:
            return patiently(action, patience_s=settings.storage_patience_s, stop=stop)

        if stage.publishes:
            finished = wait_for(lambda: _finished(store, prefix, settings))
            if finished is not None:
                if settings.node == 0:
                    _sweep(store, prefix, finished)  # an attempt may have been killed just before it did
                return _reused(finished, task)
        for role, artifact in task.inputs.items():
            if role in stage.remote:
                continue
            wait_for(partial(manifests.fetch, task.storage, artifact, settings.scratch / "inputs" / role))
        _empty(settings.scratch / "output")
        if stop.is_set():
            return _failed(stopped(), began, settings)
        made = _made(stage, task, worker_module, settings, stop)
        seconds = time.monotonic() - began
        if made.failure is not None or made.result is None:
            return made.model_copy(update={"seconds": seconds})
        if not stage.publishes or settings.node != 0:
            return made.model_copy(update={"seconds": seconds})
        published = wait_for(
            partial(
                manifests.publish,
                store,
                prefix,
                settings.attempt,
                settings.scratch / "output",
                task=task,
                result=made.result,
                seconds=seconds,
                peak_memory_bytes=made.peak_memory_bytes,
                versions=_versions(),
                commit=settings.commit or None,
                parts=wait_for(Parts(store, prefix).found).values(),
            )
        )
        _sweep(store, prefix, published)
        return made.model_copy(
            update={
                "artifact": ArtifactRef(uri=task.prefix, digest=published.digest),
                "result": published.result_of(),
                "seconds": seconds,
            }
        )
    except Exception as error:  # noqa: BLE001 - every failure becomes an outcome
        return _failed(error, began, settings)


def _made(stage: Stage, task: StageTask, worker_module: str, settings: Settings, stop: threading.Event) -> Outcome:
    """Run the stage itself."""
    execution = task.execution
    if stage.distributed and execution.nodes * execution.processes_per_node > 1:
        return ranks.run(
            worker_module,
            scratch=settings.scratch,
            node=settings.node,
            nodes=execution.nodes,
            per_node=execution.processes_per_node,
            host=settings.rendezvous,
            port=settings.rendezvous_port,
            stop=stop,
            grace_period_s=settings.grace_period_s,
        )
    return _called(stage, task, settings, stop, world_size=1)


def _work(stages: Mapping[StageName, Stage], settings: Settings, stop: threading.Event) -> Outcome:
    """Be one process of a distributed stage."""
    began = time.monotonic()
    try:
        task, stage = _asked(stages, settings, None)
        world_size = task.execution.nodes * task.execution.processes_per_node
        return _called(stage, task, settings, stop, world_size=world_size)
    except Exception as error:  # noqa: BLE001 - every failure becomes an outcome
        return _failed(error, began, settings)


def _called(stage: Stage, task: StageTask, settings: Settings, stop: threading.Event, *, world_size: int) -> Outcome:
    began = time.monotonic()
    checkpoints = Checkpoints(
        open_store(task.storage),
        prefix_of(task),
        settings.attempt,
        task.execution.checkpoints_kept,
        part=settings.node,
        parts=task.execution.nodes if stage.distributed else 1,
    )
    with Progress(task.stage, port=settings.metrics_port if settings.rank == 0 else None) as progress:
        context = StageContext(
            task=task,
            attempt=settings.attempt,
            output=settings.scratch / "output",
            scratch=settings.scratch,
            progress=progress,
            checkpoints=checkpoints,
            parts=Parts(open_store(task.storage), prefix_of(task)),
            stop=stop,
            patience_s=settings.storage_patience_s,
            rank=settings.rank,
            local_rank=settings.local_rank,
            world_size=world_size,
        )
        try:
            answer = stage.run(context)
        except Exception as error:
            _wait(checkpoints, needed=isinstance(error, StageError) and error.reason is FailureReason.STOPPED)
            raise
    _wait(checkpoints, needed=stop.is_set())
    if stop.is_set():
        raise stopped()
    return Outcome(result=answer, seconds=time.monotonic() - began, peak_memory_bytes=peak_memory_bytes())


def _wait(checkpoints: Checkpoints, *, needed: bool) -> None:
    """Let the last upload end. That it failed is in the log, and counts where the next attempt was to go on from it."""
    with nullcontext() if needed else suppress(Exception):
        checkpoints.wait()


def _asked(
    stages: Mapping[StageName, Stage], settings: Settings, argv: Sequence[str] | None
) -> tuple[StageTask, Stage]:
    """Return the task and its stage.

    Raises:
        StageError: INVALID_CONFIG, the task is none, or of another stage than the one asked for.
    """
    try:
        task = StageTask.model_validate_json(settings.task)
    except ValidationError as error:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"OSPREY_TASK is no task of this version ({error.errors()[0]['msg']}): use the operator's own images",
        ) from error
    if argv is not None and list(argv) != [task.stage]:
        raise StageError(FailureReason.INVALID_CONFIG, f"OSPREY_TASK is of {task.stage}: call with that argument alone")
    if task.stage not in stages:
        names = ", ".join(sorted(stages))
        raise StageError(FailureReason.INVALID_CONFIG, f"this image has no stage {task.stage}, only {names}")
    return task, stages[task.stage]


def prefix_of(task: StageTask) -> str:
    """Return the key of the artifact's folder within the task's storage."""
    return join(task.prefix.removeprefix(task.storage.uri.rstrip("/")))


def _finished(store: Store, prefix: str, settings: Settings) -> Manifest | None:
    """Return the manifest of an artifact that is there already; a damaged one is set aside."""
    kept: list[File] = []
    try:
        found = manifests.find(store, prefix)
        if found is None:
            return None
        found.result_of()
        wrong = manifests.damaged(store, prefix, found)
        if not wrong:
            return found
        damage = (
            f"{len(wrong)} of {len(found.files)} files, such as {wrong[0].path}, are missing or have another content"
        )
        kept = [file for file in found.files if file.part and file not in wrong]
    except StageError as error:
        if error.reason is not FailureReason.CORRUPT_ARTIFACT:
            raise
        damage = error.message
    log.warning("the artifact at %s/%s is made anew: %s", store.uri, prefix, damage)
    if settings.node == 0:
        manifests.set_aside(store, prefix, settings.attempt, kept=kept)
    return None


def _sweep(store: Store, prefix: str, finished: Manifest) -> None:
    """Delete what is left over. The artifact is complete, so nothing that goes wrong here is a failure."""
    try:
        manifests.sweep(store, prefix, finished)
    except (StageError, OSError) as error:
        log.warning("left-over files of %s/%s were not deleted: %s", store.uri, prefix, error)


def _reused(finished: Manifest, task: StageTask) -> Outcome:
    return Outcome(
        artifact=ArtifactRef(uri=task.prefix, digest=finished.digest),
        result=finished.result_of(),
        seconds=finished.seconds,
        peak_memory_bytes=finished.peak_memory_bytes,
        reused=True,
    )


def _failed(error: Exception, began: float, settings: Settings) -> Outcome:
    failure = failure_of(error, settings.scratch)
    log.error("%s: %s", failure.reason, failure.message)
    return Outcome(
        failure=failure.reason,
        message=failure.message,
        seconds=time.monotonic() - began,
        peak_memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int:
    """Return the largest resident size that this process ever had.

    The kernel's own count of this process (VmHWM); a distributed stage adds up its ranks. Not the cgroup's peak,
    which counts the cache of every file that was read.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of the other image
    return versions


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def handle(number: int, _: object) -> None:
        log.warning("%s: stopping", signal.Signals(number).name)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
