from dataclasses import replace

import pytest

from osprey_api.stages import ArtifactRef, InputRole
from osprey_operator.state import Observed, StageProgress, Traffic
from tests.operator.world import (
    STORAGE,
    digest,
    drafter,
    evaluation,
    finished_backbone,
    outcome_of,
    ready_drafter,
    result_of,
    task_of,
)


def test_a_drafter_goes_through_its_stages_to_ready():
    world = drafter()
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
    assert world.children == []

    world.succeed("resolve")
    assert world.stages_with_jobs() == {"regenerate", "baseline"}
    assert {child["kind"] for child in world.children} == {"ConfigMap", "Deployment", "Service"}

    world.succeed("regenerate")
    assert world.stages_with_jobs() == {"convert", "baseline"}
    assert set(task_of(world.job("convert")).inputs) == {InputRole.ANSWERS, InputRole.BACKBONE}
    world.succeed("convert")
    assert set(task_of(world.job("distil")).inputs) == {InputRole.ANSWERS, InputRole.DRAFTER}
    world.succeed("distil")
    assert world.is_true("Trained")
    assert world.stages_with_jobs() == {"baseline"}
    world.succeed("baseline")
    assert world.stages_with_jobs() == {"evaluate"}
    assert set(task_of(world.job("evaluate")).inputs) == {InputRole.DRAFTER, InputRole.BASELINE}

    world.succeed("evaluate")
    assert world.is_true("Evaluated")
    assert world.is_true("GatePassed")
    assert not world.is_true("RolledOut")
    assert not world.is_true("Ready")
    assert world.resource["status"]["revisions"][0]["state"] == "RollingOut"

    world.roll()
    assert world.is_true("RolledOut")
    assert world.is_true("Ready")
    assert world.is_true("Available")
    status = world.resource["status"]
    assert status["revisions"][0]["state"] == "Serving"
    assert status["acceptanceLength"]["evaluated"] == 2.0
    assert status["acceptanceLength"]["evaluatedCorpus"] == 1.9
    assert [entry["name"] for entry in status["acceptanceLength"]["byDomain"]] == ["math", "chat"]
    assert status["acceptanceLength"]["byDomain"][0]["speedup"] == 1.5
    assert status["tokensPerSecond"] == {"baseline": 10, "evaluated": 15}
    assert status["endpoint"] == "http://small.ns.svc:30000"
    assert world.condition("Progressing")["message"] == "serving"
    assert world.stage("evaluate")["metrics"]["accepted_at_2"] == 0.4


def test_only_the_prompts_that_matter_are_in_a_fingerprint():
    world = drafter()
    world.settle()
    world.succeed("resolve")
    regenerate = task_of(world.job("regenerate")).config
    baseline = task_of(world.job("baseline")).config
    # `chat` only evaluates, but what it holds out must be in nobody's training.
    assert {prompt.name: prompt.train for prompt in regenerate.prompts} == {"math": True, "code": True, "chat": False}
    assert [prompt.name for prompt in baseline.prompts] == ["math", "chat"]
    before = world.stage("baseline")["fingerprint"], world.stage("regenerate")["fingerprint"]
    data = [{**entry, "samples": 7} for entry in world.spec["data"]]
    world.edit(data=data)
    world.settle()
    after = world.stage("baseline")["fingerprint"], world.stage("regenerate")["fingerprint"]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_finished_drafter_is_written_no_more():
    world = ready_drafter()
    writes = world.writes
    world.wait(3600)
    assert world.writes == writes
    assert world.plan.requeue_after == world.settings.poll_seconds  # for its traffic


def test_a_drafter_waits_for_its_backbone():
    world = drafter()
    world.observed = Observed(backbone=None)
    world.settle()
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"regenerate", "baseline"}
    assert world.condition("Ready")["reason"] == "BackboneNotFound"
    assert "body" in world.condition("Ready")["message"]

    world.observed = Observed(backbone=finished_backbone(ready="False", reason="Running"))
    world.succeed("regenerate")
    world.succeed("baseline")
    assert world.condition("Ready")["reason"] == "WaitingForBackbone"
    assert world.condition("Progressing")["status"] == "True"

    world.observed = Observed(backbone=finished_backbone(ready="False", reason="SourceNotFound"))
    world.settle()
    assert world.condition("Ready")["reason"] == "BackboneFailed"

    world.observed = Observed(backbone=finished_backbone())
    world.settle()
    assert world.stages_with_jobs() == {"convert"}


