import copy
from dataclasses import replace

import pytest

from osprey_api.conditions import ConditionReason, ExitCode, FailureReason
from osprey_api.stages import Outcome, Pinned
from osprey_operator.children import annotation, template_hash
from osprey_operator.plan.failures import failure_of
from osprey_operator.state import ANNOTATION_APPLIED, Observed, StageProgress
from tests.operator.world import DRAFTER_SPEC, backbone, drafter, finished_backbone, outcome_of, result_of, task_of


def distilling(**changes):
    world = drafter(**changes)
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        world.succeed(stage)
    return world


def test_a_passing_failure_is_tried_again_later_and_later():
    world = distilling()
    delays = []
    for attempt in (1, 2, 3):
        uid = world.job("distil")["metadata"]["uid"]
        world.fail("distil", FailureReason.SERVER_FAILED)
        entry = world.stage("distil")
        assert (entry["state"], entry["reason"], entry["attempts"]) == ("Retrying", "ServerFailed", attempt)
        assert world.job("distil")["metadata"]["uid"] == uid
        delays.append(world.plan.requeue_after)
        world.wait(delays[-1] - 1)
        assert world.job("distil")["metadata"]["uid"] == uid
        world.wait(1)
        assert world.job("distil")["metadata"]["uid"] != uid
        assert world.stage("distil")["state"] == "Pending"
        assert world.stage("distil")["attempts"] == attempt + 1
    assert delays == [20, 40, 80]
    world.succeed("distil")
    assert world.stage("distil")["reason"] == ""
    assert world.stage("distil")["attempts"] == 4


def test_the_delay_has_a_limit_and_a_store_that_is_away_is_waited_for():
    world = distilling(job={"retries": 1})
    for _ in range(8):
        world.fail("distil", FailureReason.STORAGE_UNAVAILABLE)
        assert world.stage("distil")["state"] == "Retrying"
        delay = world.plan.requeue_after
        world.wait(delay)
    assert delay == 300
    assert world.stage("distil")["attempts"] == 9


def test_retries_of_a_fault_of_ours_end():
    world = distilling(job={"retries": 1})
    world.fail("distil", FailureReason.INTERNAL_ERROR, "Traceback")
    world.wait(20)
    world.fail("distil", FailureReason.INTERNAL_ERROR, "Traceback")
    assert world.stage("distil")["state"] == "Failed"
    assert "nextAttemptTime" not in world.stage("distil")
    assert world.condition("Progressing")["status"] == "False"
    assert world.condition("Ready")["reason"] == "InternalError"
    assert world.condition("Trained")["reason"] == "InternalError"
    assert world.condition("Progressing")["message"] == "distil failed: Traceback"
    uid = world.job("distil")["metadata"]["uid"]
    world.wait(7200)
    assert world.job("distil")["metadata"]["uid"] == uid


def test_a_long_run_does_not_use_up_the_retries():
    world = distilling(job={"retries": 1})
    for _ in range(5):
        world.fail("distil", FailureReason.PEER_LOST, seconds=7200)
        assert world.plan.requeue_after == 20
        world.wait(20)
        assert world.stage("distil")["state"] == "Pending"


def test_after_long_runs_a_quick_failure_has_all_its_retries():
    world = distilling(job={"retries": 1})
    for _ in range(5):
        world.fail("distil", FailureReason.PEER_LOST, seconds=7200)
        world.wait(20)
    world.fail("distil", FailureReason.INTERNAL_ERROR)
    assert world.stage("distil")["state"] == "Retrying"
    assert world.plan.requeue_after == 20
    world.wait(20)
    world.fail("distil", FailureReason.INTERNAL_ERROR)
    assert world.stage("distil")["state"] == "Failed"
    assert (world.stage("distil")["attempts"], world.stage("distil")["failures"]) == (7, 2)


def get_to(world, step):
    """Let distil say that it is at a step, and its pod end before its Job does."""
    said = StageProgress(step=step, total_steps=9000)
    world.observed = replace(world.observed, progress={world.job("distil")["metadata"]["uid"]: said})
    world.start("distil")
    world.observed = replace(world.observed, progress={})
    world.pod("distil", phase="Failed")
    world.settle()


