"""From `kubectl apply` to Ready, and to nothing at all after `kubectl delete`."""

import json
import time
import urllib.request

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.naming import LABEL_STAGE, LABEL_VALUE_LIMIT, shortened
from tests.operator.world import BACKBONE_SPEC, DRAFTER_SPEC, task_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("operator")]

STAGES = ("regenerate", "baseline", "convert", "distil", "evaluate")


def to_ready(place, name="small", *, before=()):
    """Let all stages of a drafter succeed, except those done before, and its servers start."""
    for stage in ("resolve", *STAGES):
        if stage not in before:
            place.succeed(name, stage)
    place.keep_serving(name, lambda: place.condition("OspreyDrafter", name, "Ready")["status"] == "True")


def versions(place):
    kinds = ("OspreyBackbone", "OspreyDrafter", "Job", "Deployment", "Service", "ConfigMap", "Secret")
    return {
        (kind, each["metadata"]["name"]): each["metadata"]["resourceVersion"]
        for kind in kinds
        for each in place.list(kind)
    }


def settled(place):
    """Return the versions when nothing has changed for a while: Kubernetes writes into finished Jobs seconds later."""

    def same():
        before = versions(place)
        time.sleep(3)
        return before if versions(place) == before else None

    return place.until(same, 60, "nothing changes any more")


def test_both_resources_from_apply_to_ready_to_gone(place, operator, tmp_path):
    place.apply("OspreyDrafter", "small", DRAFTER_SPEC)
    place.succeed("small", "resolve")
    place.until_condition("OspreyDrafter", "small", "Ready", "False", "BackboneNotFound")
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.until_condition("OspreyDrafter", "small", "Progressing", "True")
    place.start("body", "prune")
    place.until(lambda: place.stage("OspreyBackbone", "body", "prune").get("state") == "Running")
    for stage in ("prune", "tokenize", "pretrain"):
        place.succeed("body", stage)
    place.until_condition("OspreyBackbone", "body", "Ready", "True", "Complete")

    for stage in ("regenerate", "convert", "distil", "baseline", "evaluate"):
        place.succeed("small", stage)
    place.until_condition("OspreyDrafter", "small", "GatePassed", "True")
    place.keep_serving("small", lambda: place.condition("OspreyDrafter", "small", "Ready")["status"] == "True")
    status = place.get("OspreyDrafter", "small")["status"]
    body = place.get("OspreyBackbone", "body")["status"]["artifact"]
    convert = task_of(place.jobs("convert")[0])
    assert convert.inputs["backbone"].digest == body["digest"]
    assert status["revisions"][0]["state"] == "Serving"
    wanted = place.list("ConfigMap", **{"osprey.dev/name": "small"})
    assert len(wanted) == 1
    assert status["artifact"]["digest"] in json.dumps(wanted[0]["data"])
    [secret] = place.list("Secret", **{"osprey.dev/name": "small"})
    assert len(secret["data"]["OSPREY_ADMIN_KEY"]) > 40

    # A cache of its own, since kubectl remembers for minutes that there was no such category.
    shown = place.cluster.kubectl("get", "osprey", "-n", place.namespace, f"--cache-dir={tmp_path}")
    assert "serving" in shown
    assert "complete" in shown
    events = {event["reason"] for event in place.list("Event") if event["involvedObject"]["name"] == "small"}
    assert {"DistilSucceeded", "DrafterRollingOut", "DrafterServing"} <= events

    for kind, name in (("OspreyDrafter", "small"), ("OspreyBackbone", "body")):
        metadata = place.get(kind, name)["metadata"]
        assert "finalizers" not in metadata
        assert set(metadata.get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}

    still, busy = settled(place), operator.cpu_seconds()
    time.sleep(5)  # passes go on, every second, for traffic and re-reading
    assert versions(place) == still
    assert operator.cpu_seconds() - busy < 1

    place.delete("OspreyDrafter", "small")
    place.delete("OspreyBackbone", "body")
    place.until(lambda: not place.left(), 60, "everything is gone")
    assert operator.stop() == 0