def test_a_backbone_in_another_store_is_not_taken():
    world = drafter(storage={**STORAGE, "endpoint": "https://s3.example.com"})
    world.settle()
    world.succeed("resolve")
    world.succeed("regenerate")
    assert "convert" not in world.stages_with_jobs()
    world.succeed("baseline")
    assert world.condition("Ready")["reason"] == "BackboneFailed"
    assert "at AWS" in world.condition("Ready")["message"]
    body = finished_backbone()
    for spec in ({"import": {}}, {"storage": {**STORAGE, "endpoint": "https://s3.example.com"}}):
        world.observed = Observed(backbone={**body, "spec": spec})
        world.settle()
        assert world.stages_with_jobs() == {"convert"}


def test_a_backbone_of_an_older_spec_is_not_taken():
    world = drafter()
    body = finished_backbone()
    body["metadata"]["generation"] += 1
    world.observed = Observed(backbone=body)
    world.settle()
    world.succeed("resolve")
    world.succeed("regenerate")
    assert "convert" not in world.stages_with_jobs()


def distilling():
    """A drafter whose distil runs, and the UID of its Job."""
    world = drafter()
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        world.succeed(stage)
    world.start("distil")
    return world, world.job("distil")["metadata"]["uid"]


@pytest.mark.parametrize(("optimizer", "muon_scale"), [({}, None), ({"optimizer": "Muon"}, 3.0)])
def test_muon_is_used_where_it_is_asked_for(optimizer, muon_scale):
    world = drafter(job={"zeroStage": 0}, distillation=optimizer)
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        world.succeed(stage)
    assert task_of(world.job("distil")).config.optimization.muon_scale == muon_scale


def test_a_running_distil_is_left_alone_while_the_backbone_is_away():
    world, uid = distilling()
    world.observed = Observed(backbone=None)
    world.settle()
    assert world.job("distil")["metadata"]["uid"] == uid
    assert world.stage("distil")["state"] == "Running"


def test_a_served_drafter_serves_on_without_its_backbone():
    world = ready_drafter()
    world.observed = Observed(backbone=None)
    world.settle()
    assert world.is_true("Available")
    assert world.is_true("RolledOut")
    assert world.is_true("GatePassed")
    assert not world.is_true("Ready")
    assert world.condition("Ready")["reason"] == "BackboneNotFound"


def test_a_drafter_from_scratch_needs_no_backbone():
    world = drafter(serving=None)
    del world.resource["spec"]["backbone"]
    del world.resource["spec"]["serving"]
    world.observed = Observed()
    world.settle()
    world.succeed("resolve")
    world.succeed("regenerate")
    assert set(task_of(world.job("convert")).inputs) == {InputRole.ANSWERS}
    for stage in ("convert", "baseline", "distil", "evaluate"):
        world.succeed(stage)
    assert world.is_true("Ready")
    assert world.children == []
    assert world.condition("Available")["reason"] == "NotRequested"
    assert world.resource["status"]["revisions"][0]["state"] == "Exported"


def test_captured_states_come_beside_the_initial_drafter():
    world = drafter(distillation={"teacher": {"mode": "Captured", "maxStorageGiB": 7}, "sequenceLength": 512})
    world.settle()
    world.succeed("resolve")
    assert world.stage("capture")["state"] == "Pending"
    world.succeed("regenerate")
    assert world.stages_with_jobs() == {"capture", "convert", "baseline"}
    capture = task_of(world.job("capture"))
    assert set(capture.inputs) == {InputRole.ANSWERS}
    assert (capture.config.sequence_length, capture.execution.captured_gib_limit) == (512, 7)
    world.succeed("convert")
    assert world.stages_with_jobs() == {"capture", "baseline"}
    world.succeed("capture")
    distil = task_of(world.job("distil"))
    assert set(distil.inputs) == {InputRole.ANSWERS, InputRole.DRAFTER, InputRole.STATES}
    assert distil.inputs[InputRole.STATES].uri.endswith(capture.fingerprint)


