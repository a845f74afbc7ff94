"""One cluster: bring it up, look at it, take it down without a trace."""

import contextlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from dev import processes
from dev.cluster import binaries, control_plane, node
from dev.cluster.api import Api
from dev.cluster.certificates import Authority
from dev.cluster.control_plane import ADMIN, ControlPlane
from dev.cluster.node import Node
from dev.cluster.sandbox import Sandbox
from dev.settings import state_home

LOOPBACK = "127.0.0.1"
API_ONLY_SERVICES, API_ONLY_SERVICE = "10.96.0.0/16", "10.96.0.1"


class ClusterError(RuntimeError):
    """A cluster can't be used as asked; the message says what to do."""


@dataclass(frozen=True)
class Cluster:
    """A cluster by name; several may run side by side.

    As a context manager it is up inside, and gone after.

    Attributes:
        name: lower-case letters, digits and dashes.
        has_node: whether ``up`` also starts what runs pods, for which it must be root.
    """

    name: str = "dev"
    has_node: bool = True

    def __post_init__(self) -> None:
        """Refuse a name that could not be a folder's."""
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ClusterError(
                f"the name {self.name!r} does not fit: write up to 40 lower-case letters, digits and dashes"
            )

    @property
    def state(self) -> Path:
        """Folder of everything that it keeps; also the name of its process group."""
        return state_home() / self.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.state / "kubeconfig"

    @property
    def server(self) -> str:
        """URL of the API server.

        Raises:
            ClusterError: the cluster is not up.
        """
        try:
            return str(json.loads(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
        except FileNotFoundError:
            raise ClusterError(f"cluster {self.name} is not up: run `python3 -m dev.cluster up`") from None

    @property
    def host_address(self) -> str:
        """This machine's address for pods: a server that listens on it is reached from pods and from here.

        Without a node it is the loopback address.
        """
        return str(urlsplit(self.server).hostname)

    def api(self) -> Api:
        """A client of its API server, as administrator."""
        return Api(self.server, Authority(self.state / "pki"), ADMIN)

    def is_up(self) -> bool:
        """Whether its API server answers and all of it runs."""
        wanted = control_plane.PROCESSES | (node.PROCESSES if self.has_node else set())
        alive = set(processes.running(str(self.state)).values())
        return wanted <= alive and self.kubeconfig.exists() and self.api().is_ready()

    def up(self) -> None:
        """Start it, unless it is up; what is left of a crashed one is removed first.

        Raises:
            ClusterError: a program is missing, or this is not root and a node is asked for.
            processes.NotReadyError: a part does not come up. Nothing is left running.
        """
        self._require()
        if self.is_up():
            return
        self.down()
        self.state.mkdir(parents=True)
        self.state.chmod(0o711)  # kubelet's folders below are for pods' users, too
        try:
            self._start()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop everything of it and remove what it made; again, or after any crash, is fine.

        Servers beside it go too, if their state folders are inside its own.
        """
        processes.stop(str(self.state), grace_s=0)
        Sandbox(self.state).destroy()
        if self.state.exists():
            self._refuse_mounts()
            shutil.rmtree(self.state)

    def _refuse_mounts(self) -> None:
        """Make sure that removing the folder removes nothing else: the node's mounts are in its own namespace."""
        targets = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        if inside := [target for target in targets if Path(target).is_relative_to(self.state)]:
            raise ClusterError(f"unmount {', '.join(inside)} first: the folder {self.state} is to be removed")

    def leftovers(self) -> list[str]:
        """Name what is on the machine of it: processes, the link, cgroups, the state folder."""
        alive = [f"process {pid} {name}" for pid, name in processes.running(str(self.state)).items()]
        folder = [str(self.state)] if self.state.exists() else []
        return alive + Sandbox(self.state).leftovers() + folder

    def load_image(self, archive: bytes) -> None:
        """Load an OCI image archive into its node."""
        node.load_image(Sandbox(self.state), archive)

    def environment(self) -> dict[str, str]:
        """Variables for kubectl and Helm: where the cluster is, and PATH with both programs in front."""
        path = os.environ.get("PATH", os.defpath)  # noqa: TID251 - a command's PATH is extended
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.state / "kubectl-cache"),
            "PATH": os.pathsep.join([*map(str, binaries.bin_folders()), path]),
        }

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Run kubectl with ``text`` on its standard input and return what it prints.

        Raises:
            ClusterError: it fails; the message is its own.
        """
        own = {**os.environ, **self.environment()}  # noqa: TID251 - kubectl wants HOME and the like
        command = [str(binaries.path("kubectl")), *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, input=text, env=own)
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _require(self) -> None:
        if names := binaries.unbuilt():
            raise ClusterError(f"{', '.join(names)}: not built yet; run `make setup`")
        if packages := binaries.missing_packages(node=self.has_node):
            raise ClusterError(f"install the Debian packages {' '.join(packages)} (make setup, as root, does)")
        if self.has_node and os.geteuid() != 0:
            raise ClusterError(
                "a node needs root: run this as root, use `up --no-node`, or point KUBECONFIG at a cluster"
            )

    def _start(self) -> None:
        if not self.has_node:
            ControlPlane(self.state, LOOPBACK, API_ONLY_SERVICES, API_ONLY_SERVICE, has_node=False).start()
            return
        network = Sandbox(self.state).create()
        plane = ControlPlane(self.state, network.host, network.services, network.service_address, has_node=True)
        Node(self.state, network).start(plane.start())

    def __enter__(self) -> Self:
        """Bring it up."""
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it down."""
        self.down()


def names() -> list[str]:
    """Names of all clusters that have a state folder."""
    home = state_home()
    return sorted(folder.name for folder in home.iterdir()) if home.exists() else []


def down_all() -> None:
    """Take every cluster and server of the state folder down, also when one of them resists.

    Raises:
        ExceptionGroup: those that did.
    """
    errors: list[Exception] = []
    for name in names():
        try:
            Cluster(name).down()
        except Exception as error:  # noqa: BLE001 - the others must still be tried
            errors.append(error)
    if errors:
        raise ExceptionGroup("some clusters could not be removed", errors)
    with contextlib.suppress(FileNotFoundError):
        state_home().rmdir()
