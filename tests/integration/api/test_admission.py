"""The API server itself refuses what cannot be, with a sentence, and fills in what was left out."""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest

from osprey_api import schema
from osprey_api.backbone import OspreyBackboneSpec
from osprey_api.drafter import OspreyDrafterSpec

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parents[3] / "examples"
DRAFTER = {
    "apiVersion": "osprey.dev/v1alpha1",
    "kind": "OspreyDrafter",
    "metadata": {"name": "d"},
    "spec": {"target": {"uri": "hf://Qwen/Qwen3-8B"}, "data": [{"name": "maths", "uri": "s3://data/maths.jsonl"}]},
}
BACKBONE = {
    "apiVersion": "osprey.dev/v1alpha1",
    "kind": "OspreyBackbone",
    "metadata": {"name": "b"},
    "spec": {"source": {"uri": "hf://Qwen/Qwen3-4B"}},
}


@pytest.fixture(scope="module")
def cluster(api_cluster):
    for path in schema.rendered():
        kubectl(api_cluster, "apply", "-f", path).check_returncode()
    kubectl(api_cluster, "wait", "crd", "--all", "--for=condition=Established", "--timeout=30s").check_returncode()
    return api_cluster


@pytest.fixture
def apply(cluster, namespace):
    place = namespace(cluster)

    def run(resource, *more):
        return kubectl(cluster, "apply", "-n", place, "-o", "json", *more, "-f", "-", text=json.dumps(resource))

    return run


def kubectl(cluster, *words, text=None):
    command = ["kubectl", *map(str, words)]
    own = os.environ | cluster.environment()  # noqa: TID251 - kubectl wants HOME and the like
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=own)