def test_long_runs_that_get_further_use_up_no_retries():
    world = distilling(job={"retries": 1})
    for step in (1000, 2000, 2500, 4000, 7000):
        get_to(world, step)
        world.fail("distil", FailureReason.INTERNAL_ERROR, seconds=7200)
        entry = world.stage("distil")
        assert (entry["state"], entry["failures"], entry["farthestStep"]) == ("Retrying", 0, step)
        assert world.plan.requeue_after == 20
        world.wait(20)
        assert "step" not in world.stage("distil")
    get_to(world, 9000)
    world.succeed("distil")
    assert "farthestStep" not in world.stage("distil")


@pytest.mark.parametrize("steps", [(None, None), (3000, 3000, 3000), (3000, 2000, 1000), (3000, None, 3000)])
def test_long_runs_that_get_no_further_use_up_the_retries(steps):
    world = distilling(job={"retries": 1})
    for attempt, step in enumerate(steps, start=1):
        assert world.stage("distil")["attempts"] == attempt
        assert world.stage("distil")["state"] == "Pending"
        if step is not None:
            get_to(world, step)
        world.fail("distil", FailureReason.INTERNAL_ERROR, seconds=7200)
        world.wait(20)
    assert world.stage("distil")["state"] == "Failed"
    assert world.stage("distil").get("farthestStep") == steps[0]


def test_how_far_a_stage_got_is_known_after_it_has_waited_for_another():
    world = distilling(job={"retries": 1})
    get_to(world, 3000)
    world.fail("distil", FailureReason.INTERNAL_ERROR, seconds=7200)
    world.wait(20)
    world.fail("distil", FailureReason.CORRUPT_ARTIFACT, seconds=7200)
    world.wait(20)
    assert "regenerate" in world.stages_with_jobs()  # what it reads is looked for anew
    assert world.stage("distil")["farthestStep"] == 3000


def test_the_retry_annotation_gives_another_chance():
    world = distilling()
    world.fail("distil", FailureReason.DIVERGED)
    assert world.stage("distil")["state"] == "Failed"
    world.retry("1")
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"distil"}
    assert world.stage("distil")["attempts"] == 1
    world.succeed("distil")
    assert world.is_true("Trained")


def test_a_server_that_refuses_its_drafter_is_no_passing_failure():
    timeout = Outcome(failure=FailureReason.SERVER_TIMEOUT, message="the server did not come")
    stage = {"exitCode": 75, "message": timeout.model_dump_json()}
    refusal = {"exitCode": 64, "message": "osprey plugin: 3 tensors are missing"}
    status = {
        "containerStatuses": [{"name": "stage", "state": {"terminated": stage}}],
        "initContainerStatuses": [{"name": "server", "state": {}, "lastState": {"terminated": refusal}}],
    }
    failure = failure_of({"metadata": {"name": "job"}}, [{"metadata": {"name": "pod"}, "status": status}])
    assert failure.reason is FailureReason.SERVER_FAILED
    assert failure.code is ExitCode.WRONG_INPUT
    assert "3 tensors are missing" in failure.message


def test_a_changed_template_gives_another_chance():
    world = distilling()
    world.end("distil", code=137, reason="OOMKilled")
    assert world.stage("distil")["reason"] == "OutOfMemory"
    assert world.stage("distil")["state"] == "Failed"
    assert "resources.limits.memory" in world.condition("Ready")["message"]
    uid = world.job("distil")["metadata"]["uid"]
    limits = {"resources": {"limits": {"memory": "8Gi"}}}
    world.edit(job={"template": {"spec": {"containers": [{"name": "stage", **limits}]}}})
    world.settle()
    assert world.job("distil")["metadata"]["uid"] != uid
    assert world.stage("distil")["attempts"] == 2


def test_an_edit_gives_another_chance_to_a_failed_stage_whose_job_is_gone():
    world = distilling()
    world.fail("distil", FailureReason.DIVERGED)
    world.jobs, world.pods = [], []
    world.wait(600)
    assert world.stages_with_jobs() == set()
    world.edit(job={"deadlineSeconds": 100})
    world.settle()
    assert world.stages_with_jobs() == {"distil"}