def test_two_drafters_share_what_they_can(place):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key not in {"backbone", "serving"}}
    for name in ("one", "two"):
        place.apply("OspreyDrafter", name, {**spec, "distillation": {"learningRate": {"one": 0.1, "two": 0.2}[name]}})
    for name in ("one", "two"):
        place.succeed(name, "resolve")
    place.until(lambda: place.jobs("regenerate") and place.jobs("baseline"))
    for name in ("one", "two"):
        place.until_condition("OspreyDrafter", name, "Resolved", "True")
    time.sleep(1)
    for stage in ("regenerate", "baseline"):
        [job] = place.jobs(stage)
        place.succeed(job["metadata"]["labels"]["osprey.dev/name"], stage)
    place.until(lambda: place.jobs("convert"))
    [job] = place.jobs("convert")
    place.succeed(job["metadata"]["labels"]["osprey.dev/name"], "convert")
    place.until(lambda: len(place.jobs("distil")) == 2)
    for name in ("one", "two"):
        for stage in ("distil", "evaluate"):
            place.succeed(name, stage)
        place.until_condition("OspreyDrafter", name, "Ready", "True", "Complete")
    assert len(place.jobs("regenerate")) == 1
    shared = {place.stage("OspreyDrafter", name, "regenerate")["artifact"]["uri"] for name in ("one", "two")}
    assert len(shared) == 1


def test_a_missing_bucket_is_a_condition_and_recovers_by_itself(place):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    for _ in range(2):
        place.fail("body", "resolve", FailureReason.STORAGE_NOT_FOUND, "bucket drafters does not exist: create it")
        entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "StorageNotFound")
        assert "create it" in entry["message"]
    place.succeed("body", "resolve")
    place.until_condition("OspreyBackbone", "body", "Resolved", "True")
    for stage in ("prune", "tokenize", "pretrain"):
        place.succeed("body", stage)
    place.until_condition("OspreyBackbone", "body", "Ready", "True")


def test_a_failed_stage_is_tried_again(place):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    first = place.pod("body", "prune")["metadata"]["uid"]
    place.fail("body", "prune", FailureReason.INTERNAL_ERROR, "Traceback")
    place.until(lambda: place.stage("OspreyBackbone", "body", "prune").get("state") == "Retrying")
    assert place.pod("body", "prune")["metadata"]["uid"] != first
    place.succeed("body", "prune")
    place.until(lambda: place.stage("OspreyBackbone", "body", "prune").get("state") == "Succeeded")
    assert place.stage("OspreyBackbone", "body", "prune")["attempts"] == 2


def test_a_killed_operator_goes_on_where_it_was(place, operator):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key != "backbone"}
    place.apply("OspreyDrafter", "small", spec)
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        place.succeed("small", stage)
    place.start("small", "distil")
    place.until(lambda: place.stage("OspreyDrafter", "small", "distil").get("state") == "Running")
    uid = place.jobs("distil")[0]["metadata"]["uid"]
    operator.kill()
    place.succeed("small", "distil")  # while nobody looks
    time.sleep(1)
    operator.start()
    place.succeed("small", "evaluate")
    place.until_condition("OspreyDrafter", "small", "GatePassed", "True")
    operator.kill()
    time.sleep(0.5)
    operator.start()  # during the rollout
    place.keep_serving("small", lambda: place.condition("OspreyDrafter", "small", "Ready")["status"] == "True")
    assert [job["metadata"]["uid"] for job in place.jobs("distil")] == [uid]
    entries = place.get("OspreyDrafter", "small")["status"]["stages"]
    assert {entry["attempts"] for entry in entries} == {1}
    assert len(place.list("Deployment")) == 1
    told = [
        line for line in operator.log.read_text().splitlines() if f"ospreydrafter/small in {place.namespace}" in line
    ]
    assert any("DistilSucceeded" in line for line in told)
    assert any("DrafterServing" in line for line in told)


