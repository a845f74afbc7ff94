"""Runs stages on one machine: what was made once is found again in the cache, whoever asks.

Everything lies in a folder of the cache outside the tree: `storage` with the artifacts and checkpoints of the stages,
`judged` with what was measured, `scratch` with logs. So a clean clone finds it, and a killed run is gone on with.
"""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from dev import processes, stages
from dev.cpu_kernels import launch
from dev.files import write_whole
from dev.results.recipe import Recipe
from osprey_api.stages import (
    ArtifactRef,
    DataToResolve,
    Engine,
    Execution,
    InputRole,
    Outcome,
    Pinned,
    PretrainConfig,
    RegenerateConfig,
    ResolveConfig,
    ResolveResult,
    StageConfig,
    StageTask,
    StorageLocation,
    stage_fingerprint,
)
from osprey_runtime import manifest
from osprey_runtime.store import join, open_store

Result = TypeVar("Result")

# The share must hold the weights whatever else is in memory; the tokens bound the rest.
MEMORY = ("--mem-fraction-static", "0.9", "--max-total-tokens", "20000")
ENGINE = Engine(version=version("sglang"), server_args=(*launch.SERVER_ARGUMENTS, *MEMORY))
START_SECONDS = 900
"""A server has so long to start: others may use the machine."""
STOP_SECONDS = 60.0
"""A training stage has so long to save its checkpoint when the run is stopped."""
IN_FLIGHT = 96
"""Requests at a time of regenerate."""


_COPYING = threading.Lock()


class FailedError(RuntimeError):
    """A cell failed; the message names its log."""


class NotMadeError(FailedError):
    """It was not made before, and is not to be made now."""


@dataclass(frozen=True)
class _Earlier:
    """Attempts of a stage before the one that ended well.

    Attributes:
        seconds: of all of them; not a number where one was killed.
        open: an attempt has begun and not ended.
    """

    seconds: float = 0.0
    open: bool = False