def test_a_running_job_whose_template_changed_is_replaced_once_its_pods_are_gone():
    world = distilling()
    world.start("distil")
    world.edit(job={"zeroStage": 2})
    pod = world.pods[-1]
    world.look()
    world.pods.append(pod)  # it has its grace period
    world.settle()
    assert world.stages_with_jobs() == set()
    assert "pods of the last attempt" in world.stage("distil")["message"]
    assert world.condition("Progressing")["message"] == "distil waits until the pods of the last attempt are gone"
    world.pods.remove(pod)
    world.settle()
    assert world.stages_with_jobs() == {"distil"}
    assert task_of(world.job("distil")).execution.zero_stage == 2


def test_broken_data_is_named_and_recovers_when_it_is_repaired():
    world = drafter()
    world.settle()
    world.succeed("resolve")
    world.fail("regenerate", FailureReason.INVALID_DATA, "s3://prompts/math.jsonl line 5: no JSON; repair it")
    assert world.condition("Ready")["reason"] == "InvalidData"
    assert "line 5" in world.condition("Ready")["message"]
    assert world.stage("regenerate")["state"] == "Failed"
    assert world.plan.requeue_after == 10  # the baseline runs

    def resolve_again(after, content):
        uid = world.job("resolve")["metadata"]["uid"]
        world.wait(after - 1)
        assert world.job("resolve")["metadata"]["uid"] == uid
        world.wait(1)
        assert world.job("resolve")["metadata"]["uid"] != uid
        assert world.is_true("Resolved")
        assert world.stage("regenerate")["state"] == "Failed"
        found = result_of(task_of(world.job("resolve")))
        data = found.data[0].model_copy(update={"source": Pinned(uri=found.data[0].source.uri, digest=content)})
        world.succeed("resolve", found.model_copy(update={"data": (data, *found.data[1:])}))

    same = result_of(task_of(world.job("resolve"))).data[0].source.digest
    resolve_again(20, same)
    assert world.stage("regenerate")["state"] == "Failed"
    resolve_again(40, same)
    resolve_again(80, f"sha256:{'7' * 64}")
    assert world.stage("regenerate")["state"] == "Pending"
    assert {"regenerate", "baseline"} <= world.stages_with_jobs()
    assert world.stage("resolve")["attempts"] == 1
    assert "nextAttemptTime" not in world.stage("resolve")
    world.succeed("regenerate")
    assert "convert" in world.stages_with_jobs()


@pytest.mark.parametrize("reason", [FailureReason.STORAGE_NOT_FOUND, FailureReason.STORAGE_ACCESS_DENIED])
def test_a_bucket_that_is_missing_is_tried_until_it_is_there(reason):
    world = backbone()
    world.settle()
    for _ in range(3):
        world.fail("resolve", reason, "bucket drafters: create it")
        assert world.condition("Ready")["reason"] == reason
        assert world.condition("Resolved")["reason"] == reason
        assert "create it" in world.condition("Progressing")["message"]
        world.wait(world.plan.requeue_after)
    world.succeed("resolve")
    assert world.is_true("Resolved")
    assert world.stage("resolve")["attempts"] == 1


def test_any_failure_of_resolve_is_tried_again():
    world = backbone()
    world.settle()
    world.fail("resolve", FailureReason.UNSUPPORTED_MODEL)
    world.wait(20)
    assert world.stages_with_jobs() == {"resolve"}


def test_access_that_is_lost_half_way_is_tried_again_by_the_stage_itself():
    world = distilling()
    world.fail("distil", FailureReason.STORAGE_ACCESS_DENIED)
    assert world.stage("distil")["state"] == "Failed"
    uid = world.job("distil")["metadata"]["uid"]
    world.wait(20)
    assert world.job("distil")["metadata"]["uid"] != uid
    assert world.stages_with_jobs() == {"distil"}


def test_a_result_that_was_lost_with_its_pod_is_asked_for_again():
    world = distilling()
    uid = world.job("distil")["metadata"]["uid"]
    world.start("distil")
    world.job("distil")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    world.pods = []
    world.settle()
    assert world.job("distil")["metadata"]["uid"] != uid
    world.succeed("distil")
    assert world.is_true("Trained")


