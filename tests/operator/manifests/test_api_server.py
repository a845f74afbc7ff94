"""The API server's own judgement of every object, by server-side dry runs in a namespace that enforces `restricted`."""

import json

import pytest

from dev.cluster.cluster import ClusterError
from osprey_api.naming import FIELD_MANAGER
from osprey_api.stages import StageName
from osprey_operator.manifests.server import admin_secret
from tests.operator.manifests.builders import drafter, objects, owner, served, task

pytestmark = pytest.mark.cluster

EVERYTHING = {
    "hubCredentialsSecret": "hf",
    "modelCache": {"claim": "models"},
    "job": {"nodes": 2, "gpusPerNode": 8, "queue": "team-a"},
    "serving": {"replicas": 2, "rollout": {"maxSurge": 1}},
}


@pytest.fixture
def apply(api_cluster, namespace):
    """Apply objects as the operator does, but dry, and start their pods, also dry; returns the namespace."""
    name = namespace(api_cluster)

    def dry_run(*verb, children):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": children})
        return api_cluster.kubectl(
            *verb, "--dry-run=server", "--validate=strict", "-n", name, "-f", "-", "-o", "json", text=text
        )

    def apply(children):
        for child in children:
            child["metadata"]["namespace"] = name
        dry_run("apply", "--server-side", f"--field-manager={FIELD_MANAGER}", children=children)
        # Admission judges the pods of a Job or Deployment only when they are made, and then nobody sees it.
        templates = [child["spec"]["template"] for child in children if "template" in child.get("spec", {})]
        pods = [
            {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": f"p{index}", **template["metadata"]}}
            for index, template in enumerate(templates)
        ]
        dry_run("create", children=pods)

    return apply


@pytest.mark.parametrize("name", ["qwen3-8b", "7b.dots", "a" * 63, "a." * 99 + "a"])
def test_every_object_and_its_pods_are_admitted(apply, name):
    of = owner(name)
    children = [child for stage in StageName for child in objects(stage, owner=of)]
    children += [admin_secret(of, "key"), *served(owner=of)]
    apply(children)


def test_with_everything_set(apply):
    spec = drafter(**EVERYTHING)
    for stage in StageName:
        apply(objects(stage, spec=spec, task=task(stage, nodes=2)))
    apply(served(spec=spec))


def test_without_a_drafter(apply):
    apply(served(drafter=None))


def test_the_check_is_strict(apply):
    (job,) = objects(StageName.CONVERT)
    job["spec"]["template"]["spec"]["containers"][0]["lifecycles"] = {}
    with pytest.raises(ClusterError, match="lifecycles"):
        apply([job])


def test_the_check_is_restricted(apply):
    root = {"spec": {"securityContext": {"runAsNonRoot": False}}}
    with pytest.raises(ClusterError, match="PodSecurity"):
        apply(objects(StageName.CONVERT, spec=drafter(job={"template": root})))