def test_another_learning_rate_captures_nothing_anew():
    captured = {"teacher": {"mode": "Captured"}}
    before, after = (drafter(distillation=captured | more) for more in ({}, {"learningRate": 0.5}))
    for world in (before, after):
        world.settle()
        world.succeed("resolve")
        world.succeed("regenerate")
    assert task_of(before.job("capture")).fingerprint == task_of(after.job("capture")).fingerprint


def test_the_whole_vocabulary_is_no_vocabulary_size():
    world = drafter(distillation={"draftVocabSize": 60000})
    world.settle()
    world.succeed("resolve")
    world.succeed("regenerate")
    assert task_of(world.job("convert")).config.draft_vocab_size is None


def test_a_slow_drafter_is_rejected_and_the_gate_says_by_how_much():
    world = drafter()
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert", "distil"):
        world.succeed(stage)
    world.succeed("evaluate", evaluation(speedup=0.7))
    world.roll()
    assert world.condition("GatePassed")["status"] == "False"
    assert world.condition("GatePassed")["reason"] == "TooSlow"
    assert "0.700 is 0.300 below minSpeedup 1" in world.condition("GatePassed")["message"]
    assert world.condition("RolledOut")["reason"] == "ServingWithoutDrafter"
    assert world.condition("Ready")["reason"] == "TooSlow"
    assert world.resource["status"]["revisions"][0]["state"] == "Rejected"

    world.edit(evaluation={"gate": {"minSpeedup": 0.5}})
    world.settle()
    assert world.stages_with_jobs() == set()
    world.roll()
    assert world.is_true("Ready")


def test_a_drafter_that_regresses_leaves_the_old_one_in_place():
    world = ready_drafter()
    served = world.resource["status"]["revisions"][0]["artifact"]
    deployment = world.child("Deployment")["metadata"]["uid"]
    world.edit(distillation={"learningRate": 0.5})
    world.settle()
    assert world.stages_with_jobs() == {"distil"}
    assert world.is_true("Available")
    assert world.condition("GatePassed")["status"] == "Unknown"
    world.succeed("distil")
    world.succeed("evaluate", evaluation(length=1.5))
    assert world.condition("GatePassed")["reason"] == "Regressed"
    assert "25.0% below" in world.condition("GatePassed")["message"]
    assert world.child("Deployment")["metadata"]["uid"] == deployment
    states = {entry["artifact"]["digest"]: entry["state"] for entry in world.resource["status"]["revisions"]}
    assert states[served["digest"]] == "Serving"
    assert sorted(states.values()) == ["Rejected", "Serving"]
    assert world.condition("RolledOut")["status"] == "True"
    assert world.condition("Ready")["reason"] == "Regressed"


def test_a_better_drafter_supersedes():
    world = ready_drafter()
    before = {child["metadata"]["name"] for child in world.children if child["kind"] == "ConfigMap"}
    world.edit(distillation={"learningRate": 0.5})
    world.settle()
    world.succeed("distil")
    world.succeed("evaluate", evaluation(length=2.5))
    assert [entry["state"] for entry in world.resource["status"]["revisions"]] == ["RollingOut", "Serving"]
    assert world.condition("RolledOut")["reason"] == "RollingOut"
    assert len([child for child in world.children if child["kind"] == "ConfigMap"]) == 2
    world.roll()
    assert [entry["state"] for entry in world.resource["status"]["revisions"]] == ["Serving", "Superseded"]
    assert world.is_true("Ready")
    left = {child["metadata"]["name"] for child in world.children if child["kind"] == "ConfigMap"}
    assert len(left) == 1
    assert not left & before


def test_a_drafter_on_its_way_is_overtaken_by_a_better_one():
    world = ready_drafter()
    for rate, length in ((0.5, 2.5), (0.6, 3.0)):
        world.edit(distillation={"learningRate": rate})
        world.settle()
        world.succeed("distil")
        world.succeed("evaluate", evaluation(length=length))
    states = [entry["state"] for entry in world.resource["status"]["revisions"]]
    assert states == ["RollingOut", "Superseded", "Serving"]
    world.roll()
    states = [entry["state"] for entry in world.resource["status"]["revisions"]]
    assert states == ["Serving", "Superseded", "Superseded"]