def test_a_result_that_never_fits_ends():
    world = distilling(job={"retries": 1})
    for _ in range(3):
        world.end("distil", message="what?")
        if world.plan.requeue_after is not None:
            world.wait(min(world.plan.requeue_after, 300))
    assert world.stage("distil")["state"] == "Failed"
    assert world.stage("distil")["reason"] == "InternalError"


@pytest.mark.parametrize("reason", [FailureReason.CORRUPT_ARTIFACT, FailureReason.SOURCE_NOT_FOUND])
def test_whoever_made_a_damaged_input_makes_it_anew(reason):
    world = distilling()
    world.fail("distil", reason)
    assert world.stages_with_jobs() == set()
    world.wait(20)
    assert world.stages_with_jobs() - {"resolve"} == {"regenerate"}
    assert world.stage("distil")["state"] == "Pending"
    world.succeed("regenerate")
    assert world.stages_with_jobs() - {"resolve"} == {"convert"}
    world.succeed("convert")
    assert world.stages_with_jobs() - {"resolve"} == {"distil"}
    assert world.stage("distil")["attempts"] == 2
    world.succeed("distil")
    assert world.is_true("Trained")


def test_the_pod_that_failed_first_speaks_for_the_job():
    world = distilling(job={"nodes": 2})
    assert {child["kind"] for child in world.children} == {"ConfigMap", "Deployment", "Service"}
    job = world.job("distil")

    def pod(index, moment, code, message):
        ended = {"exitCode": code, "finishedAt": moment, "message": message}
        return {
            "kind": "Pod",
            "metadata": {
                "name": f"p{index}",
                "uid": f"p{index}",
                "labels": job["metadata"]["labels"],
                "ownerReferences": [{"uid": job["metadata"]["uid"]}],
            },
            "status": {"phase": "Failed", "containerStatuses": [{"name": "stage", "state": {"terminated": ended}}]},
        }

    world.pods += [
        pod(0, "2026-01-01T00:00:01Z", 76, '{"failure": "PeerLost", "message": "rank 1"}'),
        pod(1, "2026-01-01T00:00:02Z", 64, '{"failure": "Diverged", "message": "loss is NaN at step 9"}'),
    ]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    world.settle()
    assert world.stage("distil")["reason"] == "Diverged"


def test_of_several_pods_the_one_with_the_artifact_says_what_was_made():
    world = distilling(job={"nodes": 2})
    world.start("distil")
    job = world.job("distil")
    outcome = outcome_of(task_of(job))
    made = []
    for index, said in enumerate([outcome.model_copy(update={"artifact": None}), outcome]):
        pod = copy.deepcopy(world.pods[-1])
        ended = {"exitCode": 0, "finishedAt": "2026-01-01T00:00:01Z", "message": said.model_dump_json()}
        pod["metadata"] |= {"name": f"p{index}", "uid": f"p{index}"}
        pod["status"] = {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "stage", "state": {"terminated": ended}}],
        }
        made.append(pod)
    world.pods = made
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    world.settle()
    assert world.is_true("Trained")


def test_a_services_headless_service_goes_with_its_stage():
    world = distilling(job={"nodes": 2})
    services = [child for child in world.children if child["metadata"]["labels"].get("osprey.dev/stage")]
    assert len(services) == 1
    world.edit(distillation={"epochs": 1})
    world.settle()
    after = [child for child in world.children if child["metadata"]["labels"].get("osprey.dev/stage")]
    assert len(after) == 1
    assert after[0]["metadata"]["name"] != services[0]["metadata"]["name"]


