"""Where the demonstration runs: on a cluster of its own on this machine, or on one that somebody has already."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import boto3
import yaml
from botocore.config import Config

from dev.cluster.cluster import Cluster
from dev.demo.monitoring import Ask, page, prometheus
from dev.install import CHART, METRICS_SERVICE, Installation, Keys
from dev.kubectl import Kubectl
from dev.network import accepts, free_ports
from dev.services import REGION, Prometheus, S3Server
from osprey_api.common import Storage
from osprey_api.sources import S3Source, parse
from osprey_api.stages import StorageLocation

NAMESPACE = "demo"
OPERATOR_NAMESPACE = "osprey-system"
EXAMPLE_MODEL = "pvc://models/smollm2-135m-instruct"
EXAMPLE_DATA = "s3://osprey/data/"
VALUES_VARIABLE = "OSPREY_DEMO_VALUES"


class SiteError(RuntimeError):
    """The demonstration cannot run there; the message says what to do."""


class Site(Protocol):
    """A cluster with the operator, S3, the data and the target."""

    @property
    def kubectl(self) -> Kubectl:
        """The cluster, as a user's commands see it."""

    @property
    def storage(self) -> StorageLocation:
        """Where artifacts are, as this process reaches it."""

    @property
    def keys(self) -> Mapping[str, str]:
        """Variables with the keys for it."""

    def up(self, target: Path, data: Mapping[str, bytes]) -> None:
        """Make everything ready for the resources: `data` is file name -> JSON Lines."""

    def manifests(self, example: Path) -> str:
        """Return the example's resources as they are applied here."""

    def service(self, name: str, namespace: str) -> Any:
        """Reach a Service: a context manager that gives its base URL."""

    def metrics(self) -> Any:
        """Ask for the operator's figures: a context manager that gives a function."""

    def look(self) -> str:
        """Say how to look around."""


@dataclass
class Local:
    """A cluster of one node, SeaweedFS and Prometheus, all on this machine, all gone after `down`."""

    cluster: Cluster = field(default_factory=lambda: Cluster("demo"))
    bucket: str = "osprey"
    _s3: S3Server | None = None
    _prometheus: Prometheus | None = None

    @property
    def kubectl(self) -> Kubectl:
        """As `Site` says."""
        return Kubectl(self.cluster.environment())

    @property
    def s3(self) -> S3Server:
        """The S3 server, once it is up."""
        if self._s3 is None:
            raise SiteError("the S3 server is not up")
        return self._s3

    @property
    def storage(self) -> StorageLocation:
        """As `Site` says."""
        return StorageLocation(uri=f"s3://{self.bucket}/artifacts", endpoint=self.s3.endpoint, region=REGION)

    @property
    def keys(self) -> Mapping[str, str]:
        """As `Site` says."""
        return {"AWS_ACCESS_KEY_ID": self.s3.access_key, "AWS_SECRET_ACCESS_KEY": self.s3.secret_key}

    def up(self, target: Path, data: Mapping[str, bytes]) -> None:
        """As `Site` says."""
        self.cluster.up()
        # In the cluster's folder, so that they end with it, also after a crash.
        self._s3 = S3Server(self.cluster.state / "s3", self.cluster.host_address)
        self._s3.start()
        client = _client(self.storage, self.keys)
        client.create_bucket(Bucket=self.bucket)
        for name, body in data.items():
            client.put_object(Bucket=self.bucket, Key=f"data/{name}", Body=body)
        keys = Keys(
            self.storage.uri, self._s3.endpoint, REGION, access_key=self._s3.access_key, secret_key=self._s3.secret_key
        )
        installation = Installation(self.cluster, OPERATOR_NAMESPACE, keys)
        installation.up()
        installation.prepare(NAMESPACE, {"models": target.parent})
        with self.service(METRICS_SERVICE, OPERATOR_NAMESPACE) as url:
            address = url.removeprefix("http://")
        # Debian's Prometheus is built without Kubernetes service discovery, so it is told where the Service is.
        job = {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [address]}]}
        self._prometheus = Prometheus(self.cluster.state / "prometheus", [job])
        self._prometheus.start()

    def down(self) -> None:
        """Remove everything, also what an earlier demonstration left up."""
        self.cluster.down()

    def manifests(self, example: Path) -> str:
        """As `Site` says: the example is written for this site."""
        return "---\n".join(path.read_text() for path in sorted(example.glob("*.yaml")))

    @contextmanager
    def service(self, name: str, namespace: str) -> Iterator[str]:
        """As `Site` says: this machine reaches the addresses of its cluster's Services."""
        spec = self.kubectl.read("service", name, "-n", namespace)["spec"]
        yield f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    @contextmanager
    def metrics(self) -> Iterator[Ask]:
        """As `Site` says, by Prometheus."""
        if self._prometheus is None:
            raise SiteError("Prometheus is not up")
        yield prometheus(self._prometheus.url)

    def look(self) -> str:
        """As `Site` says."""
        url = self._prometheus.url if self._prometheus else ""
        return (
            f'  eval "$(python3 -m dev.cluster env --name {self.cluster.name})"\n'
            f"  Prometheus: {url}     S3: {self.s3.endpoint} (bucket {self.bucket})\n"
            "  to take it down: make demo-down"
        )