@dataclass(frozen=True)
class Lab:
    """A folder in which stages run.

    Attributes:
        root: the folder.
        recipe: sizes.
        finds_only: what was not made before is not made now.
    """

    root: Path
    recipe: Recipe
    finds_only: bool = False
    _stopping: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def storage(self) -> StorageLocation:
        """Where artifacts are."""
        return StorageLocation(uri=f"file://{self.root / 'storage'}")

    @property
    def claims(self) -> Path:
        """Models and prompts."""
        return self.root / "claims"

    @property
    def group(self) -> str:
        """Marks every process of this folder."""
        return str(self.root)

    def environment(self, name: str) -> dict[str, str]:
        """Return what processes are told beside this process's own variables."""
        return {
            "OSPREY_CLAIMS_ROOT": str(self.claims),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            processes.GROUP: self.group,
            processes.NAME: name,
        }

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out, and end what a killed one left behind.

        Raises:
            FailedError: another run works here.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedError(f"another run is at work in {self.root}: wait for it, or stop it") from None
            processes.stop(self.group, STOP_SECONDS)
            try:
                yield
            finally:
                self._stopping.set()
                processes.stop(self.group, STOP_SECONDS)

    def check_running(self) -> None:
        """Let no process begin that nobody would end, or that is not wanted.

        Raises:
            FailedError: the run is being stopped.
            NotMadeError: the run only finds.
        """
        if self.finds_only:
            raise NotMadeError("it was not made yet")
        if self._stopping.is_set():
            raise FailedError("the run is being stopped")

    def task(self, name: str, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef]) -> StageTask:
        """Return a stage's task; `name` is of the cell, and shapes nothing."""
        every = {RegenerateConfig: 64, PretrainConfig: 100}.get(type(config), 30)
        return StageTask(
            fingerprint=stage_fingerprint(config, dict(inputs)),
            namespace="results",
            resource=f"ospreydrafter/{name.rpartition('/')[2]}",
            storage=self.storage,
            config=config,
            inputs=dict(inputs),
            # One process: ZeRO has nothing to split, and Muon needs whole matrices.
            execution=Execution(zero_stage=0, checkpoint_every_steps=every, concurrency=IN_FLIGHT),
        )

    def found(self, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef]) -> Outcome | None:
        """Return what a stage made before."""
        task = self.task("found", config, inputs)
        store, prefix = open_store(task.storage), join(task.prefix.removeprefix(task.storage.uri))
        made = manifest.find(store, prefix)
        if made is None or manifest.damaged(store, prefix, made):
            return None
        return Outcome(
            artifact=ArtifactRef(uri=task.prefix, digest=made.digest),
            result=made.result_of(),
            seconds=made.seconds + self._earlier(task.fingerprint).seconds,
            peak_memory_bytes=made.peak_memory_bytes,
            reused=True,
        )

    def run(
        self, name: str, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef], *, server: str = ""
    ) -> Outcome:
        """Run a stage, or find what it made before.

        Raises:
            FailedError: the stage failed.
        """
        return self.found(config, inputs) or self._run(name, config, inputs, server=server)

    def _run(
        self, name: str, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef], *, server: str = ""
    ) -> Outcome:
        self.check_running()
        scratch = self.scratch(f"{name}/{config.stage}")
        task = self.task(name, config, inputs)
        earlier = self._earlier(task.fingerprint)
        if earlier.open:
            earlier = _Earlier(seconds=float("nan"))  # it was killed, and nobody knows when
        self._note(task.fingerprint, replace(earlier, open=True))
        began = time.monotonic()
        try:
            outcome = stages.run(task, scratch, self.environment(name), server=server)
        except SystemExit as error:
            self._note(task.fingerprint, _Earlier(earlier.seconds + time.monotonic() - began))
            raise FailedError(str(error)) from error
        self._note(task.fingerprint, earlier)
        for each in scratch.iterdir():
            if each.is_dir():  # what was fetched; the log stays
                shutil.rmtree(each)
        return outcome.model_copy(update={"seconds": outcome.seconds + earlier.seconds})

    def _earlier(self, fingerprint: str) -> "_Earlier":
        path = self.kept("attempts", fingerprint)
        return _Earlier(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else _Earlier()

    def _note(self, fingerprint: str, earlier: "_Earlier") -> None:
        write_json(self.kept("attempts", fingerprint), asdict(earlier))

    def scratch(self, name: str) -> Path:
        """Return a folder of a cell's own."""
        folder = self.root / "scratch" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def resolve(self, model: Path, data: Sequence[DataToResolve]) -> ResolveResult:
        """Pin a model and its data to their content: always done anew, since either may have changed."""
        config = ResolveConfig(model=Pinned(uri=f"pvc://models/{model.name}"), data=tuple(data), owner_uid="results")
        return result(self._run(f"resolve/{model.name}", config, {}), ResolveResult)

    @contextmanager
    def files(self, name: str, made: ArtifactRef) -> Iterator[Path]:
        """An artifact's files for a while, digests verified."""
        folder = self.scratch(name) / made.digest.replace(":", "-")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            yield manifest.fetch(self.storage, made, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def copied(self, made: ArtifactRef) -> Path:
        """Return the files of a small artifact that several cells read, digests verified."""
        folder = self.root / "files" / made.digest.replace(":", "-")
        with _COPYING:
            return folder if folder.exists() else manifest.fetch(self.storage, made, folder)

    def whole_environment(self, name: str) -> dict[str, str]:
        """Return this process's variables and those of a cell.

        Raises:
            FailedError: no process may begin.
        """
        self.check_running()
        return os.environ | self.environment(name)  # noqa: TID251 - a command's own

    @contextmanager
    def server(
        self, name: str, target: Path, *, drafter: Path | None = None, chain: int = 5, threads: int = 1
    ) -> Iterator[str]:
        """SGLang with the target, and with a drafter if there is one: its URL."""
        drafts = ("--speculative-num-steps", str(chain), "--speculative-num-draft-tokens", str(chain + 1))
        with launch.sglang_server(
            target,
            drafter,
            log=self.scratch(name) / "server.log",
            base_environment=self.whole_environment(name),
            extra_args=MEMORY if drafter is None else (*MEMORY, *drafts),
            threads=threads,
            timeout_s=START_SECONDS,
        ) as server:
            yield server.url

    def kept(self, kind: str, fingerprint: str) -> Path:
        """Return the file of something measured."""
        return self.root / kind / f"{fingerprint}.json"


def result(outcome: Outcome, kind: type[Result]) -> Result:
    """Return what a stage found.

    Raises:
        FailedError: it is of another kind.
    """
    if not isinstance(outcome.result, kind):
        raise FailedError(f"the stage gave {outcome.result}")
    return outcome.result


def artifact(outcome: Outcome) -> ArtifactRef:
    """Return what a stage made.

    Raises:
        FailedError: it made nothing.
    """
    if outcome.artifact is None:
        raise FailedError(f"the stage made nothing: {outcome.message}")
    return outcome.artifact


def write_json(path: Path, value: object) -> None:
    """Write a file whole or not at all."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