def test_a_deadline_is_final():
    world = distilling(job={"deadlineSeconds": 100})
    world.job("distil")["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
    world.settle()
    assert world.stage("distil")["reason"] == "DeadlineExceeded"
    assert "100 s" in world.condition("Ready")["message"]
    assert world.stage("distil")["state"] == "Failed"


def waiting(reason, message):
    return {"containerStatuses": [{"name": "stage", "state": {"waiting": {"reason": reason, "message": message}}}]}


def unscheduled(message):
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (waiting("ErrImagePull", "x:y"), "ImagePull", "x:y"),
        (waiting("CreateContainerConfigError", 'secret "s3" not found'), "SecretNotFound", "create the Secret"),
        (waiting("CreateContainerConfigError", "couldn't find key A in Secret ns/s3"), "SecretNotFound", "key A"),
        (unscheduled('persistentvolumeclaim "models" not found'), "ClaimNotFound", "models"),
        (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "WaitingForCapacity", "add nodes"),
        (unscheduled("0/3 nodes are available: 3 Too many pods."), "WaitingForCapacity", "such as servers"),
        (unscheduled("0/3 nodes are available: 3 node(s) had untolerated taint"), "Unschedulable", "small-distil"),
    ],
)
def test_a_pod_that_does_not_start_says_why_and_recovers(status, reason, words):
    world = distilling()
    world.pod("distil", phase="Pending", **status)
    world.settle()
    assert world.condition("Ready")["reason"] == reason
    assert words in world.condition("Ready")["message"]
    assert world.condition("Progressing")["status"] == "True"
    world.start("distil")
    assert world.condition("Ready")["reason"] == "Running"


def test_a_missing_backbone_is_told_before_a_missing_node():
    world = drafter()
    world.observed = Observed(backbone=None)
    world.settle()
    world.succeed("resolve")
    world.pod("regenerate", phase="Pending", **unscheduled("no nodes available to schedule pods"))
    world.settle()
    assert world.stage("regenerate")["reason"] == "Unschedulable"
    assert world.condition("Ready")["reason"] == "BackboneNotFound"


def test_a_volume_whose_secret_is_missing_is_read_from_events():
    world = distilling()
    pod = world.pod("distil", phase="Pending")
    message = 'MountVolume.SetUp failed for volume "ca" : secret "ca" not found'
    world.observed = replace(world.observed, warnings={pod["metadata"]["uid"]: message})
    world.settle()
    assert world.condition("Ready")["reason"] == "SecretNotFound"


@pytest.mark.parametrize(
    ("why", "reason"),
    [("violates PodSecurity", "PodRefused"), ("exceeded quota: gpus", "WaitingForCapacity")],
)
def test_a_job_whose_pods_are_refused_says_so(why, reason):
    world = distilling()
    uid = world.job("distil")["metadata"]["uid"]
    world.observed = replace(world.observed, warnings={uid: f"pods x is forbidden: {why}"})
    world.settle()
    assert world.condition("Ready")["reason"] == reason
    assert why in world.condition("Ready")["message"]
    assert world.condition("Progressing")["status"] == "True"


def test_what_waits_for_room_takes_few_words_in_the_table():
    world = distilling()
    world.pod("distil", phase="Pending", **unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))
    world.settle()
    assert world.condition("Progressing")["message"] == "distil waits for room"


def test_a_queued_job_waits_for_its_queue():
    world = distilling(job={"queue": "team-a"})
    assert world.job("distil")["spec"]["suspend"] is True
    assert world.condition("Ready")["reason"] == "WaitingForCapacity"


def test_a_job_that_the_api_server_refuses_is_tried_later_or_when_it_changes():
    world = drafter()
    world.look()
    job = world.job("resolve")
    name, content = job["metadata"]["name"], template_hash(job)
    world.remove(job)
    world.resource.pop("status")
    world.refuse(f"Job {name}", content, FailureReason.POD_REFUSED, 20)
    world.settle()
    assert world.stages_with_jobs() == set()
    entry = world.stage("resolve")
    assert (entry["state"], entry["reason"], entry["attempts"]) == ("Retrying", "PodRefused", 0)
    assert world.plan.requeue_after == 20
    world.edit(job={"template": {"metadata": {"labels": {"fixed": "yes"}}}})
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}


def test_a_service_that_is_refused_keeps_its_job_from_starting():
    world = drafter(job={"nodes": 2})
    world.settle()
    for stage in ("resolve", "regenerate", "baseline"):
        world.succeed(stage)
    world.refuse(f"Service {name_of_distil(world)}", "", FailureReason.NAME_TAKEN, 20)
    world.succeed("convert")
    assert world.stages_with_jobs() == set()
    entry = world.stage("distil")
    assert (entry["state"], entry["reason"]) == ("Retrying", "NameTaken")
    assert world.condition("Ready")["reason"] == "NameTaken"
    world.wait(20)
    assert world.stages_with_jobs() == {"distil"}


