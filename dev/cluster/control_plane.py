"""etcd, the API server, the controllers and the scheduler of one cluster, as processes of this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dev import processes
from dev.cluster import binaries
from dev.cluster.api import Api
from dev.cluster.certificates import Authority
from dev.network import free_ports

ADMIN = "admin"
PROCESSES = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
USERS = {
    ADMIN: "/O=system:masters/CN=admin",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
}


@dataclass(frozen=True)
class ControlPlane:
    """What runs in one state folder.

    Attributes:
        state: the cluster's state folder, which is also the name of its process group.
        address: where the API server listens.
        services: range of the Services' addresses.
        service_address: the first one of the range, the API server's own Service.
        has_node: whether pods will run, and need endpoints for the API server's Service.
    """

    state: Path
    address: str
    services: str
    service_address: str
    has_node: bool

    @property
    def authority(self) -> Authority:
        """The cluster's certificates."""
        return Authority(self.state / "pki")

    def start(self) -> Api:
        """Start all of it and return a client once the API server and the controllers work.

        Raises:
            processes.NotReadyError: a part does not come up.
        """
        etcd_port, etcd_peer_port = free_ports(2)
        (port,) = free_ports(1, self.address)
        server = f"https://{self.address}:{port}"
        self._write_credentials(server)
        etcd = f"http://127.0.0.1:{etcd_port}"
        self._start(
            "etcd",
            "etcd",
            {
                "data-dir": self.state / "etcd",
                "listen-client-urls": etcd,
                "advertise-client-urls": etcd,
                "listen-peer-urls": f"http://127.0.0.1:{etcd_peer_port}",
            },
        )
        api = Api(server, self.authority, ADMIN)
        pid = self._start("kube-apiserver", binaries.path("kube-apiserver"), self._api_server_flags(etcd, port))
        processes.wait("the API server", api.is_ready, 120, self.log("kube-apiserver"), pid)
        pki = self.authority.folder
        self._start(
            "kube-controller-manager",
            binaries.path("kube-controller-manager"),
            {
                "kubeconfig": self.state / "controllers.kubeconfig",
                "leader-elect": "false",
                "secure-port": "0",
                "service-account-private-key-file": pki / "sa.key",
                "root-ca-file": self.authority.certificate,
                "use-service-account-credentials": "true",
                # It starts with a hundred calls: at the default rate they take four seconds.
                "kube-api-qps": "1000",
                "kube-api-burst": "1000",
            },
        )
        self._start(
            "kube-scheduler",
            binaries.path("kube-scheduler"),
            {
                "kubeconfig": self.state / "scheduler.kubeconfig",
                "leader-elect": "false",
                "secure-port": "0",
            },
        )
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        controllers = self.log("kube-controller-manager")
        processes.wait("the controller manager", lambda: api.exists(account), 60, controllers)
        return api

    def log(self, name: str) -> Path:
        """The log of one of the processes."""
        return self.state / f"{name}.log"

    def _start(self, name: str, program: str | Path, flags: Mapping[str, object]) -> int:
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        return processes.start(str(self.state), name, [program, *words], self.log(name))

    def _write_credentials(self, server: str) -> None:
        authority = self.authority
        authority.create()
        names = (f"IP:{self.address}", f"IP:{self.service_address}", "DNS:localhost", "DNS:kubernetes.default.svc")
        authority.issue("apiserver", "/CN=kube-apiserver", names)
        for name, subject in USERS.items():
            authority.issue(name, subject)
            file = self.state / ("kubeconfig" if name == ADMIN else f"{name}.kubeconfig")
            file.touch(mode=0o600)
            file.write_text(authority.kubeconfig(name, server))

    def _api_server_flags(self, etcd: str, port: int) -> dict[str, object]:
        authority, sa_key = self.authority, self.authority.folder / "sa.key"
        return {
            "etcd-servers": etcd,
            "bind-address": self.address,
            "secure-port": port,
            # Loopback may not be announced. Without a node nobody follows the announcement.
            "advertise-address": self.address if self.has_node else self.service_address,
            "endpoint-reconciler-type": "lease" if self.has_node else "none",
            "service-cluster-ip-range": self.services,
            "tls-cert-file": authority.cert("apiserver"),
            "tls-private-key-file": authority.key("apiserver"),
            "client-ca-file": authority.certificate,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": sa_key,
            "service-account-signing-key-file": sa_key,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "kubelet-preferred-address-types": "InternalIP",
            "kubelet-client-certificate": authority.cert(ADMIN),
            "kubelet-client-key": authority.key(ADMIN),
        }