@dataclass(frozen=True)
class Existing:
    """The cluster that KUBECONFIG names, with the images, the storage and whatever else the chart's values name.

    Attributes:
        values: the chart's values file, with `storage` set. Its bucket also gets the data and the target.
        keys: of the storage, from this process's environment.
    """

    values: Path
    keys: Mapping[str, str]
    kubectl: Kubectl = field(default_factory=Kubectl)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Existing":
        """Read what is needed from the environment.

        Raises:
            SiteError: something is missing.
        """
        names = (VALUES_VARIABLE, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        if missing := [name for name in names if not environment.get(name)]:
            raise SiteError(
                f"KUBECONFIG is set, so that cluster is used; also set {', '.join(missing)}: a values "
                "file of charts/osprey-operator with images that the cluster can pull and with storage.uri, endpoint "
                "and credentialsSecret, and the keys of that storage. Unset KUBECONFIG for a cluster on this machine"
            )
        return cls(Path(environment[VALUES_VARIABLE]), {name: environment[name] for name in names[1:]})

    @property
    def _storage(self) -> Storage:
        content = yaml.safe_load(self.values.read_text()) or {}
        return Storage.model_validate(content.get("storage") or {})

    @property
    def storage(self) -> StorageLocation:
        """As `Site` says."""
        storage = self._storage
        return StorageLocation(uri=storage.uri, endpoint=storage.endpoint, region=storage.region)

    @property
    def _folder(self) -> S3Source:
        """Where data and target go: beside the artifacts."""
        source = parse(self.storage.uri)
        if not isinstance(source, S3Source):
            raise SiteError(f"storage.uri is {self.storage.uri}: write s3://BUCKET/PREFIX")
        return S3Source(source.bucket, f"{source.key.rstrip('/')}/demo".lstrip("/"))

    def up(self, target: Path, data: Mapping[str, bytes]) -> None:
        """As `Site` says."""
        client, folder = _client(self.storage, self.keys), self._folder
        for name, body in data.items():
            client.put_object(Bucket=folder.bucket, Key=f"{folder.key}/data/{name}", Body=body)
        for file in sorted(target.iterdir()):
            client.upload_file(str(file), folder.bucket, f"{folder.key}/models/{target.name}/{file.name}")
        self.kubectl.namespace(OPERATOR_NAMESPACE)
        self.kubectl.install(CHART, OPERATOR_NAMESPACE, self.values)
        self.kubectl.namespace(NAMESPACE)
        if secret := self._storage.credentials_secret:
            self.kubectl.secret(NAMESPACE, secret, *(self.keys[name] for name in sorted(self.keys)))

    def manifests(self, example: Path) -> str:
        """As `Site` says: the example's claim and bucket become folders of this storage."""
        folder = f"s3://{self._folder.bucket}/{self._folder.key}"
        text = "---\n".join(path.read_text() for path in sorted(example.glob("*.yaml")))
        model = EXAMPLE_MODEL.rpartition("/")[2]
        return text.replace(EXAMPLE_MODEL, f"{folder}/models/{model}").replace(EXAMPLE_DATA, f"{folder}/data/")

    @contextmanager
    def service(self, name: str, namespace: str) -> Iterator[str]:
        """As `Site` says, by kubectl port-forward."""
        port = self.kubectl.read("service", name, "-n", namespace)["spec"]["ports"][0]["port"]
        (local,) = free_ports(1)
        command = ["kubectl", "port-forward", "-n", namespace, f"service/{name}", f"{local}:{port}"]
        with tempfile.TemporaryFile() as log:
            forward = subprocess.Popen(command, env=self.kubectl.environment, stdout=log, stderr=log)
            try:
                _wait_for(local, forward)
                yield f"http://127.0.0.1:{local}"
            finally:
                forward.terminate()
                forward.wait()

    @contextmanager
    def metrics(self) -> Iterator[Ask]:
        """As `Site` says, from the operator's own page: where the cluster's Prometheus is, is not known here."""
        with self.service(METRICS_SERVICE, OPERATOR_NAMESPACE) as url:
            yield page(f"{url}/metrics")

    def look(self) -> str:
        """As `Site` says."""
        return (
            f"  to take it down: kubectl delete namespace {NAMESPACE}; helm uninstall osprey -n {OPERATOR_NAMESPACE}\n"
            f"  data and target are in s3://{self._folder.bucket}/{self._folder.key}"
        )


def _client(storage: StorageLocation, keys: Mapping[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=storage.endpoint,
        region_name=storage.region,
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        config=Config(signature_version="s3v4"),
    )


def _wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not accepts("127.0.0.1", port):
        if process.poll() is not None or time.monotonic() > end:
            raise SiteError("kubectl port-forward does not get through: is the pod running?")
        time.sleep(0.2)


def choose(environment: Mapping[str, str]) -> Local | Existing:
    """Return the site that the environment asks for: KUBECONFIG's cluster, unless that is one of ours.

    Raises:
        SiteError: it asks for a cluster, and does not say what is needed there.
    """
    local = Local()
    named = environment.get("KUBECONFIG")
    if not named or Path(named) == local.cluster.kubeconfig:
        return local
    return Existing.from_environment(environment)


def json_lines(name: str, values: Iterator[str]) -> bytes:
    """Write each value as a JSON object with one field, on a line."""
    return "".join(f"{json.dumps({name: value})}\n" for value in values).encode()


@contextmanager
def variables(added: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while: our own reading of artifacts finds keys where a pod's does."""
    own = os.environ  # noqa: TID251 - the runtime reads them there
    before = {name: own.get(name) for name in added}
    own.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value
