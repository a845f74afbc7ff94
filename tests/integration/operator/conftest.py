"""The operator as a process against a real API server with its controllers; the tests play the kubelet.

Only what a kubelet would do is done by hand: the statuses of pods. Jobs, ReplicaSets, quotas and garbage are the
business of the real controllers.
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dev.cluster.api import ApiError
from osprey_api import schema
from osprey_api.conditions import EXIT_CODE_OF
from osprey_api.naming import LABEL_NAME, LABEL_STAGE
from osprey_api.stages import Outcome
from tests.operator.world import outcome_of, task_of

PATHS = {
    "OspreyBackbone": ("/apis/osprey.dev/v1alpha1", "ospreybackbones"),
    "OspreyDrafter": ("/apis/osprey.dev/v1alpha1", "ospreydrafters"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ReplicaSet": ("/apis/apps/v1", "replicasets"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "Event": ("/api/v1", "events"),
    "ResourceQuota": ("/api/v1", "resourcequotas"),
}
CHILDREN = ("Job", "Pod", "Deployment", "ReplicaSet", "Service", "ConfigMap", "Secret")


@dataclass
class Place:
    """A namespace of the cluster, as its users and its kubelet see it."""

    cluster: Any
    namespace: str

    def __post_init__(self) -> None:
        self.api = self.cluster.api()

    # --- objects

    def path(self, kind, name="", query=""):
        root, plural = PATHS[kind]
        path = f"{root}/namespaces/{self.namespace}/{plural}"
        return (f"{path}/{name}" if name else path) + query

    def apply(self, kind, name, spec):
        api_version = "osprey.dev/v1alpha1"
        body = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.api.apply(self.path(kind, name), body)

    def create(self, kind, body):
        self.api._call("POST", self.path(kind), json.dumps(body))

    def patch(self, kind, name, body, subresource=""):
        path = self.path(kind, name) + (f"/{subresource}" if subresource else "")
        self.api._call("PATCH", path, json.dumps(body), "application/merge-patch+json")

    def get(self, kind, name):
        return self.api.get(self.path(kind, name))

    def list(self, kind, **labels):
        chosen = ",".join(f"{key}={value}" for key, value in labels.items())
        return self.api.get(self.path(kind, query=f"?labelSelector={chosen}"))["items"]

    def delete(self, kind, name):
        self.api.delete(self.path(kind, name))

    # --- what the tests ask

    def until(self, question, seconds=60.0, what=""):
        """Ask until the answer is true, and return it."""
        end = time.monotonic() + seconds
        while True:
            answer = question()
            if answer:
                return answer
            if time.monotonic() > end:
                raise AssertionError(f"in vain: {what or question}")
            time.sleep(0.05)

    def condition(self, kind, name, condition):
        found = self.get(kind, name).get("status", {}).get("conditions", [])
        return next((entry for entry in found if entry["type"] == condition), None)

    def until_condition(self, kind, name, condition, status, reason=None):
        def met():
            entry = self.condition(kind, name, condition)
            good = entry is not None and entry["status"] == status and reason in {None, entry["reason"]}
            return entry if good else None

        try:
            return self.until(met)
        except AssertionError:
            status = json.dumps(self.get(kind, name).get("status"), indent=1)
            raise AssertionError(f"{name} has no {condition}={status} {reason or ''}: {status}") from None

    def stage(self, kind, name, stage):
        return next((e for e in self.get(kind, name).get("status", {}).get("stages", []) if e["name"] == stage), {})

    def jobs(self, stage):
        return self.list("Job", **{LABEL_STAGE: stage})

    # --- what a kubelet does

    def pod(self, resource, stage, seconds=60.0):
        """The pod that a Job's controller made for a stage."""

        def found():
            pods = self.list("Pod", **{LABEL_STAGE: stage, LABEL_NAME: resource})
            alive = [
                pod
                for pod in pods
                if pod["status"]["phase"] in {"Pending", "Running"} and "deletionTimestamp" not in pod["metadata"]
            ]
            return alive[0] if alive else None

        return self.until(found, seconds, f"a pod of {stage} of {resource}")

    def start(self, resource, stage):
        pod = self.pod(resource, stage)
        status = {"phase": "Running", "containerStatuses": [status_of("stage", {"running": {}})]}
        self.patch("Pod", pod["metadata"]["name"], {"status": status}, "status")

    def end(self, resource, stage, outcome, code=0):
        pod = self.pod(resource, stage)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        terminated = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "message": outcome,
            "startedAt": now,
            "finishedAt": now,
        }
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [status_of("stage", {"terminated": terminated})],
        }
        self.patch("Pod", pod["metadata"]["name"], {"status": status}, "status")

    def succeed(self, resource, stage, result=None):
        task = task_of({"spec": {"template": {"spec": self.pod(resource, stage)["spec"]}}})
        self.end(resource, stage, outcome_of(task, result).model_dump_json())

    def fail(self, resource, stage, reason, message="so it is"):
        outcome = Outcome(failure=reason, message=message)
        self.end(resource, stage, outcome.model_dump_json(), int(EXIT_CODE_OF[reason]))

    def serve(self, resource):
        """Let every server's pod that is there be ready."""
        for pod in self.list("Pod", **{"app.kubernetes.io/component": "server", LABEL_NAME: resource}):
            if pod["status"]["phase"] == "Running" or "deletionTimestamp" in pod["metadata"]:
                continue
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            with suppress(ApiError):  # it may be gone by now: a rollout is going on
                self.patch("Pod", pod["metadata"]["name"], {"status": status}, "status")

    def keep_serving(self, resource, done, seconds=90.0):
        """Make servers ready as they come until something is done."""

        def step():
            self.serve(resource)
            return done()

        return self.until(step, seconds)

    def left(self):
        """Names of all children that are there."""
        return [
            f"{kind}/{each['metadata']['name']}"
            for kind in CHILDREN
            for each in self.list(kind)
            if each["metadata"]["name"] != "kube-root-ca.crt"
        ]


