"""What is wrong outside becomes a condition that says what to do, and recovers by itself once it is put right."""

import json

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(900)]
OD = "ospreydrafter"


@pytest.fixture(scope="module")
def prompts(tiny):
    return [json.dumps({"prompt": prompt}) for prompt in tiny[0].prompts("counting", 40)]


def recovers(tenant, name, seconds=180):
    """The inputs are found after all; what would follow is not waited for."""
    tenant.until_true(OD, name, "Resolved", seconds)
    tenant.delete(OD, name)


def test_too_many_broken_lines_are_named_and_a_repaired_file_is_used(tenant, prompts):
    broken = [*prompts[:6], '{"prompt": "no end', *prompts[6:8]]  # one of nine: more than one in twenty
    tenant.apply(tenant.drafter("line", {"counting": tenant.put("line", broken)}))
    message = tenant.until_reason(OD, "line", "Resolved", "InvalidData")
    assert "line.jsonl line 7" in message
    tenant.put("line", prompts)
    recovers(tenant, "line")


def test_a_missing_file_and_a_missing_model(tenant, prompts):
    uri = tenant.uri("late")
    tenant.apply(tenant.drafter("file", {"counting": uri}))
    assert uri in tenant.until_reason(OD, "file", "Resolved", "SourceNotFound")
    tenant.put("late", prompts)
    recovers(tenant, "file")
    model = tenant.drafter("model", {"counting": uri})
    model["spec"]["target"]["uri"] = "pvc://models/later"
    tenant.apply(model)
    assert "pvc://models/later" in tenant.until_reason(OD, "model", "Resolved", "SourceNotFound")
    (tenant.models / "later").symlink_to("tiny")
    recovers(tenant, "model")


def test_a_missing_bucket(tenant, prompts, pod_s3):
    storage = {
        "uri": "s3://not-yet-there/x",
        "endpoint": pod_s3.endpoint,
        "region": pod_s3.region,
        "credentialsSecret": "s3",
    }
    tenant.apply(tenant.drafter("bucket", {"counting": tenant.put("bucket", prompts)}, storage=storage))
    assert "not-yet-there" in tenant.until_reason(OD, "bucket", "Resolved", "StorageNotFound")
    pod_s3.make_bucket("not-yet-there")
    recovers(tenant, "bucket")


def test_wrong_keys(tenant, prompts, pod_s3):
    tenant.kubectl.secret(tenant.namespace, "keys", pod_s3.access_key, "wrong")
    storage = {
        "uri": tenant.uri("artifacts"),
        "endpoint": pod_s3.endpoint,
        "region": pod_s3.region,
        "credentialsSecret": "keys",
    }
    tenant.apply(tenant.drafter("keys", {"counting": tenant.put("keys", prompts)}, storage=storage))
    message = tenant.until_reason(OD, "keys", "Resolved", "StorageAccessDenied")
    assert "AWS_SECRET_ACCESS_KEY" in message
    assert "wrong" not in message.split()
    tenant.kubectl.secret(tenant.namespace, "keys", pod_s3.access_key, pod_s3.secret_key)
    recovers(tenant, "keys")


def test_a_missing_secret(tenant, prompts, pod_s3):
    storage = {
        "uri": tenant.uri("artifacts"),
        "endpoint": pod_s3.endpoint,
        "region": pod_s3.region,
        "credentialsSecret": "none",
    }
    tenant.apply(tenant.drafter("secret", {"counting": tenant.put("secret", prompts)}, storage=storage))
    assert "none" in tenant.until_reason(OD, "secret", "Resolved", "SecretNotFound")
    tenant.kubectl.secret(tenant.namespace, "none", pod_s3.access_key, pod_s3.secret_key)
    recovers(tenant, "secret")


def test_a_missing_backbone(tenant, prompts, tiny):
    tenant.apply(tenant.drafter("backbone", {"counting": tenant.put("backbone", prompts)}, backbone="tiny-2l"))
    assert "tiny-2l" in tenant.until_reason(OD, "backbone", "Trained", "BackboneNotFound")
    text = [json.dumps({"text": line}) for line in tiny[0].text(200)]
    tenant.apply(tenant.backbone(tenant.put("text", text)))
    tenant.until_reason(OD, "backbone", "Trained", "WaitingForBackbone")
    tenant.delete(OD, "backbone")
    tenant.delete("ospreybackbone", "tiny-2l")
