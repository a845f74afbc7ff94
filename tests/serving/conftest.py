"""A real SGLang server on the CPU, for every test that needs one."""

import importlib.util
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

_LAUNCH = Path(__file__).parents[2] / "dev" / "cpu_kernels" / "launch.py"
_SPEC = importlib.util.spec_from_file_location("cpu_kernels_launch", _LAUNCH)
launch = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = launch  # its dataclass looks its own module up
_SPEC.loader.exec_module(launch)


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """Context manager `sglang_server(model, drafter=None, extra_args=())` -> a healthy `launch.Server`."""

    @contextmanager
    def start(model, drafter=None, extra_args=(), **options):
        log = tmp_path_factory.mktemp("sglang") / "server.log"
        options.setdefault("base_environment", os.environ)  # noqa: TID251  the server inherits it
        with launch.sglang_server(model, drafter, log=log, extra_args=extra_args, **options) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def server_did_not_start():
    """The error of a server that ended before it was healthy."""
    return launch.ServerDidNotStartError