def status_of(name, state):
    return {
        "name": name,
        "image": "x",
        "imageID": "x",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@dataclass
class Operator:
    """The operator's process."""

    kubeconfig: Path
    namespace: str
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    health_port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)

    def start(self):
        environment = {
            **os.environ,  # noqa: TID251 - the process is this one's child
            "KUBECONFIG": str(self.kubeconfig),
            "OSPREY_NAMESPACES": self.namespace,
            "OSPREY_POLL_SECONDS": "1",
            "OSPREY_RETRY_BASE_SECONDS": "2",
            "OSPREY_RETRY_MAX_SECONDS": "4",
            "OSPREY_RESYNC_SECONDS": "3",
            "OSPREY_HEALTH_PORT": str(self.health_port),
            "OSPREY_METRICS_PORT": str(self.metrics_port),
            "PYTHONWARNINGS": "error::RuntimeWarning",
            **self.environment,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "osprey_operator"], env=environment, stdout=log, stderr=log
            )

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def stop(self):
        """Ask it to end; return its exit code."""
        self.process.terminate()
        return self.process.wait(15)


@pytest.fixture(scope="session")
def osprey_cluster(api_cluster):
    for path in schema.rendered():
        api_cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    api_cluster.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")
    return api_cluster


@pytest.fixture
def place(osprey_cluster, namespace):
    return Place(osprey_cluster, namespace(osprey_cluster))


@pytest.fixture
def operator(place, tmp_path):
    """A running operator; what it wrote is shown if the test fails."""
    with running(place, tmp_path) as operator:
        yield operator


@contextmanager
def running(place, tmp_path, **environment):
    operator = Operator(place.cluster.kubeconfig, place.namespace, tmp_path / "operator.log", environment)
    operator.start()
    try:
        yield operator
    finally:
        if operator.process.poll() is None:
            operator.kill()
        sys.stdout.write(operator.log.read_text())