def test_a_result_lost_with_its_pod_is_asked_for_again(place, operator):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.until(lambda: place.jobs("prune"))
    operator.kill()
    place.succeed("body", "prune")
    [job] = place.jobs("prune")
    place.until(lambda: place.jobs("prune")[0].get("status", {}).get("succeeded"))
    for pod in place.list("Pod", **{LABEL_STAGE: "prune"}):
        place.delete("Pod", pod["metadata"]["name"])
    operator.start()
    place.until(lambda: [each["metadata"]["uid"] for each in place.jobs("prune")] not in ([], [job["metadata"]["uid"]]))
    place.succeed("body", "prune")
    place.until(lambda: place.stage("OspreyBackbone", "body", "prune").get("state") == "Succeeded")


def test_a_job_deleted_by_hand_comes_back(place):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    first = place.pod("body", "prune")["metadata"]["uid"]
    place.cluster.kubectl("delete", "job", "-n", place.namespace, place.jobs("prune")[0]["metadata"]["name"])
    place.until(lambda: place.pod("body", "prune")["metadata"]["uid"] != first)


def test_a_job_over_quota_is_a_condition_and_recovers(place):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    place.create("ResourceQuota", {**quota, "spec": {"hard": {"count/jobs.batch": "0"}}})
    place.until(lambda: place.get("ResourceQuota", "none").get("status", {}).get("hard"))
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "PodRefused")
    assert "exceeded quota: none" in entry["message"]
    place.delete("ResourceQuota", "none")
    place.succeed("body", "resolve")
    place.until_condition("OspreyBackbone", "body", "Resolved", "True")


def test_a_bad_pod_template_is_a_condition_and_recovers(place):
    bad = {"template": {"spec": {"containers": [{"name": "stage", "resources": {"limits": {"cpu": "-1"}}}]}}}
    place.apply("OspreyBackbone", "body", {**BACKBONE_SPEC, "job": bad})
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "PodRefused")
    assert "must be greater than or equal to 0" in entry["message"]
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.until_condition("OspreyBackbone", "body", "Resolved", "True")


def test_pods_that_admission_refuses_are_a_condition(place):
    place.apply("OspreyBackbone", "body", {**BACKBONE_SPEC, "job": {"template": {"spec": {"hostNetwork": True}}}})
    entry = place.until_condition("OspreyBackbone", "body", "Ready", "False", "PodRefused")
    assert "violates PodSecurity" in entry["message"]
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.until_condition("OspreyBackbone", "body", "Resolved", "True")


def test_a_name_that_is_taken_is_a_condition_and_the_object_stays_as_it_is(place):
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "small"},
        "spec": {"ports": [{"port": 80}], "selector": {"mine": "yes"}},
    }
    place.create("Service", body)
    place.apply("OspreyDrafter", "small", DRAFTER_SPEC)
    place.succeed("small", "resolve")
    entry = place.until_condition("OspreyDrafter", "small", "RolledOut", "False", "NameTaken")
    assert "Service small" in entry["message"]
    assert place.get("Service", "small")["spec"]["selector"] == {"mine": "yes"}
    place.delete("Service", "small")
    place.until(lambda: any(each["metadata"]["name"] == "small" for each in place.list("Service")))
    place.until(lambda: place.condition("OspreyDrafter", "small", "RolledOut")["reason"] != "NameTaken")


def test_suspension_deletes_jobs_and_keeps_servers(place):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key != "backbone"}
    place.apply("OspreyDrafter", "small", spec)
    place.succeed("small", "resolve")
    place.start("small", "regenerate")
    place.patch("OspreyDrafter", "small", {"spec": {"suspend": True}})
    place.until(lambda: not place.jobs("regenerate") and not place.jobs("baseline"))
    place.until_condition("OspreyDrafter", "small", "Suspended", "True")
    assert len(place.list("Deployment")) == 1
    place.patch("OspreyDrafter", "small", {"spec": {"suspend": False}})
    to_ready(place, before=("resolve",))


