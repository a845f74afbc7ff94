"""A training stage that is killed again and again, at any moment, ends with the bits of one that never was."""

import random
import secrets
import signal
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

import psutil
import pytest

from dev.gate import Broken, Phase, lets_all_pass
from osprey_api.conditions import FailureReason
from osprey_api.stages import Execution, Outcome
from osprey_runtime import manifest
from osprey_runtime.runner import prefix_of
from osprey_runtime.store import open_store

pytestmark = pytest.mark.long

EVERY = 10
"""Steps between two checkpoints."""
EPOCHS = 50
"""300 steps: more than all attempts make together before the first that may come to the end."""
MOST_STEPS = 25
"""That an attempt is let to train."""
DEADLINE_S = 1200
"""Of an attempt, on a machine however busy."""
PODS_OF_A_JOB = 3
"""They have the same attempt, so that one meets what another left half-written."""


class Moment(StrEnum):
    START = "as it starts"
    STEPS = "as it trains"
    CHECKPOINT = "as it saves"
    END = "as it publishes"


MOMENTS = [Moment.START] * 5 + [Moment.STEPS] * 6 + [Moment.CHECKPOINT] * 5
LAST_MOMENTS = [Moment.END] * 4


@pytest.fixture
def distil(behind_gate, greedy_answers):
    """Makes the task of a run of 300 steps."""

    def make(name: str, processes: int):
        machine = behind_gate(name)
        answers = machine.answers(greedy_answers)
        pruned = machine.done(machine.prune()).artifact
        initial = machine.done(machine.convert(answers, backbone=pruned)).artifact
        execution = Execution(checkpoint_every_steps=EVERY, checkpoints_kept=2, processes_per_node=processes)
        return machine, machine.distil(initial, answers, epochs=EPOCHS, execution=execution)

    return make


def kind_of(path: str) -> Moment | None:
    """To which kind of upload a key belongs."""
    if "/checkpoints/" in path:
        return Moment.CHECKPOINT
    return Moment.END if "/distil/" in path else None


@dataclass
class Uploads:
    """Counts the files that a whole run uploads, in their order."""

    paths: list[str] = field(default_factory=list)

    def guard(self, request, phase):
        if request.method == "PUT" and phase is Phase.AFTER and kind_of(request.path):
            self.paths.append(request.path)

    def of_a_checkpoint(self) -> int:
        saved = [path for path in self.paths if kind_of(path) == Moment.CHECKPOINT]
        return len(saved) // sum(path.endswith("/complete.json") for path in saved)

    def at_the_end(self) -> int:
        return sum(kind_of(path) == Moment.END for path in self.paths)


@dataclass
class Killer:
    """Kills a run: some time after its start, at a step, or at the gate with one of the files that it uploads.

    However late it comes, a run that is to be killed does not publish: it is killed as it begins to.
    """

    moment: Moment
    number: signal.Signals
    share_of_start: float
    after_steps: int
    at_file: int
    at_phase: Phase
    process: psutil.Process | None = None
    done: str = ""
    """How it was killed."""
    _files: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def guard(self, request, phase):
        kind = kind_of(request.path) if request.method == "PUT" else None
        if kind is None:
            return
        with self._lock:
            if self.done.startswith("SIGKILL"):
                raise Broken
            if kind == self.moment:
                self._files += phase is Phase.BEFORE
                if (self._files, phase) == (self.at_file, self.at_phase) and not self.done:
                    self.kill(f"file {self._files}, {phase}")
            elif kind == Moment.END:
                self.number = signal.SIGKILL
                self.kill("too late: it publishes")
            if self.number == signal.SIGKILL and self.done:
                raise Broken

    def look(self, run, saved: int, start_s: float) -> None:
        """Kills if it is time to.

        saved: the step that it goes on from. start_s: how long another one took to its first step.
        """
        passed_s = time.monotonic() - run.began
        match self.moment:
            case Moment.START:
                is_due = passed_s > self.share_of_start * start_s or run.is_at(saved + 1)
            case Moment.STEPS:
                is_due = run.is_at(saved + self.after_steps)
            case _:
                is_due = False
        with self._lock:
            if is_due and not self.done and run.process.poll() is None:
                self.kill(f"{passed_s:.1f} s" if self.moment == Moment.START else f"{self.after_steps} steps")

    def kill(self, when: str) -> None:
        """As the kubelet does: SIGTERM to the main process, SIGKILL to all of them."""
        self.done = f"{self.number.name} {self.moment}, {when}"
        if self.number == signal.SIGTERM:
            self.process.send_signal(signal.SIGTERM)
            return
        self.process.suspend()  # it must not start another one just now
        for process in [self.process, *self.process.children(recursive=True)]:
            process.kill()


