"""The node's own world: network, mount and PID namespaces, a link to this machine, and a cgroup.

Whatever the kubelet, containerd, kube-proxy and the pods do (iptables rules, mounts, interfaces, processes) happens
in these namespaces, and the kernel takes all of it back when their first process ends. This machine keeps only the
link's near end and the cgroup, and both are named after the state folder, so they can be found after any crash.
"""

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dev import processes
from dev.cluster import binaries

CGROUPS = Path("/sys/fs/cgroup")
BLOCKS = [ipaddress.IPv4Network(f"10.{second}.0.0/16") for second in range(200, 255)]

# The kubelet insists on these and writes what differs: it finds them so, and this machine's stay as they are.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}

# /run: sockets, network namespaces, the lock of iptables. The rest are places that CNI and the kubelet write to,
# wherever their own folders are.
HIDDEN = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet")


@dataclass(frozen=True)
class Network:
    """The addresses of one cluster with a node: one /16 of 10.0.0.0/8 that nothing else on the machine uses."""

    block: ipaddress.IPv4Network

    @property
    def host(self) -> str:
        """This machine's end of the link: pods reach its servers there."""
        return str(self.block[1])

    @property
    def node(self) -> str:
        """The node's end of the link, and its address."""
        return str(self.block[2])

    @property
    def pods(self) -> str:
        """Range of the pods' addresses."""
        return f"{self.block[256]}/24"

    @property
    def services(self) -> str:
        """Range of the Services' addresses."""
        return str(list(self.block.subnets(prefixlen_diff=1))[1])

    @property
    def service_address(self) -> str:
        """Address of the API server's Service, the first of the range."""
        return str(self.block[2**15 + 1])

    @property
    def dns(self) -> str:
        """Address of the DNS Service."""
        return str(self.block[2**15 + 10])


@dataclass(frozen=True)
class Sandbox:
    """The namespaces, the link and the cgroup of the cluster in one state folder."""

    state: Path

    @property
    def identity(self) -> str:
        """Name of the link and of the cgroup: at most 15 characters, unique to the state folder."""
        return f"osp{hashlib.sha256(str(self.state).encode()).hexdigest()[:10]}"

    @property
    def log(self) -> Path:
        """Messages of the namespaces' first process."""
        return self.state / "sandbox.log"

    def create(self) -> Network:
        """Make the namespaces, the cgroup and the link, and return the addresses.

        Raises:
            processes.NotReadyError: the namespaces can't be made, for example without root.
            subprocess.CalledProcessError: a step of it fails.
        """
        kinds = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        command: list[str | Path] = ["unshare", *kinds, binaries.path("pause")]
        pid = processes.start(str(self.state), "sandbox", command, self.log)
        processes.wait("the node's namespaces", lambda: self._first_process() is not None, 10, self.log, pid)
        self._hide()
        self._create_cgroup()
        return self._create_link()

    def inside(self, *command: str | Path) -> list[str]:
        """Return a command line that runs a command in the namespaces.

        Raises:
            RuntimeError: there are none.
        """
        first = self._first_process()
        if first is None:
            raise RuntimeError("the cluster has no node that runs: start one with `python3 -m dev.cluster up`")
        return ["nsenter", f"--target={first}", "--net", "--mount", "--pid", "--", *map(str, command)]

    def run(self, *command: str | Path) -> str:
        """Run a command in the namespaces and return its output.

        Raises:
            subprocess.CalledProcessError: it fails.
        """
        return _run(*self.inside(*command))

    def destroy(self) -> None:
        """Remove the link and the cgroup, if they are there; the processes have ended before.

        Raises:
            RuntimeError: one of them stays, for example because a process keeps the cgroup.
        """
        end = time.monotonic() + 30
        while left := self.leftovers():
            if time.monotonic() > end:
                raise RuntimeError(f"still in use: {', '.join(left)}")
            self._remove_link()
            self._remove_cgroup()
            time.sleep(0.02)

    def leftovers(self) -> list[str]:
        """Name what of it is on the machine now."""
        link = Path("/sys/class/net", self.identity)
        return [str(path) for path in (link, *self._cgroups()) if path.exists()]

    def _first_process(self) -> int | None:
        program = binaries.path("pause").resolve()
        for pid, name in processes.running(str(self.state)).items():
            try:
                if name == "sandbox" and Path(f"/proc/{pid}/exe").readlink() == program:
                    return pid
            except OSError:
                continue
        return None

    def _hide(self) -> None:
        """Give the node folders and kernel settings of its own where it would write to this machine's."""
        steps = ["mount --make-rshared /"]  # the kubelet's mounts must reach the containers
        # An empty folder may be left behind: removing it could pull it from under another cluster.
        steps += [f"mkdir -p {folder} && mount -t tmpfs -o mode=755 tmpfs {folder}" for folder in HIDDEN]
        steps.append("mkdir /run/lock /run/settings")
        for name, value in KERNEL_SETTINGS.items():
            file = f"/run/settings/{name.replace('/', '.')}"
            steps.append(f"echo {value} > {file} && mount --bind {file} /proc/sys/{name}")
        steps.append("ip link set lo up")
        self.run("sh", "-ec", "\n".join(steps))

    def _create_link(self) -> Network:
        """Connect this machine with the namespaces.

        The lock keeps two clusters that start at once from choosing the same addresses.
        """
        with Path("/run/osprey-dev-network.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            network = Network(_free_block(_used_networks()))
            first = str(self._first_process())
            _run("ip", "link", "add", self.identity, "type", "veth", "peer", "name", "eth0", "netns", first)
            _run("ip", "address", "add", f"{network.host}/30", "dev", self.identity)
            _run("ip", "link", "set", self.identity, "up")
            self.run("ip", "address", "add", f"{network.node}/30", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
            _run("ip", "route", "add", str(network.block), "via", network.node, "dev", self.identity)
        self.run("ip", "route", "add", "default", "via", network.host)
        return network

    def _cgroups(self) -> list[Path]:
        """The node's cgroup in every hierarchy: one with version 2, one for each controller with version 1."""
        if (CGROUPS / "cgroup.controllers").exists():
            return [CGROUPS / self.identity]
        hierarchies = [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]
        return [path / self.identity for path in hierarchies]

    def _create_cgroup(self) -> None:
        for group in self._cgroups():
            group.mkdir(exist_ok=True)
        cpus = CGROUPS / "cpuset" / self.identity
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts them empty, and then nothing may run there
            if (cpus / name).exists():
                (cpus / name).write_text((cpus.parent / name).read_text())

    def _remove_link(self) -> None:
        if Path("/sys/class/net", self.identity).exists():
            # Unchecked: the kernel removes it, too, some time after the namespaces' end.
            subprocess.run(["ip", "link", "delete", self.identity], check=False, capture_output=True)

    def _remove_cgroup(self) -> None:
        for group in self._cgroups():
            inner = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
            for path in (*inner, group):
                with contextlib.suppress(OSError):  # not there, or busy for a moment after its last process's end
                    path.rmdir()


def _used_networks() -> list[ipaddress.IPv4Network]:
    routes = json.loads(_run("ip", "-4", "-json", "route", "show", "table", "all"))
    return [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]


def _free_block(used: Sequence[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    for block in BLOCKS:
        if not any(block.overlaps(other) for other in used):
            return block
    raise RuntimeError(f"every network from {BLOCKS[0]} to {BLOCKS[-1]} is in use on this machine")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
