"""The runner as Kubernetes sees it: a process with an environment, an exit code and a termination message."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dev.network import free_ports
from osprey_api.conditions import ExitCode, FailureReason
from osprey_api.stages import Execution, InputRole, Outcome, Pinned, PruneResult, ResolveConfig, StageTask
from osprey_runtime import manifest, ranks
from osprey_runtime.runner import prefix_of
from osprey_runtime.store import open_store

PROGRAMS = Path(__file__).parent / "programs"


@dataclass
class Pod:
    """A stage's container on this machine."""

    folder: Path
    process: subprocess.Popen[str]

    def end(self, timeout_s: float = 200) -> tuple[int, Outcome]:
        """Wait for it, and return its exit code and what it said."""
        self.process.communicate(timeout=timeout_s)
        return self.process.returncode, Outcome.model_validate_json((self.folder / "termination-log").read_bytes())


@pytest.fixture
def start(tmp_path):
    """Start a pod: `start(task, "write:content", attempt="one")`."""
    started: list[subprocess.Popen[str]] = []

    def start(task: StageTask | str, sample: str, attempt: str = "one", stage: str = "prune", **env: str) -> Pod:
        folder = tmp_path / f"pod-{len(started)}"
        folder.mkdir()
        variables = {
            "OSPREY_TASK": task if isinstance(task, str) else task.model_dump_json(),
            "OSPREY_ATTEMPT": attempt,
            "OSPREY_SCRATCH": str(folder / "scratch"),
            "OSPREY_TERMINATION_LOG": str(folder / "termination-log"),
            "OSPREY_METRICS_PORT": "0",
            "PYTHONPATH": str(PROGRAMS),
            "OSPREY_STORAGE_PATIENCE_SECONDS": "0",
            "OMP_NUM_THREADS": "1",
            "SAMPLE": sample,
        }
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sample_stages", stage],
                env={**os.environ, **variables, **env},  # noqa: TID251 - a child inherits the environment
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(process)
        return Pod(folder, process)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(condition, timeout_s: float = 200) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def log_of(pod: Pod) -> str:
    return (pod.folder / "log").read_text()


def test_stage_publishes_what_it_made(start, make_task, location, tmp_path):
    code, outcome = start(make_task(), "write:content").end()
    assert (code, outcome.failure, outcome.reused) == (ExitCode.DONE, None, False)
    assert outcome.result == PruneResult(parameters=7)
    assert outcome.artifact is not None
    assert outcome.artifact.uri == make_task().prefix
    assert outcome.seconds > 0
    assert 10 << 20 < outcome.peak_memory_bytes < 1 << 30
    folder = manifest.fetch(location, outcome.artifact, tmp_path / "back")
    assert (folder / "weights").read_text() == "content"
    found = manifest.find(open_store(location), prefix_of(make_task()))
    assert found is not None
    assert found.attempt == "one"
    assert {"python", "osprey-api", "osprey-runtime"} <= set(found.versions)


def test_finished_stage_is_not_run_again(start, make_task):
    _, first = start(make_task(), "write:content").end()
    pod = start(make_task(), "bug", attempt="two")
    code, again = pod.end()
    assert code == ExitCode.DONE
    assert again == first.model_copy(update={"reused": True, "seconds": again.seconds})
    assert "runs" not in log_of(pod)


def test_input_is_fetched_and_verified(start, make_task, location):
    _, first = start(make_task("a" * 64), "write:content").end()
    task = make_task("b" * 64, inputs={InputRole.BACKBONE: first.artifact})
    assert start(task, "copy").end()[0] == ExitCode.DONE
    store, prefix = open_store(location), prefix_of(task)
    made = manifest.find(store, prefix)
    assert made is not None
    assert store.read(f"{prefix}/{made.folder}/weights") == b"content+"

    source = prefix_of(make_task("a" * 64))
    damaged = manifest.find(store, source)
    assert damaged is not None
    store.write(f"{source}/{damaged.folder}/weights", b"contend")
    code, outcome = start(make_task("c" * 64, inputs={InputRole.BACKBONE: first.artifact}), "copy").end()
    assert (code, outcome.failure) == (ExitCode.TRY_AGAIN, FailureReason.CORRUPT_ARTIFACT)

    # The operator runs the stage that made it again, and that sees what the reader saw.
    code, outcome = start(make_task("a" * 64), "write:content", attempt="two").end()
    assert (code, outcome.reused, outcome.artifact) == (ExitCode.DONE, False, first.artifact)
    assert start(make_task("c" * 64, inputs={InputRole.BACKBONE: first.artifact}), "copy").end()[0] == ExitCode.DONE
    assert start(make_task("a" * 64), "bug", attempt="three").end()[1].reused


