"""Resources and tasks to build from; each test changes what it is about."""

from typing import Any

from osprey_api.backbone import OspreyBackboneSpec
from osprey_api.common import Storage
from osprey_api.drafter import OspreyDrafterSpec
from osprey_api.stages import ArtifactRef, Execution, InputRole, ModelFacts, Pinned, StageName, StageTask
from osprey_api.status import Resolved
from osprey_operator.manifests.server import server_objects
from osprey_operator.manifests.stage_job import stage_job
from osprey_operator.state import Owner, Settings

UID = "3f0c2f5e-7d0b-4f7e-9c55-0a1b2c3d4e5f"
FINGERPRINT = "ab12" * 16
TARGET = {"uri": "hf://Qwen/Qwen3-8B", "revision": "c0ffee"}
ARTIFACT = ArtifactRef(uri="s3://drafters/prod/ml/distil/f", digest="sha256:" + "0" * 64)
PROMPTS = [
    {
        "name": "math",
        "source": {"uri": "pvc://prompts/math.jsonl", "digest": "sha256:" + "1" * 64},
        "promptField": "prompt",
        "samples": None,
        "train": True,
        "evaluate": True,
    }
]
HELD_OUT = {"samples": 8, "seed": 0}
OPTIMIZATION = {
    "learningRate": 1e-4,
    "schedule": "Cosine",
    "warmupRatio": 0.04,
    "weightDecay": 0.0,
    "clipNorm": 1.0,
    "emaDecay": None,
    "globalBatchSize": 2,
    "sequenceLength": 128,
    "precision": "BF16",
    "seed": 0,
}
ENGINE = {"version": "0.5.23", "serverArgs": ["--dtype", "bfloat16"], "tensorParallel": 2}
ANSWERING = {
    "target": TARGET,
    "prompts": PROMPTS,
    "heldOut": HELD_OUT,
    "maxTokens": 64,
    "concurrency": 8,
    "engine": ENGINE,
}
CONFIGS: dict[StageName, dict[str, Any]] = {
    StageName.RESOLVE: {
        "model": {"uri": "pvc://models/qwen"},
        "data": [{"name": "math", "uri": "pvc://prompts/math.jsonl", "kind": "Prompts", "field": "prompt"}],
        "ownerUid": UID,
    },
    StageName.PRUNE: {"source": TARGET, "layers": 2},
    StageName.TOKENIZE: {
        "tokenizer": TARGET,
        "data": [{"source": {"uri": "s3://text/a.jsonl"}, "textField": "text"}],
    },
    StageName.PRETRAIN: {"steps": 10, "lossVocabSize": None, "freezeEmbedding": False, "optimization": OPTIMIZATION},
    StageName.REGENERATE: {**{k: v for k, v in ANSWERING.items() if k != "concurrency"}, "temperature": 0.0, "seed": 0},
    StageName.CAPTURE: {"target": TARGET, "sequenceLength": 512, "precision": "BF16"},
    StageName.ADOPT: {"target": TARGET},
    StageName.CONVERT: {"target": TARGET, "draftVocabSize": 32000, "seed": 0},
    StageName.DISTIL: {
        "target": TARGET,
        "epochs": 3,
        "unroll": 5,
        "decay": 0.8,
        "freezeEmbedding": False,
        "teacher": "Online",
        "optimization": OPTIMIZATION,
    },
    StageName.BASELINE: ANSWERING,
    StageName.EVALUATE: {**ANSWERING, "speculation": {"steps": 5, "topK": 1, "draftTokens": 6}},
}


def owner(name: str = "qwen3-8b", kind: str = "OspreyDrafter", namespace: str = "ml") -> Owner:
    return Owner("osprey.dev/v1alpha1", kind, name, namespace, UID, generation=1)


def drafter(**changes: Any) -> OspreyDrafterSpec:
    spec = {
        "target": {"uri": "hf://Qwen/Qwen3-8B", "tensorParallel": 2},
        "data": [{"name": "math", "uri": "pvc://prompts/math.jsonl"}],
        "serving": {},
    }
    return OspreyDrafterSpec.model_validate({**spec, **changes})


def backbone(**changes: Any) -> OspreyBackboneSpec:
    return OspreyBackboneSpec.model_validate({"source": {"uri": "hf://Qwen/Qwen3-4B"}, **changes})


STORAGE = Storage(uri="s3://drafters/prod", endpoint="https://s3.example", region="eu", credentials_secret="s3")
SETTINGS = Settings()
RESOLVED = Resolved(
    fingerprint=FINGERPRINT,
    model=Pinned.model_validate(TARGET),
    facts=ModelFacts(architecture="Qwen3ForCausalLM", layers=36, hidden_size=4096, vocab_size=151936, size_bytes=1),
)


def task(stage: StageName, *, nodes: int = 1, **changes: Any) -> StageTask:
    config = {"stage": stage, **CONFIGS[stage], **changes}
    inputs = {InputRole.DRAFTER: ARTIFACT} if stage is StageName.EVALUATE else {}
    return StageTask(
        fingerprint=FINGERPRINT,
        namespace="ml",
        resource="ospreydrafter/qwen3-8b",
        storage={"uri": STORAGE.uri, "endpoint": STORAGE.endpoint, "region": STORAGE.region},
        config=config,
        inputs=inputs,
        execution=Execution(nodes=nodes),
    )


def objects(stage: StageName = StageName.DISTIL, **changes: Any) -> list[dict[str, Any]]:
    """The objects of a stage; keyword arguments replace what they are built from."""
    arguments = {"owner": owner(), "task": task(stage), "spec": drafter(), "storage": STORAGE, "settings": SETTINGS}
    return stage_job(**{**arguments, **changes})


def served(**changes: Any) -> list[dict[str, Any]]:
    """The objects of a drafter's servers; keyword arguments replace what they are built from."""
    arguments = {
        "owner": owner(),
        "spec": drafter(),
        "target": RESOLVED.model,
        "drafter": ARTIFACT,
        "storage": STORAGE,
        "settings": SETTINGS,
        "admin_key_secret": "qwen3-8b-admin-key",
    }
    return server_objects(**{**arguments, **changes})


def job(stage: StageName = StageName.DISTIL, **changes: Any) -> dict[str, Any]:
    return objects(stage, **changes)[-1]


def pod(stage: StageName = StageName.DISTIL, **changes: Any) -> dict[str, Any]:
    return job(stage, **changes)["spec"]["template"]["spec"]


def containers(pod_spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in [*pod_spec.get("initContainers", []), *pod_spec["containers"]]}


def environment(container: dict[str, Any]) -> dict[str, Any]:
    """Name -> value as the process sees it, or the reference that it comes from."""
    return {
        entry["name"]: entry["value"].replace("$$", "$") if "value" in entry else entry["valueFrom"]
        for entry in container["env"]
    }


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["mountPath"]: entry for entry in container["volumeMounts"]}