def name_of_distil(world):
    """The name that the Job of distil will have, and its Service: that of a twin."""
    twin = drafter(**world.spec)
    twin.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert"):
        twin.succeed(stage)
    return twin.job("distil")["metadata"]["name"]


def test_a_deployment_that_the_api_server_refuses_is_a_condition():
    world = drafter()
    world.settle()
    world.look()
    world.succeed("resolve")
    deployment = world.child("Deployment")
    world.children.remove(deployment)
    world.refuse("Deployment small", annotation(deployment, ANNOTATION_APPLIED), FailureReason.POD_REFUSED, 20)
    world.settle()
    assert world.condition("Available")["reason"] == "PodRefused"
    world.wait(20)
    assert world.child("Deployment")


def test_a_job_that_an_injected_sidecar_keeps_alive_is_done():
    world = distilling()
    task = task_of(world.job("distil"))
    ended = {
        "exitCode": 0,
        "message": outcome_of(task).model_dump_json(),
        "finishedAt": "2026-01-01T00:00:00Z",
    }
    world.pod(
        "distil",
        phase="Running",
        containerStatuses=[
            {"name": "sidecar", "state": {"running": {}}},
            {"name": "stage", "state": {"terminated": ended}},
        ],
    )
    world.settle()
    assert world.is_true("Trained")
    world.wait(61)
    assert "distil" not in world.stages_with_jobs()
    assert world.is_true("Trained")


def test_a_long_message_is_cut_to_what_a_status_holds():
    world = distilling()
    uid = world.job("distil")["metadata"]["uid"]
    world.observed = replace(world.observed, warnings={uid: "x" * 9000})
    world.settle()
    assert len(world.stage("distil")["message"]) == 2000
    assert len(world.condition("Ready")["message"]) == 2000
    assert len(world.condition("Progressing")["message"]) <= 140


def test_suspension_stops_jobs_and_goes_on():
    world = distilling()
    world.start("distil")
    world.edit(suspend=True)
    world.settle()
    assert world.stages_with_jobs() == set()
    assert world.is_true("Suspended")
    assert world.condition("Ready")["reason"] == "Suspended"
    assert world.child("Deployment")
    writes = world.writes
    world.wait(3600)
    assert world.writes == writes
    world.edit(suspend=False)
    world.settle()
    assert world.stages_with_jobs() == {"distil"}
    assert not world.is_true("Suspended")


def test_a_stage_that_another_resource_runs_is_waited_for_and_shared():
    first, second = drafter(), drafter()
    second.resource["metadata"].update(name="other", uid="other")
    for world in (first, second):
        world.settle()
        world.succeed("resolve")
    shared = first.job("regenerate")
    baseline = first.job("baseline")
    third = drafter()
    third.resource["metadata"].update(name="third", uid="third")
    third.settle()
    third.jobs += [shared, baseline]
    third.succeed("resolve")
    assert {job["metadata"]["name"] for job in third.jobs} == {
        shared["metadata"]["name"],
        baseline["metadata"]["name"],
        third.job("resolve")["metadata"]["name"],
    }
    assert third.stage("regenerate")["reason"] == "WaitingForSharedStage"
    assert "OspreyDrafter small" in third.stage("regenerate")["message"]
    assert third.condition("Progressing")["reason"] == "WaitingForSharedStage"
    third.succeed("regenerate")
    third.succeed("baseline")
    assert third.stage("regenerate")["state"] == "Succeeded"
    assert third.stage("regenerate")["job"] == shared["metadata"]["name"]
    assert third.stages_with_jobs() == {"convert"}


