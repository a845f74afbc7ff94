"""Put the operator on a development cluster by Helm: what the demonstration and the end-to-end tests share.

Every image is the development image, whose programs come from this machine through volumes; the pod template that
mounts them is the chart's value `podTemplate`, which users have for their node selectors and tolerations.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.cluster.cluster import Cluster
from dev.cluster.image import DEV, dev_image
from dev.cluster.volumes import pod_template, provide, withdraw
from dev.cpu_kernels.launch import environment
from dev.settings import REPOSITORY
from osprey_api.naming import PLUGIN_PATH

CHART = REPOSITORY / "charts" / "osprey-operator"
SECRET = "s3"  # noqa: S105 - its name


class CommandError(RuntimeError):
    """kubectl or Helm refused; the message is its own."""


@dataclass(frozen=True)
class Keys:
    """Where artifacts are kept on a development cluster, and the keys for it."""

    uri: str
    endpoint: str
    region: str
    access_key: str
    secret_key: str


@dataclass(frozen=True)
class Installation:
    """The operator in a namespace of its own, looking after all others.

    Attributes:
        cluster: one with a node.
        namespace: of the operator.
        storage: the default of all resources; `prepare` puts its keys into their namespaces.
    """

    cluster: Cluster
    namespace: str
    storage: Keys

    def up(self, values: Mapping[str, Any] | None = None) -> None:
        """Install the operator, or upgrade it, and return when it works.

        Args:
            values: more values of the chart.

        Raises:
            CommandError: the chart cannot be installed, or the operator does not come up.
        """
        self.cluster.load_image(dev_image())
        self._namespace(self.namespace)
        provide(self.cluster.api(), self.namespace)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({**self._values(), **(values or {})}, file)
            file.flush()
            self.run(
                *("helm", "upgrade", "--install", "osprey", CHART, "--namespace", self.namespace),
                *("--values", file.name, "--wait", "--timeout", "2m"),
            )

    def prepare(self, namespace: str, claims: Mapping[str, Path]) -> None:
        """Make a namespace for resources: restricted, with the storage's keys and claims on folders of this machine."""
        self._namespace(namespace)
        provide(self.cluster.api(), namespace, claims)
        self.secret(namespace, SECRET, self.storage.access_key, self.storage.secret_key)

    def secret(self, namespace: str, name: str, access_key: str, secret_key: str) -> None:
        """Make or replace a Secret with S3 keys."""
        keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace},
                "stringData": keys,
            }
        )

    def forget(self, namespace: str) -> None:
        """Delete a namespace with everything in it, and its volumes."""
        self.run("kubectl", "delete", "namespace", namespace, "--ignore-not-found", "--wait", "--timeout=180s")
        withdraw(self.cluster.api(), namespace)

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Apply objects as a user would."""
        self.run(
            "kubectl", "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        )

    def read(self, *words: str) -> Any:
        """Return what `kubectl get ... -o json` says."""
        return json.loads(self.run("kubectl", "get", *words, "-o", "json"))

    def run(self, *words: str | Path, text: str | None = None) -> str:
        """Run kubectl or Helm on the cluster and return what it prints.

        Raises:
            CommandError: it fails.
        """
        command = [str(word) for word in words]
        own = {**os.environ, **self.cluster.environment()}  # noqa: TID251 - kubectl and Helm want HOME and the like
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=own)
        if done.returncode:
            raise CommandError(f"{' '.join(command[:4])} ...: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def _namespace(self, name: str) -> None:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    def _values(self) -> dict[str, Any]:
        repository, _, tag = DEV.rpartition(":")
        image = {"repository": repository, "tag": tag}
        own = pod_template(containers=["operator"])["spec"]
        (operator,) = own["containers"]
        return {
            "image": image,
            "images": {"trainer": image, "serving": image, "sglang": image},
            "imagePullPolicy": "Never",
            "command": ["python3", "-m", "osprey_operator"],
            "extraEnv": operator["env"],
            "extraVolumes": own["volumes"],
            "extraVolumeMounts": operator["volumeMounts"],
            "podTemplate": self._pod_template(),
            "storage": {
                "uri": self.storage.uri,
                "endpoint": self.storage.endpoint,
                "region": self.storage.region,
                "credentialsSecret": SECRET,
            },
            "pollSeconds": 2,
            "metrics": {"port": 8080},
        }

    def _pod_template(self) -> dict[str, Any]:
        """Return the template that mounts this machine's programs, with a CPU's variables for the server."""
        template = pod_template(env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        server = next(container for container in template["spec"]["containers"] if container["name"] == "server")
        # The merge puts our PYTHONPATH in place of the operator's, so it has to name the plugin's folder too.
        variables = environment({"PYTHONPATH": PLUGIN_PATH})
        server["env"] = [entry for entry in server["env"] if entry["name"] not in variables]
        server["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        return template
