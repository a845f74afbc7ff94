"""What a session of tests leaves behind, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dev import processes
from dev.cluster.cluster import Cluster, names
from dev.settings import REPOSITORY, state_home

HANGS = """
import os, pathlib, time

def test_hangs(s3):
    pathlib.Path("ready").write_text(str(os.getpid()))
    time.sleep(100)

def test_fails(s3):
    assert not s3
"""


@pytest.fixture
def session(tmp_path):
    """Start a session of its own, with the fixtures of this one."""
    (tmp_path / "test_it.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    running = []

    def start(test, workers=0):
        words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-q", f"-n{workers}", f"test_it.py::{test}"]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}  # noqa: TID251
        running.append(subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.wait()


def left_by(pid):
    return [name for name in names() if name.startswith(f"test-{pid}-")]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupted_session_leaves_nothing(session, tmp_path, how, workers):
    one = session("test_hangs", workers)
    ready = tmp_path / "ready"
    processes.wait("the test", lambda: ready.exists() and ready.read_text(), 60, tmp_path / "none.log")
    owner = int(ready.read_text())  # the worker, if there is one
    assert (owner == one.pid) == (workers == 0)
    assert left_by(owner) == [f"test-{owner}-s3"]

    one.send_signal(how)
    one.wait(timeout=60)

    assert one.returncode != 0
    assert left_by(owner) == []
    assert not Path(f"/proc/{owner}").exists()


def test_ctrl_c_which_reaches_all_processes_leaves_nothing(session, tmp_path):
    one = session("test_hangs", workers=1)
    ready = tmp_path / "ready"
    processes.wait("the test", lambda: ready.exists() and ready.read_text(), 60, tmp_path / "none.log")
    owner = int(ready.read_text())

    for pid in (owner, one.pid):
        os.kill(pid, signal.SIGINT)
    one.wait(timeout=60)

    assert left_by(owner) == []


def test_a_failing_session_leaves_nothing(session):
    one = session("test_fails")
    one.wait(timeout=60)

    assert one.returncode == 1
    assert left_by(one.pid) == []


def test_a_session_removes_what_a_killed_one_left_and_nothing_else(session, own_name, tmp_path):
    one = session("test_hangs")
    processes.wait("the test", (tmp_path / "ready").exists, 60, tmp_path / "none.log")
    one.kill()
    one.wait()
    (orphan,) = left_by(one.pid)
    mine = Cluster(own_name("sleeper"))
    mine.state.mkdir(parents=True)
    processes.start(str(mine.state), "sleeper", ["sleep", "100"], mine.state / "log")
    assert "weed" in processes.running(str(state_home() / orphan)).values()

    session("test_fails").wait(timeout=60)

    assert left_by(one.pid) == []
    assert processes.running(str(state_home() / orphan)) == {}
    assert len(mine.leftovers()) == 2
    mine.down()
