"""`python3 -m osprey_serving COMMAND`: the stages that are clients of a server, and what a server's pod needs.

regenerate, baseline, evaluate    the stage that OSPREY_TASK describes
fetch                             bring a server's files to the disk, before it starts
sync                              beside a server: keep its drafter what is wanted
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from osprey_api.conditions import EXIT_CODE_OF, FailureReason
from osprey_api.naming import DRAFTER_PATH, METRICS_PORT, MODEL_CACHE_PATH, MODEL_PATH, SERVER_PORT, WANTED_PATH
from osprey_api.serving import ADMIN_KEY_VARIABLE, WANTED_VARIABLE, ServerFiles
from osprey_api.stages import SERVER_URL_VARIABLE, Outcome, StageName
from osprey_runtime import result, runner
from osprey_runtime.errors import StageError
from osprey_runtime.failures import failure_of
from osprey_runtime.settings import Settings
from osprey_serving.client import Connection
from osprey_serving.fetch import fetch, read_wanted
from osprey_serving.stages import baseline, evaluate, regenerate
from osprey_serving.sync import POLL_S, StateServer, Sync


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit code."""
    env = os.environ  # noqa: TID251 - this is the entry point
    arguments = _parser().parse_args(argv)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request would drown the rest
    if arguments.command == "fetch":
        return _fetch(arguments, env)
    if arguments.command == "sync":
        return _sync(arguments, env)
    connection = Connection(_server_url(env), _admin_key(env), arguments.start_deadline, arguments.restart_deadline)
    stages = {
        StageName.REGENERATE: runner.Stage(partial(regenerate.run, connection=connection)),
        StageName.BASELINE: runner.Stage(partial(baseline.run, connection=connection)),
        StageName.EVALUATE: runner.Stage(partial(evaluate.run, connection=connection)),
    }
    return runner.main(stages, worker_module="osprey_serving", argv=[arguments.command])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m osprey_serving", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for stage in (StageName.REGENERATE, StageName.BASELINE, StageName.EVALUATE):
        command = commands.add_parser(stage, help=f"the stage {stage}, as OSPREY_TASK describes it")
        for name, meaning in (
            ("start", "how long the server may take to become ready"),
            ("restart", "how long a server that ended may take to come back"),
        ):
            default = getattr(Connection, f"{name}_deadline_s")
            command.add_argument(f"--{name}-deadline", type=float, default=default, help=f"{meaning}, in seconds")
    command = commands.add_parser("fetch", help="bring a server's files to the disk")
    _add_path(command, "wanted", WANTED_PATH, f"file that names the files; {WANTED_VARIABLE} goes before it")
    _add_path(command, "model", MODEL_PATH, "folder for the target")
    _add_path(command, "drafter", DRAFTER_PATH, "folder for the drafter")
    _add_path(command, "cache", MODEL_CACHE_PATH, "folder that outlives the pod, if it is there")
    command = commands.add_parser("sync", help="keep a running server's drafter what is wanted")
    _add_path(command, "wanted", WANTED_PATH, "file that names the files, and may change")
    _add_path(command, "drafter", DRAFTER_PATH, "folder in which the server finds its drafter")
    command.add_argument("--port", type=int, default=METRICS_PORT, help="for /metrics and /readyz")
    command.add_argument("--poll", type=float, default=POLL_S, help="seconds between two looks at --wanted")
    return parser


def _add_path(command: argparse.ArgumentParser, name: str, default: str, meaning: str) -> None:
    command.add_argument(f"--{name}", type=Path, default=Path(default), help=f"{meaning} (default: {default})")


def _fetch(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    began = time.monotonic()
    try:
        wanted = _wanted(arguments.wanted, env)
        cache = arguments.cache if arguments.cache.is_dir() else None
        fetch(wanted, model=arguments.model, drafter=arguments.drafter, cache=cache)
    except Exception as error:  # noqa: BLE001 - every failure is told in the termination message
        failure = failure_of(error, arguments.drafter.parent)
        outcome = Outcome(failure=failure.reason, message=failure.message, seconds=time.monotonic() - began)
        result.write(outcome, Settings.read().termination_log)
        return EXIT_CODE_OF[failure.reason]
    return 0


def _sync(arguments: argparse.Namespace, env: Mapping[str, str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sync = Sync(_server_url(env), _admin_key(env), arguments.wanted, arguments.drafter)
    with StateServer(sync, arguments.port):
        sync.run(stop, arguments.poll)
    sync.close()
    return 0


def _wanted(path: Path, env: Mapping[str, str]) -> ServerFiles:
    if WANTED_VARIABLE in env:
        return read_wanted(env[WANTED_VARIABLE], WANTED_VARIABLE)
    try:
        return read_wanted(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise StageError(
            FailureReason.INVALID_CONFIG, f"neither {WANTED_VARIABLE} nor {path} says which files are wanted: set one"
        ) from error


def _server_url(env: Mapping[str, str]) -> str:
    return env.get(SERVER_URL_VARIABLE, f"http://127.0.0.1:{SERVER_PORT}")


def _admin_key(env: Mapping[str, str]) -> str | None:
    return env.get(ADMIN_KEY_VARIABLE, "").strip() or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
