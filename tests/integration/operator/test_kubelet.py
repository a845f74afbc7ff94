"""What a real kubelet and scheduler say of a pod that does not start, as the operator understands it."""

import base64

import pytest

from dev.cluster.image import DEV
from osprey_api import schema
from tests.integration.operator.conftest import Place, running
from tests.operator.world import BACKBONE_SPEC

pytestmark = pytest.mark.node


@pytest.fixture
def place(node_cluster, namespace):
    for path in schema.rendered():
        node_cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
    node_cluster.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")
    return Place(node_cluster, namespace(node_cluster))


@pytest.fixture(autouse=True)
def operator(place, tmp_path):
    with running(place, tmp_path, OSPREY_TRAINER_IMAGE=DEV) as operator:
        yield operator


def test_a_missing_secret_is_told_and_recovers(place):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "SecretNotFound")
    assert '"s3" not found' in entry["message"]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "type": "Opaque"}
    keys = {name: base64.b64encode(b"x").decode() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    place.create("Secret", {**secret, "data": keys})
    # The image is empty: its container then fails to start, and that is another reason.
    place.until_condition("OspreyBackbone", "body", "Ready", "False", "InternalError")
    assert place.stage("OspreyBackbone", "body", "resolve")["nextAttemptTime"]


def test_an_image_that_does_not_exist_is_told_and_recovers(place):
    image = {"template": {"spec": {"containers": [{"name": "stage", "image": "localhost/nothing:typo"}]}}}
    storage = {"uri": "s3://drafters/x"}
    place.apply("OspreyBackbone", "body", {**BACKBONE_SPEC, "storage": storage, "job": image})
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "ImagePull")
    assert "localhost/nothing:typo" in entry["message"]
    place.apply("OspreyBackbone", "body", {**BACKBONE_SPEC, "storage": storage})
    place.until_condition("OspreyBackbone", "body", "Ready", "False", "InternalError")


def test_a_missing_claim_is_told(place):
    spec = {**BACKBONE_SPEC, "storage": {"uri": "s3://drafters/x"}, "source": {"uri": "pvc://nowhere/model"}}
    place.apply("OspreyBackbone", "body", spec)
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "ClaimNotFound")
    assert '"nowhere" not found' in entry["message"]


def test_a_missing_secret_of_a_volume_is_told(place):
    volume = {"name": "ca", "secret": {"secretName": "ca"}}
    stage = {"name": "stage", "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
    job = {"template": {"spec": {"volumes": [volume], "containers": [stage]}}}
    place.apply("OspreyBackbone", "body", {**BACKBONE_SPEC, "storage": {"uri": "s3://drafters/x"}, "job": job})
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "SecretNotFound")
    assert '"ca" not found' in entry["message"]