def changed(resource, path, value):
    """A copy in which the field at a dotted path is set, or removed for None."""
    copied = copy.deepcopy(resource)
    node = copied["spec"]
    *parents, last = path.split(".")
    for parent in parents:
        node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
    if value is None:
        del node[last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return copied


def test_the_schemas_are_accepted_without_a_warning(cluster):
    # The server computes the cost of every CEL rule here, and refuses or warns of what is not structural.
    for path in schema.rendered():
        applied = kubectl(cluster, "apply", "-f", path)
        assert applied.returncode == 0
        assert "arning" not in applied.stderr
    for kind in ("ospreydrafters", "ospreybackbones"):
        described = json.loads(kubectl(cluster, "get", "crd", f"{kind}.osprey.dev", "-o", "json").stdout)
        conditions = {c["type"]: c["status"] for c in described["status"]["conditions"]}
        assert conditions["NamesAccepted"] == "True"
        assert conditions.get("NonStructuralSchema") != "True"


@pytest.mark.parametrize(("resource", "model"), [(DRAFTER, OspreyDrafterSpec), (BACKBONE, OspreyBackboneSpec)])
def test_defaults_of_the_server_are_those_of_the_models(apply, resource, model):
    applied = apply(resource)
    assert applied.returncode == 0, applied.stderr
    assert model.model_validate(json.loads(applied.stdout)["spec"]) == model.model_validate(resource["spec"])


def test_a_part_that_is_given_keeps_the_defaults_of_its_other_fields(apply):
    spec = json.loads(apply(changed(DRAFTER, "distillation.epochs", 1)).stdout)["spec"]
    assert spec["distillation"]["epochs"] == 1
    assert spec["distillation"]["learningRate"] == 1e-4
    assert spec["distillation"]["teacher"]["mode"] == "Online"


TRAINED = changed(BACKBONE, "pretraining", {"data": [{"uri": "s3://x-y/t.jsonl"}], "emaDecay": 0.99})
AVERAGED = changed(DRAFTER, "distillation.emaDecay", 0.99)
IMPORTED = changed(changed(BACKBONE, "source", None), "import", {"uri": "s3://x-y/b", "digest": f"sha256:{'0' * 64}"})
OF_ANOTHER = changed(DRAFTER, "import", {"uri": "s3://x-y/d", "digest": f"sha256:{'0' * 64}"})
REFUSED = [
    (DRAFTER, "target.uri", "Qwen/Qwen3-8B", "write hf://OWNER/NAME, s3://BUCKET/PATH or pvc://CLAIM/PATH"),
    (DRAFTER, "target", None, "spec.target: Required value"),
    (DRAFTER, "data", [], "spec.data"),
    (DRAFTER, "data.0.use", "Evaluate", "set use of at least one to Train or TrainAndEvaluate"),
    (DRAFTER, "data.0.use", "Train", "set use of at least one to Evaluate or TrainAndEvaluate"),
    (DRAFTER, "data.0.uri", "http://x/y", "spec.data[0].uri"),
    (DRAFTER, "storage", {"uri": "https://bucket.s3.amazonaws.com/x"}, "write s3://BUCKET/PREFIX"),
    (DRAFTER, "data.0.uri", "pvc://models/../secrets", "write it without '..'"),
    (BACKBONE, "source.uri", "pvc://models/..", "write it without '..'"),
    (DRAFTER, "serving.speculation", {"steps": 3, "draftTokens": 6}, "set draftTokens to steps + 1"),
    (DRAFTER, "distillation", {"stepWeights": [1.0, 0.5]}, "not one weight for each step of the unroll"),
    (DRAFTER, "distillation", {"teacher": {"tensorParallel": 3}}, "multiple of distillation.teacher.tensorParallel"),
    (DRAFTER, "distillation", {"unroll": 2, "stepWeights": [0.0, 1.0]}, "the first of distillation.stepWeights is 0"),
    (DRAFTER, "serving.replicas", -1, "should be greater than or equal to 0"),
    (DRAFTER, "distillation.learningRate", 0, "spec.distillation.learningRate"),
    (DRAFTER, "distillation.learnigRate", 1e-4, 'unknown field "spec.distillation.learnigRate"'),
    (DRAFTER, "distillation.epochs", "three", "must be of type integer"),
    (DRAFTER, "job.stages", {"destil": {"deadlineSeconds": 60}}, "the stages are resolve, prune"),
    (DRAFTER, "evaluation.gate.minAcceptanceLength", 0.5, "greater than or equal to 1"),
    (OF_ANOTHER, "backbone", "b", "an imported drafter is finished: remove backbone, or remove import to train one"),
    (OF_ANOTHER, "import.digest", "latest", "spec.import.digest"),
    (OF_ANOTHER, "import.uri", "hf://org/drafter", "write s3://BUCKET/PREFIX"),
    (OF_ANOTHER, "data.0.use", "Train", "set use of at least one to Evaluate or TrainAndEvaluate"),
    (IMPORTED, "layers", 4, "an imported backbone has the blocks that it was made with: remove layers"),
    (BACKBONE, "source", None, "set source (a language model to prune) or import (a finished backbone)"),
    (BACKBONE, "import", {"uri": "s3://x-y/z", "digest": "sha256:" + "0" * 64}, "and not both"),
    (BACKBONE, "layers", 0, "spec.layers"),
    (BACKBONE, "pretraining", {"data": []}, "spec.pretraining.data"),
    (BACKBONE, "storage", {"uri": "/tmp"}, "spec.storage.uri"),
    (DRAFTER, "job", {"gpusPerNode": 8}, "set distillation.globalBatchSize to a multiple of job.nodes times"),
    (DRAFTER, "job", {"gpusPerNode": 0, "nodes": 4}, "set distillation.globalBatchSize to a multiple of job.nodes"),
    (TRAINED, "job", {"nodes": 3}, "set pretraining.globalBatchSize to a multiple of job.nodes times"),
    (TRAINED, "job", {"zeroStage": 3}, "unset pretraining.emaDecay, or set zeroStage to 2"),
    (AVERAGED, "job", {"zeroStage": 3}, "unset distillation.emaDecay, or set zeroStage to 2"),
    (changed(TRAINED, "pretraining.optimizer", "Muon"), "job.zeroStage", 1, "or pretraining.optimizer to AdamW"),
    (changed(DRAFTER, "distillation.optimizer", "Muon"), "job", {"zeroStage": 2}, "set job.zeroStage to 0"),
    (DRAFTER, "distillation.optimizer", "Lion", 'supported values: "AdamW", "Muon"'),
    # What a DeepSpeed config would say.
    (
        DRAFTER,
        "distillation.optimizer",
        {"type": "AdamW", "params": {}},
        'unknown field "spec.distillation.optimizer.type"',
    ),
    (DRAFTER, "distillation.precision", "FP16", 'supported values: "BF16", "FP32"'),
    (DRAFTER, "distillation.clipNorm", "auto", "must be of type number"),
    (DRAFTER, "distillation.freezeEmbedding", "true", "must be of type boolean"),
    (DRAFTER, "job.zeroStage", "auto", "must be of type integer"),
    (DRAFTER, "job.zeroStage", 4, "should be less than or equal to 3"),
]


@pytest.mark.parametrize(("resource", "path", "value", "sentence"), REFUSED)
def test_what_cannot_be_is_refused_with_a_sentence(apply, resource, path, value, sentence):
    refused = apply(changed(resource, path, value))
    assert refused.returncode != 0
    assert sentence in refused.stderr


@pytest.mark.parametrize(("resource", "part"), [(DRAFTER, "job"), (DRAFTER, "distillation"), (TRAINED, "pretraining")])
def test_a_deepspeed_config_is_refused_and_all_its_fields_are_named(apply, resource, part):
    config = {
        "fp16": {"enabled": "true"},
        "scheduler": {"type": "WarmupDecayLR"},
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
    }
    pasted = copy.deepcopy(resource)
    pasted["spec"].setdefault(part, {}).update(config)
    refused = apply(pasted)
    assert refused.returncode != 0
    for field in config:
        assert f'unknown field "spec.{part}.{field}"' in refused.stderr


@pytest.mark.parametrize(
    ("resource", "path", "value"),
    [
        (changed(DRAFTER, "distillation.globalBatchSize", 32), "job", {"gpusPerNode": 8, "nodes": 4}),
        (changed(DRAFTER, "distillation.globalBatchSize", 3), "job", {"gpusPerNode": 0, "nodes": 3}),
        (DRAFTER, "job", {"zeroStage": 3}),
        (TRAINED, "job", {"zeroStage": 2, "gpusPerNode": 8}),
    ],
)
def test_what_can_be_trained_is_taken(apply, resource, path, value):
    applied = apply(changed(resource, path, value))
    assert applied.returncode == 0, applied.stderr


def test_an_imported_backbone_is_finished(apply):
    imported = changed(BACKBONE, "source", None)
    imported["spec"] |= {
        "import": {"uri": "s3://x-y/z", "digest": "sha256:" + "0" * 64},
        "pretraining": {"data": [{"uri": "s3://x-y/t.jsonl"}]},
    }
    assert "remove pretraining" in apply(imported).stderr
    del imported["spec"]["pretraining"]
    assert apply(imported).returncode == 0


def test_an_imported_drafter_needs_no_prompts_to_train_on_and_may_take_turns_with_a_trained_one(apply):
    assert apply(changed(OF_ANOTHER, "data.0.use", "Evaluate")).returncode == 0
    for resource in (changed(DRAFTER, "backbone", "b"), OF_ANOTHER, DRAFTER):
        applied = apply(resource)
        assert applied.returncode == 0, applied.stderr


def test_what_must_not_change_does_not(apply):
    first = changed(DRAFTER, "backbone", "b")
    assert apply(first).returncode == 0
    assert "target.uri cannot change" in apply(changed(first, "target.uri", "hf://Qwen/Qwen3-4B")).stderr
    assert "cannot change between Osprey and EAGLE-3" in apply(DRAFTER).stderr
    assert apply(changed(first, "distillation.epochs", 2)).returncode == 0


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_examples_are_accepted(cluster, namespace, path):
    applied = kubectl(cluster, "apply", "-n", namespace(cluster), "--dry-run=server", "-f", path)
    assert applied.returncode == 0, applied.stderr


def test_a_resource_is_found_by_category_and_short_name(cluster, namespace):
    place = namespace(cluster)
    kubectl(cluster, "apply", "-n", place, "-f", "-", text=json.dumps(DRAFTER)).check_returncode()
    kubectl(cluster, "apply", "-n", place, "-f", "-", text=json.dumps(BACKBONE)).check_returncode()
    story = kubectl(cluster, "get", "osprey", "-n", place).stdout
    assert "ospreydrafter.osprey.dev/d" in story
    assert "ospreybackbone.osprey.dev/b" in story
    assert {"READY", "STAGE", "AL", "LIVE", "TPS"} <= set(story.split())
    assert kubectl(cluster, "get", "od,ob", "-n", place).returncode == 0
