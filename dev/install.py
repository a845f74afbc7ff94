"""Put the operator on a development cluster by Helm: what the demonstration and the end-to-end tests share.

Every image is the development image, whose programs come from this machine through volumes; the pod template that
mounts them is the chart's value `podTemplate`, which users have for their node selectors and tolerations.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.cluster.cluster import Cluster
from dev.cluster.image import DEV, dev_image
from dev.cluster.volumes import pod_template, provide, withdraw
from dev.cpu_kernels.launch import environment
from dev.kubectl import Kubectl
from dev.settings import REPOSITORY
from osprey_api.naming import PLUGIN_PATH

CHART = REPOSITORY / "charts" / "osprey-operator"
METRICS_SERVICE = "osprey-osprey-operator-metrics"
SECRET = "s3"  # noqa: S105 - its name


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

    @property
    def kubectl(self) -> Kubectl:
        """The cluster, as a user's commands see it."""
        return Kubectl(self.cluster.environment())

    def up(self, values: Mapping[str, Any] | None = None) -> None:
        """Install the operator, or upgrade it, and return when it works.

        Args:
            values: more values of the chart.

        Raises:
            CommandError: the chart cannot be installed, or the operator does not come up.
        """
        self.cluster.load_image(dev_image())
        self.kubectl.namespace(self.namespace)
        provide(self.cluster.api(), self.namespace)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({**self.values(), **(values or {})}, file)
            file.flush()
            self.kubectl.install(CHART, self.namespace, Path(file.name))

    def prepare(self, namespace: str, claims: Mapping[str, Path]) -> None:
        """Make a namespace for resources: restricted, with the storage's keys and claims on folders of this machine."""
        self.kubectl.namespace(namespace)
        provide(self.cluster.api(), namespace, claims)
        self.kubectl.secret(namespace, SECRET, self.storage.access_key, self.storage.secret_key)

    def forget(self, namespace: str) -> None:
        """Delete a namespace with everything in it, and its volumes."""
        words = ("delete", "namespace", namespace, "--ignore-not-found", "--wait", "--timeout=180s")
        self.kubectl.run("kubectl", *words)
        withdraw(self.cluster.api(), namespace)

    def values(self) -> dict[str, Any]:
        """Return the chart's values for pods that run this machine's programs."""
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
            "podTemplate": _pod_template(),
            "storage": {
                "uri": self.storage.uri,
                "endpoint": self.storage.endpoint,
                "region": self.storage.region,
                "credentialsSecret": SECRET,
            },
            "pollSeconds": 2,
        }


def _pod_template() -> dict[str, Any]:
    """Return the template that mounts this machine's programs, with a CPU's variables for the server."""
    template = pod_template(env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    server = next(container for container in template["spec"]["containers"] if container["name"] == "server")
    # The merge puts our PYTHONPATH in place of the operator's, so it has to name the plugin's folder too.
    variables = environment({"PYTHONPATH": PLUGIN_PATH})
    server["env"] = [entry for entry in server["env"] if entry["name"] not in variables]
    server["env"] += [{"name": name, "value": value} for name, value in variables.items()]
    return template
