"""Start background processes, and find them again by a mark in their environment.

There are no pid files: a number in a file may belong to somebody else by the time it is read. A process that
was started here, and every child that inherited its environment, carries ``OSPREY_DEV_GROUP``, so whoever
knows the group's name can stop all of it, also after a crash of the process that started it.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GROUP = "OSPREY_DEV_GROUP"
NAME = "OSPREY_DEV_NAME"


class NotReadyError(RuntimeError):
    """Something that was started did not come up: the message has the end of its log."""


def start(group: str, name: str, command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> int:
    """Start a command in its own session, its output appended to ``log``, and return its process id.

    Args:
        group: whatever belongs together and is stopped together, by convention the path of its state folder.
        name: the process's own name within the group.
        command: the program, found on PATH, and its arguments.
        log: file for standard output and error.
        env: variables in addition to this process's own.

    Raises:
        FileNotFoundError: the program is not there.
    """
    own = os.environ  # noqa: TID251 - a child inherits the environment
    to_log = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Not subprocess.Popen: its object complains when it is dropped before its process ends.
    return os.posix_spawnp(
        str(command[0]),
        [str(word) for word in command],
        {**own, **(env or {}), GROUP: group, NAME: name},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), to_log, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def running(group: str) -> dict[int, str]:
    """Return the living processes of a group and of those inside it, whose names go on with a slash.

    Returns:
        Process id -> the name that it, or its ancestor, was started with.
    """
    mark = f"{GROUP}={group}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")  # empty for a zombie
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # not ours, or gone meanwhile
        if any(item == mark or item.startswith(mark + b"/") for item in variables):
            names = (item.decode() for item in variables if item.startswith(f"{NAME}=".encode()))
            found[int(entry.name)] = next(names, "").removeprefix(f"{NAME}=")
    return found


def stop(group: str, grace_s: float = 5.0) -> None:
    """End the processes of a group: SIGTERM, then SIGKILL after ``grace_s``.

    Returns when none is left. Processes that the group starts meanwhile are ended too.

    Raises:
        RuntimeError: a process survived SIGKILL, which only one stuck in the kernel does.
    """
    begin = time.monotonic()
    asked: set[int] = set()
    while pids := list(running(group)):
        waited_s = time.monotonic() - begin
        if waited_s > grace_s + 30:
            raise RuntimeError(f"processes {pids} of {group} do not end: they hang in the kernel")
        for pid in pids:
            if waited_s >= grace_s:
                _send(pid, signal.SIGKILL)
            elif pid not in asked:
                _send(pid, signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.02)
        _reap(asked)
    _reap(asked)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap(pids: set[int]) -> None:
    """Collect those of the processes that are this process's own children, so that no zombie is left."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def wait(what: str, ready: Callable[[], bool], timeout_s: float, log: Path, pid: int | None = None) -> None:
    """Poll until ``ready()``.

    Raises:
        NotReadyError: it was not within ``timeout_s``, or the process ``pid`` ended.
    """
    end = time.monotonic() + timeout_s
    while not ready():
        if pid is not None and not _is_alive(pid):
            raise NotReadyError(f"{what} ended at once; the end of {log}:\n{tail(log)}")
        if time.monotonic() > end:
            raise NotReadyError(f"{what} was not ready in {timeout_s:g} s; the end of {log}:\n{tail(log)}")
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return Path(f"/proc/{pid}").exists()


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, or nothing when there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