def plan(chance: random.Random, uploads: Uploads) -> list[Killer]:
    """Twenty kills, half of each signal; the last four as it publishes, and only the very last may let it."""
    moments = chance.sample(MOMENTS, len(MOMENTS))
    # A stage that has begun to publish goes on when it is told to stop, so that another kill would find no stage.
    numbers = [signal.SIGTERM] * 10 + [signal.SIGKILL] * 7
    numbers = chance.sample(numbers, len(numbers))
    numbers[16:16] = [signal.SIGKILL] * 3
    killers = []
    for moment, number in zip([*moments, *LAST_MOMENTS], numbers, strict=True):
        files = {Moment.CHECKPOINT: 2 * uploads.of_a_checkpoint(), Moment.END: uploads.at_the_end()}.get(moment, 1)
        is_last = len(killers) == len(moments) + len(LAST_MOMENTS) - 1
        phases = list(Phase) if moment != Moment.END or is_last else [Phase.BEFORE, Phase.HALF]
        killers.append(
            Killer(
                moment,
                number,
                share_of_start=chance.random(),
                after_steps=chance.randint(1, MOST_STEPS),
                at_file=chance.randint(1, files),
                at_phase=chance.choice(phases),
            )
        )
    return killers


def newest(machine, task) -> int:
    """The step of the newest complete checkpoint."""
    return max((int(name.split("-")[1]) for name in machine.checkpoints(task)), default=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_change_no_bit(distil, gate, running, processes, capsys):
    seed = secrets.randbelow(1 << 32)
    chance = random.Random(seed)

    def tell(line: str) -> None:
        with capsys.disabled():
            print(f"{processes} processes, seed {seed}: {line}", flush=True)  # noqa: T201 - the record

    uploads = Uploads()
    whole, task = distil("whole", processes)
    gate.guard = uploads.guard
    with running(whole, task) as run:
        run.at_step(1)
        start_s = time.monotonic() - run.began
        code, expected, said = run.end()
    assert code == 0, said[-2000:]
    tell(f"uninterrupted in {run.seconds:.0f} s, {start_s:.0f} s of them before the first step")
    assert uploads.at_the_end() > 1

    killed, task = distil("killed", processes)
    for attempt, killer in enumerate(plan(chance, uploads)):
        saved, has_begun = newest(killed, task), False
        gate.guard = killer.guard
        options = {"scratch": f"scratch-{attempt}", "OSPREY_ATTEMPT": f"job-{attempt // PODS_OF_A_JOB}"}
        with running(killed, task, **options) as run:
            killer.process = psutil.Process(run.process.pid)
            while run.process.poll() is None:
                assert time.monotonic() < run.began + DEADLINE_S, (killer, run.said[-2000:])
                killer.look(run, saved, start_s)
                if not has_begun and run.is_at(saved + 1):
                    has_begun, start_s = True, time.monotonic() - run.began
                time.sleep(0.05)
            code, said = run.process.returncode, run.said
        assert killer.done, (code, said[-2000:])
        tell(f"{attempt + 1}. from step {saved}: {killer.done}, exit code {code}")
        if killer.number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        elif code == -signal.SIGTERM:
            assert killer.moment == Moment.START  # before it could listen
        elif code == 0:
            assert killer.moment == Moment.END  # the last one
        else:
            outcome = Outcome.model_validate_json(killed.log.read_text())
            assert (code, outcome.failure) == (143, FailureReason.STOPPED), said[-2000:]
        assert newest(killed, task) >= saved or code == 0

    gate.guard = lets_all_pass
    with running(killed, task, scratch="last") as run:
        code, outcome, said = run.end()
    assert code == 0, said[-2000:]
    # The digest covers the weights and training.json with its losses, bit by bit.
    assert outcome.artifact.digest == expected.artifact.digest
    assert outcome.result == expected.result
    store, prefix = open_store(killed.storage), prefix_of(task)
    found = manifest.find(store, prefix)
    kept = {f"{prefix}/{found.key_of(file)}" for file in found.files}
    assert set(killed.keys(task, "")) == {f"{prefix}/{manifest.NAME}", *kept}