def test_a_rollout_is_not_over_while_a_server_of_the_old_drafter_answers():
    world = ready_drafter()
    deployment = world.child("Deployment")
    deployment["status"]["replicas"] = 3
    world.settle()
    assert world.condition("RolledOut")["reason"] == "RollingOut"
    assert world.is_true("Available")
    world.roll()
    assert world.is_true("RolledOut")


def test_a_finished_drafter_stays_ready_when_it_is_suspended():
    world = ready_drafter()
    world.edit(suspend=True)
    world.settle()
    assert world.is_true("Ready")
    assert world.is_true("Suspended")


def test_the_history_of_revisions_is_bounded():
    world = ready_drafter(revisionHistoryLimit=2)
    for rate in (0.2, 0.3, 0.4):
        world.edit(distillation={"learningRate": rate})
        world.settle()
        world.succeed("distil")
        world.succeed("evaluate", evaluation(length=1.5))
    states = [entry["state"] for entry in world.resource["status"]["revisions"]]
    assert states == ["Rejected", "Serving"]


def test_servers_stay_as_they_are_while_the_target_is_resolved_anew():
    world = ready_drafter()
    since = world.condition("RolledOut")["lastTransitionTime"]
    world.now = world.now.replace(hour=5)
    world.retry("1")
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
    assert world.is_true("Available")
    assert world.is_true("RolledOut")
    assert not world.is_true("Ready")
    assert world.resource["status"]["endpoint"]
    world.succeed("resolve")
    assert world.is_true("RolledOut")
    for stage in ("regenerate", "baseline", "convert", "distil", "evaluate"):
        world.succeed(stage)
    assert world.is_true("Ready")
    assert world.condition("RolledOut")["lastTransitionTime"] == since
    assert world.stages_with_jobs() == set()


def test_a_retry_leaves_a_stage_that_runs_alone():
    world, uid = distilling()
    world.retry("1")
    world.settle()
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"distil"}
    assert world.job("distil")["metadata"]["uid"] == uid


def move(world, storage):
    """Give a drafter and its backbone another storage."""
    world.observed = replace(world.observed, backbone={**finished_backbone(), "spec": {"storage": storage}})
    world.edit(storage=storage)
    world.settle()


@pytest.mark.parametrize("how", ["retry", "endpoint"])
def test_a_retry_or_another_endpoint_lets_finished_stages_look_for_their_artifacts(how):
    world = ready_drafter()
    served = world.child("Deployment")["metadata"]["uid"]
    before = {job["metadata"]["uid"] for job in world.jobs}
    if how == "retry":
        world.retry("1")
        world.settle()
        world.succeed("resolve")
    else:
        move(world, {**STORAGE, "endpoint": "https://s3.example.com"})
    assert world.stages_with_jobs() == {"regenerate", "baseline"}
    assert world.stage("distil")["doubted"] is True
    for stage in ("regenerate", "convert"):
        world.succeed(stage)
    assert world.stages_with_jobs() == {"baseline", "distil"}
    task = task_of(world.job("distil"))
    remade = ArtifactRef(uri=task.prefix, digest=digest("remade"))
    outcome = outcome_of(task).model_copy(update={"artifact": remade})
    world.end("distil", message=outcome.model_dump_json())
    world.succeed("baseline")
    assert world.child("Deployment")["metadata"]["uid"] == served
    world.succeed("evaluate")
    assert not before & {job["metadata"]["uid"] for job in world.jobs} - {world.job("resolve")["metadata"]["uid"]}
    assert world.resource["status"]["revisions"][0]["artifact"]["digest"] == digest("remade")
    world.roll()
    assert world.is_true("Ready")
    assert not any(entry["doubted"] for entry in world.resource["status"]["stages"])


