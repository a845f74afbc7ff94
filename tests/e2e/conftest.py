"""The operator, installed by Helm on a real cluster, and tenants with a tiny model of their own."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dev.install import Installation, Keys
from dev.kubectl import CommandError, Kubectl

BUCKET = "e2e"
CPU = ["--device=cpu", "--dtype=float32", "--mem-fraction-static=0.3", "--max-total-tokens=20000",
       "--skip-server-warmup", "--sleep-on-idle", "--speculative-draft-attention-backend=intel_amx"]  # fmt: skip


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of models; `tiny` in it is a target that answers."""
    sys.path.insert(0, str(Path(__file__).parent))
    import tiny_target  # noqa: PLC0415 - it needs torch, which takes seconds to import

    folder = tmp_path_factory.mktemp("models")
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o5 != 0o5 and parent.stat().st_uid == os.getuid():
            parent.chmod(0o755)  # pytest's folders are private, and pods have another user
    tiny_target.make(folder / "tiny")
    return tiny_target, folder


@pytest.fixture(scope="session")
def installation(node_cluster, pod_s3):
    """The operator, with short delays, and S3 as the default storage."""
    pod_s3.make_bucket(BUCKET)
    keys = Keys(f"s3://{BUCKET}/artifacts", pod_s3.endpoint, pod_s3.region, pod_s3.access_key, pod_s3.secret_key)
    installed = Installation(node_cluster, "osprey-system", keys)
    installed.up({"pollSeconds": 1, "retryBaseSeconds": 4, "retryMaxSeconds": 10, "resyncSeconds": 20})
    return installed