@pytest.mark.parametrize("damage", ["missing file", "cut file", "broken manifest"])
def test_damaged_artifact_is_set_aside_and_made_anew(start, make_task, location, damage):
    start(make_task(), "write:content").end()
    store, prefix = open_store(location), prefix_of(make_task())
    made = manifest.find(store, prefix)
    assert made is not None
    match damage:
        case "missing file":
            store.delete([f"{prefix}/{made.folder}/weights"])
        case "cut file":
            store.write(f"{prefix}/{made.folder}/weights", b"conten")
        case "broken manifest":
            store.write(f"{prefix}/manifest.json", b"{}")
    code, outcome = start(make_task(), "write:content", attempt="two").end()
    assert (code, outcome.reused) == (ExitCode.DONE, False)
    assert store.exists(f"{prefix}/manifest.corrupt-two.json")
    found = manifest.find(store, prefix)
    assert found is not None
    assert found.attempt == "two"
    assert not manifest.damaged(store, prefix, found)


@pytest.mark.parametrize(
    ("result", "code", "reason"),
    [
        ({"stage": "prune", "parameters": 7, "more": 1}, ExitCode.DONE, None),
        ({"stage": "prune"}, ExitCode.WRONG_INPUT, FailureReason.INVALID_CONFIG),
    ],
)
def test_artifact_of_another_version_is_kept(start, make_task, location, result, code, reason):  # noqa: PLR0917 - cases
    start(make_task(), "write:content").end()
    store, key = open_store(location), f"{prefix_of(make_task())}/manifest.json"
    changed = json.dumps(json.loads(store.read(key)) | {"result": result}).encode()
    store.write(key, changed)
    ended, outcome = start(make_task(), "write:content", attempt="two").end()
    assert (ended, outcome.failure, outcome.reused) == (code, reason, reason is None)
    assert outcome.result == (None if reason else PruneResult(parameters=7))
    assert store.read(key) == changed


def test_stage_without_an_artifact_has_only_its_answer(start, make_task, location):
    task = make_task().model_copy(
        update={"config": ResolveConfig(model=Pinned(uri="pvc://models/small"), owner_uid="uid")}
    )
    code, outcome = start(task, "write:content", stage="resolve").end()
    assert (code, outcome.artifact, outcome.result) == (ExitCode.DONE, None, PruneResult(parameters=7))
    assert list(open_store(location).list("")) == []


def test_nothing_made_is_a_bug(start, make_task):
    code, outcome = start(make_task(), "nothing").end()
    assert (code, outcome.failure) == (ExitCode.BUG, FailureReason.INTERNAL_ERROR)
    assert "made no file" in outcome.message


@pytest.mark.parametrize(
    ("sample", "code", "reason", "words"),
    [
        ("fail:INVALID_DATA", ExitCode.WRONG_INPUT, FailureReason.INVALID_DATA, "as asked"),
        ("fail:STORAGE_UNAVAILABLE", ExitCode.TRY_AGAIN, FailureReason.STORAGE_UNAVAILABLE, "as asked"),
        ("fail:PEER_LOST", ExitCode.PEER_LOST, FailureReason.PEER_LOST, "as asked"),
        ("fail:STOPPED", ExitCode.STOPPED, FailureReason.STOPPED, "as asked"),
        ("bug", ExitCode.BUG, FailureReason.INTERNAL_ERROR, r"KeyError: 'nobody\nexpects this'"),
        ("memory", ExitCode.WRONG_INPUT, FailureReason.OUT_OF_MEMORY, "memory ran out"),
        ("disk", ExitCode.TRY_AGAIN, FailureReason.OUT_OF_DISK, "no space left on the disk: mount"),
    ],
)
def test_failure_has_a_reason_and_an_exit_code(start, make_task, store, sample, code, reason, words):  # noqa: PLR0917 - cases
    pod = start(make_task(), sample)
    ended, outcome = pod.end()
    assert (ended, outcome.failure, outcome.result) == (code, reason, None)
    assert words in outcome.message
    assert ("Traceback" in log_of(pod)) == (sample == "bug")
    assert list(store.list("")) == []


def test_sigterm_saves_a_checkpoint_and_the_next_attempt_goes_on(start, make_task, store):
    pod = start(make_task(), "wait", attempt="first")
    until(lambda: "runs wait" in log_of(pod))
    time.sleep(0.3)
    pod.process.send_signal(signal.SIGTERM)
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.STOPPED, FailureReason.STOPPED)
    (marker,) = [entry.key for entry in store.list("") if entry.key.endswith("complete.json")]

    again = start(make_task(), "wait", attempt="second")
    until(lambda: "prune " in log_of(again))
    step = int(log_of(again).partition("prune ")[2].partition("/")[0])
    assert step == int(marker.partition("step-")[2][:8]) + 1
    again.process.send_signal(signal.SIGTERM)
    assert again.end()[0] == ExitCode.STOPPED


