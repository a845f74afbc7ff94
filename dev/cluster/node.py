"""containerd, the kubelet, kube-proxy and CoreDNS, as processes of the node's namespaces."""

import json
import socket
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev import processes
from dev.cluster import binaries, image
from dev.cluster.api import Api
from dev.cluster.certificates import Authority
from dev.cluster.sandbox import Network, Sandbox

NAME = "local"
PROCESSES = {"sandbox", "containerd", "kubelet", "kube-proxy", "coredns"}
SOCKET = "/run/containerd/containerd.sock"
CNI_PROGRAMS = "/usr/lib/cni"


@dataclass(frozen=True)
class Node:
    """The one node of the cluster in a state folder."""

    state: Path
    network: Network

    @property
    def authority(self) -> Authority:
        """The cluster's certificates."""
        return Authority(self.state / "pki")

    @property
    def sandbox(self) -> Sandbox:
        """The namespaces in which it lives."""
        return Sandbox(self.state)

    def start(self, api: Api) -> None:
        """Start it and return when it takes pods and its DNS answers.

        Raises:
            processes.NotReadyError: a part does not come up.
        """
        self._start_containerd()
        self._start_kubelet(api.server)
        self._start_proxy()
        dns = self._start_dns(api)
        for archive in (image.pause_image(binaries.path("pause")), image.dev_image()):
            load_image(self.sandbox, archive)
        processes.wait("the node", lambda: _takes_pods(api), 120, self._log("kubelet"))
        processes.wait("DNS", lambda: answers_dns(self.network.dns), 60, self._log("coredns"), dns)

    def _log(self, name: str) -> Path:
        return self.state / f"{name}.log"

    def _start(self, name: str, *command: str | Path) -> int:
        return processes.start(str(self.state), name, self.sandbox.inside(*command), self._log(name))

    def _start_containerd(self) -> None:
        folder = self.state / "containerd"
        (folder / "cni").mkdir(parents=True)
        (folder / "config.toml").write_text(_containerd_config(folder))
        # Each pod is routed, not bridged: replies pass through the node's address translation without a kernel
        # module that a machine may lack. No masquerading: this machine knows the way back, and pods stay off the
        # networks behind it.
        plugin = {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-addresses",
                "ranges": [[{"subnet": self.network.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        chain = {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin, ports]}
        (folder / "cni" / "10-pods.conflist").write_text(json.dumps(chain, indent=1))
        pid = self._start("containerd", "containerd", "--config", folder / "config.toml")
        processes.wait("containerd", self._runtime_answers, 30, self._log("containerd"), pid)

    def _runtime_answers(self) -> bool:
        command = self.sandbox.inside("ctr", "--address", SOCKET, "--connect-timeout", "10s", "version")
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _start_kubelet(self, server: str) -> None:
        names = (f"IP:{self.network.node}", f"DNS:{NAME}")
        self.authority.issue("kubelet", f"/O=system:nodes/CN=system:node:{NAME}", names)
        kubeconfig = self.state / "kubelet.kubeconfig"
        kubeconfig.touch(mode=0o600)
        kubeconfig.write_text(self.authority.kubeconfig("kubelet", server))
        (self.state / "resolv.conf").write_text("")  # pods with dnsPolicy Default have no names
        (self.state / "kubelet.json").write_text(json.dumps(self._kubelet_config(), indent=1))
        self._start(
            "kubelet",
            binaries.path("kubelet"),
            f"--config={self.state}/kubelet.json",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={NAME}",
            f"--root-dir={self.state}/kubelet",
            f"--node-ip={self.network.node}",
        )

    def _kubelet_config(self) -> dict[str, Any]:
        authority = self.authority
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.network.node,
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": str(authority.certificate)},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.sandbox.identity}",
            "clusterDNS": [self.network.dns],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "enforceNodeAllocatable": ["pods"],
            "evictionHard": {
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "memory.available": "100Mi",
            },
            "failCgroupV1": False,
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,  # never: an image can't be fetched again
            "oomScoreAdj": 0,
            "podLogsDir": str(self.state / "pod-logs"),
            "resolvConf": str(self.state / "resolv.conf"),
            "tlsCertFile": str(authority.cert("kubelet")),
            "tlsPrivateKeyFile": str(authority.key("kubelet")),
        }

    def _start_proxy(self) -> None:
        self._start(
            "kube-proxy",
            binaries.path("kube-proxy"),
            f"--kubeconfig={self.state}/proxy.kubeconfig",
            f"--hostname-override={NAME}",
            "--proxy-mode=iptables",
            f"--cluster-cidr={self.network.pods}",
            "--conntrack-max-per-core=0",  # the limit belongs to the whole machine
            "--iptables-min-sync-period=100ms",
        )

    def _start_dns(self, api: Api) -> int:
        address = self.network.node
        (self.state / "Corefile").write_text(
            ".:53 {\n  errors\n  cache 5\n"
            f"  kubernetes cluster.local in-addr.arpa ip6.arpa {{\n    kubeconfig {self.state}/kubeconfig\n"
            "    pods insecure\n  }\n}\n"
        )
        pid = self._start("coredns", binaries.path("coredns"), "-conf", self.state / "Corefile")
        name, namespace = "kube-dns", "kube-system"
        ports = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"clusterIP": self.network.dns, "ports": ports},
        }
        endpoints = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        }
        api.apply(f"/api/v1/namespaces/{namespace}/services/{name}", service)
        api.apply(f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{name}", endpoints)
        return pid


def load_image(sandbox: Sandbox, archive: bytes) -> None:
    """Load an OCI image archive into the node.

    Raises:
        subprocess.CalledProcessError: it is not one.
    """
    command = sandbox.inside("ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", "-")
    subprocess.run(command, input=archive, check=True, capture_output=True)


def answers_dns(server: str) -> bool:
    """Whether a DNS server knows the API server's Service: the Service network and the DNS both work."""
    labels = ["kubernetes", "default", "svc", "cluster", "local"]
    name = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
    header = struct.pack(">6H", 1, 0x0100, 1, 0, 0, 0)  # one question, recursion desired
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.3)
        try:
            client.sendto(header + name + struct.pack(">2H", 1, 1), (server, 53))
            answer = client.recv(512)
        except OSError:
            return False
    _, flags, _, answers = struct.unpack(">4H", answer[:8])
    return flags & 0xF == 0 and int(answers) > 0


def _takes_pods(api: Api) -> bool:
    if not api.exists(f"/api/v1/nodes/{NAME}"):
        return False
    conditions = api.get(f"/api/v1/nodes/{NAME}")["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _containerd_config(folder: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    unused = ("aufs", "btrfs", "devmapper", "zfs")
    disabled = [f"io.containerd.snapshotter.v1.{name}" for name in unused] + ["io.containerd.internal.v1.opt"]
    return f"""version = 2
root = "{folder}/root"
state = "/run/containerd"
disabled_plugins = {json.dumps(disabled)}

[grpc]
  address = "{SOCKET}"

[{cri}]
  sandbox_image = "{image.PAUSE}"
  disable_apparmor = true
  disable_tcp_service = true
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"

[{cri}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[{cri}.containerd.runtimes.runc.options]
  SystemdCgroup = false

[{cri}.cni]
  bin_dir = "{CNI_PROGRAMS}"
  conf_dir = "{folder}/cni"
"""