def test_the_retry_annotation_is_heard(place):
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.fail("body", "prune", FailureReason.DIVERGED)
    place.until_condition("OspreyBackbone", "body", "Ready", "False", "Diverged")
    place.patch("OspreyBackbone", "body", {"metadata": {"annotations": {"osprey.dev/retry": "now"}}})
    place.succeed("body", "resolve")
    place.succeed("body", "prune")
    place.until(lambda: place.stage("OspreyBackbone", "body", "prune").get("state") == "Succeeded")


def test_a_served_drafter_is_replaced(place):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key != "backbone"}
    place.apply("OspreyDrafter", "small", spec)
    to_ready(place)
    before = place.get("OspreyDrafter", "small")["status"]["revisions"][0]["artifact"]
    place.patch("OspreyDrafter", "small", {"spec": {"distillation": {"learningRate": 0.5}}})
    place.until_condition("OspreyDrafter", "small", "Ready", "False")
    place.succeed("small", "distil")
    place.succeed("small", "evaluate")
    place.keep_serving("small", lambda: place.condition("OspreyDrafter", "small", "Ready")["status"] == "True")
    states = [entry["state"] for entry in place.get("OspreyDrafter", "small")["status"]["revisions"]]
    assert states == ["Serving", "Superseded"]
    place.until(lambda: len(place.list("ConfigMap", **{"osprey.dev/name": "small"})) == 1)
    wanted = json.dumps(place.list("ConfigMap", **{"osprey.dev/name": "small"})[0]["data"])
    assert before["uri"] not in wanted


@pytest.mark.parametrize("name", ["seven.b", "7b", "a" * 63, "a." * 99 + "a"])
def test_names_of_any_length_work(place, name):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key != "backbone"}
    place.apply("OspreyDrafter", name, {**spec, "job": {"nodes": 2}})
    label = shortened(name, LABEL_VALUE_LIMIT)
    for stage in ("resolve", "regenerate", "convert"):
        place.succeed(label, stage)
    place.until(lambda: len(place.list("Pod", **{LABEL_STAGE: "distil"})) == 2)
    servers = {"app.kubernetes.io/component": "server"}
    place.keep_serving(label, lambda: len(place.list("Pod", **servers)) == 2)
    place.until(lambda: place.condition("OspreyDrafter", name, "Available")["status"] == "True")


def test_many_resources_some_deleted_while_the_operator_starts(place, operator):
    imported = {"import": {"uri": "s3://shared/backbone", "digest": f"sha256:{'0' * 64}"}}
    operator.kill()
    for index in range(30):
        place.apply("OspreyBackbone", f"b{index}", imported)
    operator.start()
    for index in range(0, 30, 6):
        place.delete("OspreyBackbone", f"b{index}")
    place.until(lambda: all("status" in each for each in place.list("OspreyBackbone")))
    left = place.list("OspreyBackbone")
    assert len(left) == 25
    for each in left:
        place.until_condition("OspreyBackbone", each["metadata"]["name"], "Ready", "True", "Imported")


def test_it_says_that_it_lives_and_what_there_is_and_ends_when_asked(place, operator):
    def ask(port, path):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return None

    report = json.loads(place.until(lambda: ask(operator.health_port, "healthz")))
    assert report["longest_pass_seconds"] < 5
    place.apply("OspreyBackbone", "body", BACKBONE_SPEC)
    place.succeed("body", "resolve")
    place.until_condition("OspreyBackbone", "body", "Resolved", "True")
    series = f'osprey_stage_progress_ratio{{kind="OspreyBackbone",name="body",namespace="{place.namespace}"'
    assert f'{series},stage="resolve"}} 1.0' in ask(operator.metrics_port, "metrics")
    place.delete("OspreyBackbone", "body")
    place.until(lambda: 'name="body"' not in ask(operator.metrics_port, "metrics"))
    began = time.monotonic()
    assert operator.stop() == 0
    assert time.monotonic() - began < 10