@pytest.fixture
def no_room_for_checkpoints(make_task, local_location):
    """A file where their folder should be."""
    open_store(local_location).write(f"{prefix_of(make_task())}/checkpoints", b"")


@pytest.mark.usefixtures("no_room_for_checkpoints")
@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_finished_stage_needs_no_checkpoint(start, make_task):
    pod = start(make_task(), "save-and-write:content")
    assert pod.end()[0] == ExitCode.DONE
    assert "the checkpoint of step 1 was not saved" in log_of(pod)


@pytest.mark.usefixtures("no_room_for_checkpoints")
@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_stopped_stage_tells_that_its_checkpoint_is_lost(start, make_task):
    pod = start(make_task(), "wait")
    until(lambda: "runs wait" in log_of(pod))
    pod.process.send_signal(signal.SIGTERM)
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.BUG, FailureReason.INTERNAL_ERROR)
    assert "checkpoints" in outcome.message


def test_what_returns_after_sigterm_is_not_published(start, make_task, store):
    pod = start(make_task(), "ignore")
    until(lambda: "runs ignore" in log_of(pod))
    pod.process.send_signal(signal.SIGTERM)
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.STOPPED, FailureReason.STOPPED)
    assert list(store.list("")) == []


def test_killed_stage_leaves_nothing_that_counts(start, make_task):
    pod = start(make_task(), "wait")
    until(lambda: "runs wait" in log_of(pod))
    pod.process.kill()
    pod.process.wait()
    assert start(make_task(), "write:content", attempt="two").end()[0] == ExitCode.DONE


def test_finished_artifact_has_no_checkpoints(start, make_task, store):
    store.write(f"{prefix_of(make_task())}/checkpoints/step-00000001-old/complete.json", b"{}")
    start(make_task(), "write:content").end()
    assert not [entry for entry in store.list("") if "checkpoints" in entry.key]


@pytest.mark.parametrize("task", ["", "{", '{"fingerprint": 1}'])
def test_task_that_is_none(start, task):
    code, outcome = start(task, "write:x").end()
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.INVALID_CONFIG)
    assert "OSPREY_TASK" in outcome.message


def test_task_of_another_stage(start, make_task):
    code, outcome = start(make_task(), "write:x", stage="resolve").end()
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.INVALID_CONFIG)
    assert "call with that argument" in outcome.message


def test_storage_that_is_away(start, make_task, s3_location):
    away = s3_location.model_copy(update={"endpoint": "http://127.0.0.1:1"})
    code, outcome = start(make_task().model_copy(update={"storage": away}), "write:x").end()
    assert (code, outcome.failure) == (ExitCode.TRY_AGAIN, FailureReason.STORAGE_UNAVAILABLE)


# ------------------------------------------------------------------------------------------ several processes


@pytest.fixture
def make_parallel_task(make_task):
    return lambda: make_task().model_copy(update={"execution": Execution(processes_per_node=2)})


@pytest.fixture
def location(request):
    """One kind is enough for the runner: it only ever talks to a `Store`."""
    return request.getfixturevalue("local_location")


def test_ranks_together_make_one_artifact(start, make_parallel_task, store):
    code, outcome = start(make_parallel_task(), "ranks:gloo-done").end()
    assert (code, outcome.result) == (ExitCode.DONE, PruneResult(parameters=6))  # ((1 + 2) + (1 + 2))
    made = manifest.find(store, prefix_of(make_parallel_task()))
    assert made is not None
    assert [file.path for file in made.files] == ["rank-0", "rank-1"]
    assert outcome.peak_memory_bytes > 200 << 20  # two processes with torch


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "reason", "words"),
    [
        ("fail", ExitCode.WRONG_INPUT, FailureReason.DIVERGED, "lower learningRate"),
        ("bug", ExitCode.BUG, FailureReason.INTERNAL_ERROR, "ValueError: no such thing"),
        ("kill", ExitCode.WRONG_INPUT, FailureReason.OUT_OF_MEMORY, "was killed"),
        ("bus", ExitCode.TRY_AGAIN, FailureReason.OUT_OF_DISK, "SIGBUS"),
        ("exit", ExitCode.BUG, FailureReason.INTERNAL_ERROR, "ended with 3"),
        ("abort", ExitCode.PEER_LOST, FailureReason.PEER_LOST, "aborted"),
    ],
)
def test_rank_that_fails_is_told(  # noqa: PLR0917 - cases
    start, make_parallel_task, store, rank, how, code, reason, words
):
    pod = start(make_parallel_task(), f"ranks:{how}@{rank}")
    ended, outcome = pod.end()
    assert (ended, outcome.failure) == (code, reason), log_of(pod)
    assert words in outcome.message
    assert outcome.message.startswith(f"rank {rank}")
    assert list(store.list("")) == []


