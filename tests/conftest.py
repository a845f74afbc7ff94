"""Real servers for the tests: each starts when the first test asks for it, and none outlives the session."""

import fcntl
import hashlib
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import psutil
import pytest

from dev.cluster.cluster import Cluster, names
from dev.cluster.volumes import provide, withdraw
from dev.services import REGION, S3Server
from dev.settings import state_home

# Clusters and servers are called after the process that owns them, so that the next session can tell what a killed
# one left behind from what another session is using right now.
OWNER = re.compile(r"test-(\d+)-.*")


@dataclass(frozen=True)
class S3:
    """A running S3 server: where it is and what a client needs."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str

    def client(self) -> Any:
        """A boto3 client."""
        import boto3  # noqa: PLC0415 - it takes a while, and most sessions need none
        from botocore.config import Config  # noqa: PLC0415

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )

    def make_bucket(self, name: str) -> str:
        """Make an empty bucket and return its name."""
        self.client().create_bucket(Bucket=name)
        return name


def pytest_configure():
    """Let a termination signal end the session like Ctrl-C does: with everything taken down."""

    def interrupt(number, frame):
        # Once: Ctrl-C reaches every worker by itself and again from the session that they belong to. Not SIG_IGN, which
        # the processes that are started from here on would inherit.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
        signal.default_int_handler(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):  # a script's background jobs ignore the first
        signal.signal(number, interrupt)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    """Let the workers of an interrupted session take down what they started; xdist would end them in 15 s."""
    interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
    if interrupted and session.config.pluginmanager.has_plugin("dsession"):
        workers = psutil.Process().children()
        for worker in workers:
            worker.send_signal(signal.SIGINT)
        psutil.wait_procs(workers, timeout=120)
    result = yield  # what was started is taken down
    if interrupted and hasattr(session.config, "workerinput"):
        os._exit(exitstatus)  # else it would wait for the session, which waits for it
    return result


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the names
def pytest_collection_modifyitems(config, items):
    """Order the tests, and group them for workers.

    Without workers the quick ones come first, and last those that install an operator, which looks after the whole
    cluster for the rest of the session. Of several workers one has all tests with a node and one all with the API
    server, so that each cluster is there once; these begin, since they take longest. The rest go by their modules,
    which share fixtures.
    """
    items.sort(key=_needs)
    for item in items:
        module = item.nodeid.partition("::")[0]
        groups = {Needs.NOTHING: module, Needs.API: "api"}
        item.add_marker(pytest.mark.xdist_group(groups.get(_needs(item), "node")))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -min(_needs(item), Needs.NODE))  # within a group the order stays


def pytest_runtest_setup(item):
    """Skip, and say so, what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch  # noqa: PLC0415 - where the operator is tested alone there is none

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU here")


class Needs(IntEnum):
    """What a test has to have running, the quickest first."""

    NOTHING = 0
    API = 1
    NODE = 2
    OPERATOR = 3


def _needs(item) -> Needs:
    fixtures = set(item.fixturenames)
    if "installation" in fixtures:
        return Needs.OPERATOR
    if "node_cluster" in fixtures or item.get_closest_marker("node"):
        return Needs.NODE
    return Needs.API if "api_cluster" in fixtures or item.get_closest_marker("cluster") else Needs.NOTHING


def pytest_collection_finish(session):
    """Stop where groups have no effect: a cluster for every worker would slow all down, and nothing would say so."""
    grouped = getattr(session.config.option, "loadgroup", False)
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist cannot group tests with this pytest: install requirements/dev.lock")


@pytest.fixture(scope="session")
def own_name() -> Callable[[str], str]:
    """A name for a cluster or server of this session; also removes what killed sessions left."""
    with (Path(tempfile.gettempdir()) / "osprey-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other worker begins just now, too
        for name in names():
            owner = OWNER.fullmatch(name)
            if owner and not Path("/proc", owner[1]).exists():
                Cluster(name).down()
    return lambda what: f"test-{os.getpid()}-{what}"


@pytest.fixture(scope="session")
def api_cluster(own_name) -> Iterator[Cluster]:
    """A real API server with controllers and scheduler, without a node. `.kubeconfig` is a path."""
    with Cluster(own_name("api"), has_node=False) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_cluster(own_name) -> Iterator[Cluster]:
    """A cluster that runs pods. `.kubeconfig` is a path; `.host_address` is where pods reach this machine."""
    with Cluster(own_name("node")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3(own_name) -> Iterator[S3]:
    """A real S3 server, SeaweedFS, on loopback."""
    with _s3_server(own_name("s3"), "127.0.0.1") as server:
        yield server


@pytest.fixture(scope="session")
def pod_s3(own_name, node_cluster) -> Iterator[S3]:
    """The same where the pods of `node_cluster` reach it."""
    with _s3_server(own_name("pod-s3"), node_cluster.host_address) as server:
        yield server


@contextmanager
def _s3_server(name: str, address: str) -> Iterator[S3]:
    try:
        with S3Server(state_home() / name, address) as server:
            yield S3(server.endpoint, server.access_key, server.secret_key, REGION)
    finally:
        Cluster(name).down()  # its folder too


@pytest.fixture
def bucket(s3, request) -> str:
    """An empty bucket of this test's own."""
    return s3.make_bucket(f"b-{_digest(request.node.nodeid)}")


@pytest.fixture
def namespace(request) -> Iterator[Callable[..., str]]:
    """Make namespaces that enforce the `restricted` pod security standard and go with the test.

    `namespace(cluster)` returns the name of a new one; `namespace(cluster, volumes={"models": path})` also binds this
    machine's programs, and the given folders, as claims (see `dev.cluster.volumes`).
    """
    made: list[tuple[Cluster, str]] = []

    def make(cluster: Cluster, volumes: dict[str, Path] | None = None) -> str:
        name = f"t-{_digest(request.node.nodeid)}-{len(made)}"
        enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": enforce}}
        cluster.api().apply(f"/api/v1/namespaces/{name}", manifest)
        made.append((cluster, name))
        if volumes is not None:
            provide(cluster.api(), name, volumes)
        return name

    yield make
    for cluster, name in made:
        withdraw(cluster.api(), name)
        cluster.api().delete(f"/api/v1/namespaces/{name}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
