import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dev import processes

IGNORES_TERMINATION = "trap '' TERM; sleep 100 & echo ready; wait; wait"


@pytest.fixture
def group(tmp_path):
    yield str(tmp_path)
    processes.stop(str(tmp_path), grace_s=0)


def test_a_process_is_found_by_its_group_alone(group, tmp_path):
    pid = processes.start(group, "sleeper", ["sleep", "100"], tmp_path / "log")

    assert processes.running(group) == {pid: "sleeper"}


def test_a_group_whose_name_begins_alike_is_another_one(group, tmp_path):
    processes.start(group, "sleeper", ["sleep", "100"], tmp_path / "log")

    assert processes.running(group[:-1]) == {}
    processes.stop(group[:-1], grace_s=0)
    assert len(processes.running(group)) == 1


def test_a_group_inside_another_goes_with_it(group, tmp_path):
    processes.start(f"{group}/inner", "sleeper", ["sleep", "100"], tmp_path / "log")

    processes.stop(group)

    assert processes.running(f"{group}/inner") == {}


def test_stop_ends_children_and_what_ignores_termination(group, tmp_path):
    log = tmp_path / "log"
    processes.start(group, "stubborn", ["sh", "-c", IGNORES_TERMINATION], log)
    processes.wait("the shell", lambda: "ready" in log.read_text(), 10, log)
    assert len(processes.running(group)) == 2

    processes.stop(group, grace_s=0.2)

    assert processes.running(group) == {}


def test_stop_leaves_no_zombie_in_this_process(group, tmp_path):
    pid = processes.start(group, "sleeper", ["sleep", "100"], tmp_path / "log")

    processes.stop(group)

    assert not Path(f"/proc/{pid}").exists()


def test_a_process_of_somebody_else_is_never_ended(group, tmp_path):
    with subprocess.Popen(["sleep", "100"]) as foreign:
        processes.start(group, "sleeper", ["sleep", "100"], tmp_path / "log")
        processes.stop(group, grace_s=0)
        time.sleep(0.1)

        assert foreign.poll() is None
        foreign.kill()


def test_what_a_killed_process_started_is_found_by_the_next_one(group, tmp_path):
    log = tmp_path / "log"
    program = (
        "import os, signal; from pathlib import Path; from dev import processes;"
        f"processes.start({group!r}, 'orphan', ['sleep', '100'], Path({str(log)!r}));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(processes.__file__).parent.parent
    done = subprocess.run(["python3", "-c", program], cwd=root, check=False)

    assert done.returncode == -signal.SIGKILL
    assert list(processes.running(group).values()) == ["orphan"]


def test_wait_tells_the_end_of_the_log_of_a_process_that_died(group, tmp_path):
    log = tmp_path / "log"
    pid = processes.start(group, "failing", ["sh", "-c", "echo because of this >&2; exit 3"], log)

    with pytest.raises(processes.NotReadyError, match=r"ended at once.*\n.*because of this"):
        processes.wait("it", lambda: False, 10, log, pid)


def test_wait_gives_up_on_one_that_does_nothing(group, tmp_path):
    pid = processes.start(group, "idle", ["sleep", "100"], tmp_path / "log")

    with pytest.raises(processes.NotReadyError, match=r"not ready in 0.2 s"):
        processes.wait("it", lambda: False, 0.2, tmp_path / "log", pid)


def test_a_missing_program_is_an_error(group, tmp_path):
    with pytest.raises(FileNotFoundError):
        processes.start(group, "none", ["no-such-program"], tmp_path / "log")


def test_a_started_process_reads_nothing_and_has_a_session_of_its_own(group, tmp_path):
    pid = processes.start(group, "sleeper", ["sleep", "100"], tmp_path / "log")

    assert Path(f"/proc/{pid}/fd/0").readlink() == Path("/dev/null")
    assert os.getsid(pid) == pid