def test_rank_that_fails_amid_collectives_is_told_and_not_the_one_that_misses_it(start, make_parallel_task):
    pod = start(make_parallel_task(), "ranks:gloo-fail@1")
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.DIVERGED), log_of(pod)
    assert outcome.message.startswith("rank 1: the loss is no number")


def test_sigterm_reaches_every_rank(start, make_parallel_task):
    pod = start(make_parallel_task(), "ranks:wait")
    until(lambda: len(list((pod.folder / "scratch").glob("waiting-*"))) == 2)
    pod.process.send_signal(signal.SIGTERM)
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.STOPPED, FailureReason.STOPPED)


def test_rank_that_is_stopped_alone_stops_the_others(start, make_parallel_task):
    code, outcome = start(make_parallel_task(), "ranks:terminate@1").end()
    assert (code, outcome.failure) == (ExitCode.STOPPED, FailureReason.STOPPED)


def test_rank_that_stops_first_leaves_the_others_the_grace_period(make_parallel_task, tmp_path, monkeypatch):
    """As in a pod that was told nothing itself: its ranks learn of it from those of another pod."""
    env = {"PYTHONPATH": PROGRAMS, "SAMPLE": "ranks:stop@1", "OSPREY_SCRATCH": tmp_path, "OMP_NUM_THREADS": 1}
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("OSPREY_TASK", make_parallel_task().model_dump_json())
    monkeypatch.setattr(ranks, "_FAILURE_GRACE_S", 0.1)
    outcome = ranks.run(
        "sample_stages",
        scratch=tmp_path,
        node=0,
        nodes=1,
        per_node=2,
        host="",
        port=0,
        stop=threading.Event(),
        grace_period_s=60,
    )
    assert outcome.failure is FailureReason.STOPPED
    assert (tmp_path / "saved").exists()


def test_ranks_that_do_not_stop_are_killed_within_the_grace_period(start, make_parallel_task):
    pod = start(make_parallel_task(), "ranks:hang", OSPREY_GRACE_PERIOD_SECONDS="4")
    until(lambda: len(list((pod.folder / "scratch").glob("deaf-*"))) == 2)
    began = time.monotonic()
    pod.process.send_signal(signal.SIGTERM)
    code, outcome = pod.end()
    assert (code, outcome.failure) == (ExitCode.STOPPED, FailureReason.STOPPED)
    assert time.monotonic() - began < 4


def test_ranks_end_with_a_runner_that_is_killed(start, make_parallel_task):
    pod = start(make_parallel_task(), "ranks:wait")
    until(lambda: len(list((pod.folder / "scratch").glob("waiting-*"))) == 2)
    children = Path(f"/proc/{pod.process.pid}/task/{pod.process.pid}/children").read_text().split()
    assert len(children) == 2
    pod.process.kill()
    pod.process.wait()
    until(lambda: not any(is_running(int(pid)) for pid in children))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start_pods(start, make_task):
    """Start a Job of two pods, with a process each."""

    def start_pods(sample: str) -> list[Pod]:
        task = make_task().model_copy(update={"execution": Execution(nodes=2)})
        (port,) = free_ports(1)
        shared = {"OSPREY_RENDEZVOUS": "127.0.0.1", "OSPREY_RENDEZVOUS_PORT": str(port)}
        return [start(task, sample, attempt="uid", JOB_COMPLETION_INDEX=str(node), **shared) for node in range(2)]

    return start_pods


def test_pods_together_make_one_artifact(start_pods, make_task, store):
    (code, outcome), (other_code, other_outcome) = [pod.end() for pod in start_pods("ranks:done")]
    assert (code, other_code) == (ExitCode.DONE, ExitCode.DONE)
    assert outcome.artifact is not None
    assert other_outcome.artifact is None
    assert manifest.find(store, prefix_of(make_task())) is not None


def test_lost_pod_is_a_lost_peer(start_pods):
    """One pod dies without a word; the other one says that its peer is gone."""
    pods = start_pods("ranks:gloo-exit@1")
    code, outcome = pods[0].end()
    assert (code, outcome.failure) == (ExitCode.PEER_LOST, FailureReason.PEER_LOST), log_of(pods[0])
    assert pods[1].end()[0] == ExitCode.BUG