def test_a_doubted_artifact_is_not_vouched_for_by_the_job_that_once_made_it():
    owner = drafter()
    owner.settle()
    owner.succeed("resolve")
    owner.succeed("regenerate")
    job, pod = owner.job("regenerate"), owner.pods[-1]
    job["metadata"]["uid"] = pod["metadata"]["ownerReferences"][0]["uid"] = "theirs"
    world = drafter()
    world.resource["metadata"].update(name="other", uid="other")
    world.settle()
    world.jobs.append(job)
    world.pods.append(pod)
    for stage in ("resolve", "baseline", "convert"):
        world.succeed(stage)
    assert world.stage("regenerate")["job"] == job["metadata"]["name"]
    world.fail("distil", FailureReason.CORRUPT_ARTIFACT)
    stray = {**copy.deepcopy(pod), "status": {"phase": "Running"}}
    stray["metadata"] |= {"name": "stray", "uid": "stray", "ownerReferences": []}
    world.pods.append(stray)  # something delays the check for a pass
    world.wait(20)
    world.pods.remove(stray)
    world.settle()
    assert pod in world.pods
    assert len([each for each in world.jobs if "regenerate" in each["metadata"]["name"]]) == 2
    assert world.stage("regenerate")["state"] == "Pending"


def test_a_result_in_another_storage_is_not_shared():
    owner = drafter()
    world = drafter(storage={"uri": "s3://elsewhere/test"})
    world.resource["metadata"].update(name="other", uid="other")
    for each in (owner, world):
        each.settle()
    owner.succeed("resolve")
    owner.succeed("regenerate")
    world.jobs.append(owner.job("regenerate"))
    world.pods.append(owner.pods[-1])
    world.succeed("resolve")
    assert len([job for job in world.jobs if "regenerate" in job["metadata"]["name"]]) == 2
    assert world.stage("regenerate")["state"] == "Pending"


def test_a_shared_stage_that_fails_or_goes_is_run_here():
    owner = drafter()
    owner.settle()
    owner.succeed("resolve")
    foreign = owner.job("regenerate")
    world = drafter()
    world.resource["metadata"].update(name="other", uid="other")
    world.settle()
    world.jobs.append(foreign)
    world.succeed("resolve")
    assert len([job for job in world.jobs if "regenerate" in job["metadata"]["name"]]) == 1
    foreign["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    world.settle()
    assert len([job for job in world.jobs if "regenerate" in job["metadata"]["name"]]) == 2


def test_the_plan_does_not_look_at_a_job_of_a_namesake():
    world = drafter()
    world.settle()
    job = world.job("resolve")
    world.resource["metadata"]["uid"] = "born again"
    world.settle()
    assert job in world.jobs
    assert len(world.jobs) == 2


def test_every_word_in_a_condition_is_in_the_closed_set():
    words = {reason.value for reason in (*FailureReason, *ConditionReason)}
    for world in (drafter(), backbone(), distilling()):
        world.settle()
        assert {entry["reason"] for entry in world.resource["status"]["conditions"]} <= words


def test_a_spec_is_taken_as_the_api_server_completes_it():
    world = drafter(**DRAFTER_SPEC, job={"stages": {"distil": {"deadlineSeconds": 60}}})
    world.observed = Observed(backbone=finished_backbone())
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}


def test_pods_of_a_gone_resource_that_ran_the_same_stage_are_waited_for():
    owner, world = drafter(), drafter()
    world.resource["metadata"].update(name="other", uid="other")
    for each in (owner, world):
        each.settle()
    owner.succeed("resolve")
    owner.start("regenerate")
    pod = owner.pods[-1]  # its resource and its Job are deleted; it has its grace period
    world.pods.append(pod)
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"baseline"}
    assert "pods of the last attempt" in world.stage("regenerate")["message"]
    world.pods.remove(pod)
    world.settle()
    assert world.stages_with_jobs() == {"baseline", "regenerate"}


def test_pods_of_a_job_that_runs_elsewhere_in_vain_do_not_hold_a_stage_up():
    owner, world = drafter(), drafter()
    world.resource["metadata"].update(name="other", uid="other")
    for each in (owner, world):
        each.settle()
    owner.succeed("resolve")
    pod = owner.pod("regenerate", phase="Pending", **waiting("ErrImagePull", "x:y"))
    world.pods.append(pod)
    world.jobs.append(owner.job("regenerate"))
    world.succeed("resolve")
    assert world.stage("regenerate")["attempts"] == 1