@dataclass(frozen=True)
class Tenant:
    """A namespace with the storage's keys, the models, and data in the bucket."""

    installation: Installation
    namespace: str
    s3: Any
    models: Path

    @property
    def kubectl(self) -> Kubectl:
        return self.installation.kubectl

    def put(self, name: str, lines: list[str]) -> str:
        """Upload a JSON Lines file and return its URI."""
        body = "".join(f"{line}\n" for line in lines).encode()
        self.s3.client().put_object(Bucket=BUCKET, Key=f"{self.namespace}/{name}.jsonl", Body=body)
        return self.uri(name)

    def uri(self, name: str) -> str:
        """Where `put` puts a file."""
        return f"s3://{BUCKET}/{self.namespace}/{name}.jsonl"

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl.apply(*({**m, "metadata": {**m["metadata"], "namespace": self.namespace}} for m in manifests))

    def read(self, kind: str, name: str) -> dict[str, Any]:
        return self.kubectl.read(kind, name, "-n", self.namespace)

    def items(self, *words: str) -> list[dict[str, Any]]:
        return self.kubectl.read(*words, "-n", self.namespace)["items"]

    def delete(self, kind: str, name: str) -> None:
        self.kubectl.run("kubectl", "delete", kind, name, "-n", self.namespace, "--timeout=60s")

    def until(self, what: str, done: Callable[[], Any], seconds: float) -> Any:
        """Return the first true value; on a time-out fail with all that the cluster says."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := done():
                return value
            time.sleep(0.5)
        verdict = f"{what}: not within {seconds:.0f} s"
        pytest.fail(f"{verdict}\n{self.story()}\n{verdict}")  # last, too: of a long log often only the end is kept

    def condition(self, kind: str, name: str, condition: str) -> dict[str, Any]:
        """Return a condition of a resource; an empty one before the operator has said anything."""
        conditions = self.read(kind, name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == condition), {"status": "", "reason": "", "message": ""})

    def until_reason(self, kind: str, name: str, condition: str, reason: str, seconds: float = 120) -> str:
        """Return the message once a condition has a reason."""

        def has_it() -> str | None:
            found = self.condition(kind, name, condition)
            return (found["message"] or "-") if found["reason"] == reason else None

        return self.until(f"{kind} {name} {condition} for {reason}", has_it, seconds)

    def until_true(self, kind: str, name: str, condition: str, seconds: float = 300) -> None:
        """Return once a condition is true."""
        self.until(
            f"{kind} {name} {condition}", lambda: self.condition(kind, name, condition)["status"] == "True", seconds
        )

    def stage(self, kind: str, name: str, stage: str) -> dict[str, Any]:
        stages = self.read(kind, name).get("status", {}).get("stages", [])
        return next((entry for entry in stages if entry["name"] == stage), {"state": ""})

    def story(self) -> str:
        """All that helps to see why something did not happen."""
        asked = (("get", "osprey", "-o", "yaml"), ("get", "pods,jobs,deployments"), ("get", "events"))
        said = [self.kubectl.run("kubectl", *words, "-n", self.namespace) for words in asked]
        for pod in self.items("pods"):
            name = pod["metadata"]["name"]
            words = ("logs", name, "-n", self.namespace, "--all-containers", "--tail=30")
            try:
                said.append(f"--- {name}\n{self.kubectl.run('kubectl', *words)}")
            except CommandError as error:
                said.append(f"--- {name}\n{error}")
        words = ("logs", "deployment/osprey-osprey-operator", "-n", self.installation.namespace, "--tail=60")
        said.append(self.kubectl.run("kubectl", *words))
        return "\n".join(said)

    # --- what tenants apply

    def backbone(self, text: str) -> dict[str, Any]:
        """A backbone of the tiny target itself."""
        return {
            "apiVersion": "osprey.dev/v1alpha1",
            "kind": "OspreyBackbone",
            "metadata": {"name": "tiny-2l"},
            "spec": {
                "source": {"uri": "pvc://models/tiny"},
                "layers": 2,
                "pretraining": {
                    "data": [{"uri": text}],
                    "steps": 60,
                    "sequenceLength": 64,
                    "globalBatchSize": 8,
                    "learningRate": 2e-3,
                    "precision": "FP32",
                },
                "job": {"gpusPerNode": 0, "gracePeriodSeconds": 30, "checkpointEverySteps": 30},
            },
        }

    def drafter(self, name: str, data: dict[str, str], **spec: Any) -> dict[str, Any]:
        """A drafter of the tiny target; `data` is domain -> URI."""
        return {
            "apiVersion": "osprey.dev/v1alpha1",
            "kind": "OspreyDrafter",
            "metadata": {"name": name},
            "spec": {
                "target": {"uri": "pvc://models/tiny", "gpus": 0, "serverArgs": CPU},
                "data": [{"name": domain, "uri": uri} for domain, uri in data.items()],
                "regeneration": {"maxTokens": 48, "concurrency": 16},
                "distillation": {
                    "epochs": 12,
                    "sequenceLength": 128,
                    "globalBatchSize": 4,
                    "learningRate": 2e-3,
                    "unroll": 3,
                    "draftVocabSize": 256,
                    "precision": "FP32",
                    "teacher": {"mode": "Captured"},
                },
                "evaluation": {
                    "samples": 10,
                    "maxTokens": 48,
                    "concurrency": 4,
                    "gate": {"minSpeedup": 0, "minAcceptanceLength": 1.05, "minIdenticalOutputs": 1},
                },
                "job": {"gpusPerNode": 0, "gracePeriodSeconds": 30, "checkpointEverySteps": 20},
                **spec,
            },
        }

    # --- faults

    def kill(self, pod: dict[str, Any], words: str) -> None:
        """SIGKILL the process of a pod's container whose command line holds some words, as the kernel would."""
        uid = pod["metadata"]["uid"]
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                groups = (entry / "cgroup").read_text()
            except (OSError, NotADirectoryError):
                continue
            if entry.name.isdigit() and words in command and (uid in groups or uid.replace("-", "_") in groups):
                os.kill(int(entry.name), signal.SIGKILL)
                return
        raise LookupError(f"no process of pod {pod['metadata']['name']} has {words!r} in its command line")


@pytest.fixture(scope="module")
def tenant(installation, pod_s3, tiny, request):
    """A tenant of a module's own, gone afterwards."""
    name = f"e2e-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]}"
    installation.prepare(name, {"models": tiny[1]})
    yield Tenant(installation, name, pod_s3, tiny[1])
    installation.forget(name)