@pytest.mark.parametrize(
    "storage",
    [{**STORAGE, "endpoint": "https://s3.example.com"}, {"uri": "s3://elsewhere/x", "credentialsSecret": "other"}],
)
def test_another_storage_is_served_from_once_it_holds_the_drafter(storage):
    world = ready_drafter()
    served = world.child("Deployment")["metadata"]["uid"]
    move(world, storage)
    assert world.stages_with_jobs() == {"regenerate", "baseline"}
    for stage in ("regenerate", "baseline", "convert", "distil"):
        world.succeed(stage)
        assert world.child("Deployment")["metadata"]["uid"] == served
    world.edit(serving={"replicas": 3})
    world.settle()
    [fetch] = [
        each
        for each in world.child("Deployment")["spec"]["template"]["spec"]["initContainers"]
        if each["name"] == "fetch"
    ]
    assert fetch["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert world.child("Deployment")["spec"]["replicas"] == 3
    world.succeed("evaluate")
    world.roll()
    assert world.is_true("Ready")
    files = next(iter(world.child("ConfigMap")["data"].values()))
    assert storage.get("endpoint", storage["uri"]) in files


def test_other_keys_of_the_same_storage_are_used_at_once():
    world = ready_drafter()
    served = world.child("Deployment")["metadata"]["uid"]
    world.edit(storage={**STORAGE, "credentialsSecret": "new"})
    world.settle()
    assert world.child("Deployment")["metadata"]["uid"] != served


def test_a_lost_status_does_not_take_the_drafter_from_the_servers():
    world = ready_drafter()
    served = world.child("Deployment")["metadata"]["uid"]
    world.resource.pop("status")
    world.jobs, world.pods = [], []
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert", "distil"):
        world.succeed(stage)
        assert world.child("Deployment")["metadata"]["uid"] == served
        assert world.is_true("Available")
        assert "until it is known" in world.condition("RolledOut")["message"]
    world.succeed("evaluate")
    assert world.child("Deployment")["metadata"]["uid"] == served
    assert world.is_true("Ready")


@pytest.mark.parametrize("by", ["retry", "edit"])
def test_a_new_target_is_served_with_the_drafter_that_was_trained_for_it(by):
    world = ready_drafter()
    served = world.child("Deployment")["metadata"]["uid"]
    if by == "retry":
        world.retry("1")
    else:
        world.edit(target={"uri": "hf://org/model", "revision": "next"})
    world.settle()
    found = result_of(task_of(world.job("resolve")))
    world.succeed("resolve", found.model_copy(update={"model": found.model.model_copy(update={"revision": "f" * 40})}))
    for stage in ("regenerate", "baseline", "convert", "distil"):
        world.succeed(stage)
    world.succeed("evaluate", evaluation(length=1.0))
    assert world.condition("GatePassed")["reason"] == "Regressed"
    assert world.child("Deployment")["metadata"]["uid"] == served
    world.edit(evaluation={"gate": {"maxRegression": 1}})
    world.settle()
    assert world.child("Deployment")["metadata"]["uid"] != served
    world.roll()
    assert world.is_true("Ready")
    assert "f" * 40 in str(world.child("ConfigMap")["data"])


def test_servers_over_quota_are_a_condition():
    world = drafter()
    world.settle()
    world.succeed("resolve")
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    world.child("Deployment")["status"] = {"conditions": [failure]}
    world.settle()
    assert world.condition("Available")["reason"] == "WaitingForCapacity"
    assert "exceeded quota: gpus" in world.condition("Available")["message"]


def test_servers_that_do_not_start_are_told_apart_from_training():
    world = drafter()
    world.settle()
    world.succeed("resolve")
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    labels = {"osprey.dev/owner-uid": world.resource["metadata"]["uid"]}
    world.pods.append(
        {
            "kind": "Pod",
            "metadata": {"name": "s", "uid": "s", "labels": labels},
            "status": {"phase": "Pending", "containerStatuses": [{"name": "server", "state": {"waiting": waiting}}]},
        }
    )
    world.settle()
    assert world.condition("Available")["reason"] == "ImagePull"
    assert "no such tag" in world.condition("Available")["message"]


def test_serving_can_be_taken_back():
    world = ready_drafter()
    spec = dict(world.resource["spec"])
    del spec["serving"]
    world.resource["spec"] = spec
    world.edit()
    world.settle()
    assert world.children == []
    assert world.condition("Available")["reason"] == "NotRequested"
    assert world.is_true("Ready")


def test_a_deleted_deployment_comes_back():
    world = ready_drafter()
    world.children = [child for child in world.children if child["kind"] != "Deployment"]
    assert world.look().admin_secret.startswith("small-admin-key-")
    assert world.child("Deployment")
    assert not world.is_true("RolledOut")


def test_live_acceptance_is_judged_when_there_is_enough_traffic():
    adaptation = {"maxAcceptanceDrop": 0.1, "minVerifySteps": 500}
    world = ready_drafter(adaptation=adaptation)
    assert world.condition("AcceptanceDegraded")["reason"] == "ServersSilent"
    assert "network policies" in world.condition("AcceptanceDegraded")["message"]
    world.observed = replace(world.observed, traffic=Traffic(499, 1.0, 20.04))
    world.settle()
    assert world.condition("AcceptanceDegraded")["status"] == "Unknown"
    assert world.condition("AcceptanceDegraded")["reason"] == "NotEnoughTraffic"
    assert "live" not in world.resource["status"]["acceptanceLength"]
    assert world.resource["status"]["tokensPerSecond"]["live"] == 20.0
    world.observed = replace(world.observed, traffic=Traffic(500, 1.85, 20.0))
    world.settle()
    assert world.condition("AcceptanceDegraded")["reason"] == "AsEvaluated"
    assert world.resource["status"]["acceptanceLength"]["live"] == 1.85
    world.observed = replace(world.observed, traffic=Traffic(500, 1.6, 20.0))
    world.look()
    assert world.condition("AcceptanceDegraded")["status"] == "True"
    assert [event.reason for event in world.plan.events] == ["BelowEvaluated"]


def test_live_acceptance_is_held_against_the_drafter_that_serves_not_against_a_rejected_one():
    world = ready_drafter(adaptation={"maxAcceptanceDrop": 0.1, "minVerifySteps": 500})
    world.observed = replace(world.observed, traffic=Traffic(500, 1.85, 20.0))
    world.edit(distillation={"learningRate": 0.5})
    world.settle()
    world.succeed("distil")
    world.succeed("evaluate", evaluation(length=4.0, speedup=0.7))
    assert world.condition("GatePassed")["reason"] == "TooSlow"
    assert world.resource["status"]["acceptanceLength"]["evaluatedCorpus"] == 3.9
    assert world.condition("AcceptanceDegraded")["reason"] == "AsEvaluated"


def test_without_a_drafter_nothing_is_degraded():
    world = drafter(adaptation={})
    world.settle()
    world.succeed("resolve")
    assert world.condition("AcceptanceDegraded")["reason"] == "ServingWithoutDrafter"


def test_a_server_that_is_not_ready_does_not_count():
    world = ready_drafter()
    world.edit(distillation={"learningRate": 0.5})
    world.settle()
    world.succeed("distil")
    world.succeed("evaluate", evaluation(length=2.5))
    world.child("Deployment")["status"] |= {"readyReplicas": 0, "availableReplicas": 0}
    world.settle()
    assert world.condition("RolledOut")["message"].startswith("0 of 2 servers")


def test_what_a_running_stage_says_of_itself_is_in_its_status():
    world = drafter()
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        world.succeed(stage)
    said = StageProgress(step=3, tokens_per_second=7.00001, simulated_acceptance_length=2.5)
    world.observed = replace(world.observed, progress={world.job("distil")["metadata"]["uid"]: said})
    world.start("distil")
    assert world.stage("distil")["metrics"] == {"tokens_per_second": 7.0, "simulated_acceptance_length": 2.5}
    world.observed = replace(world.observed, progress={})
    world.settle()
    assert world.stage("distil")["metrics"]["simulated_acceptance_length"] == 2.5


def test_a_changed_target_image_is_another_engine():
    world = ready_drafter()
    world.edit(serving={"replicas": 2, "image": "sglang:next"})
    world.settle()
    assert world.stages_with_jobs() == {"regenerate", "baseline"}
    assert task_of(world.job("baseline")).config.engine.version == "sglang:next"
