import json

import pytest

from osprey_api.common import Storage
from osprey_api.naming import FIELD_MANAGER
from osprey_api.serving import ServerFiles
from osprey_api.stages import StageName, StageTask
from osprey_operator.manifests.stage_job import DISTRIBUTED
from osprey_operator.state import Settings
from tests.operator.manifests.builders import (
    ARTIFACT,
    FINGERPRINT,
    STORAGE,
    UID,
    backbone,
    containers,
    drafter,
    environment,
    job,
    mounts,
    objects,
    owner,
    pod,
    task,
)

BACKBONE_STAGES = [StageName.PRUNE, StageName.TOKENIZE, StageName.PRETRAIN]
CLIENT_STAGES = [StageName.REGENERATE, StageName.BASELINE, StageName.EVALUATE]
TRAINER_STAGES = [stage for stage in StageName if stage not in CLIENT_STAGES]


@pytest.mark.parametrize("stage", StageName)
def test_a_stage_is_told_its_task_and_nothing_of_the_task_is_expanded(stage):
    told = task(stage)
    env = environment(containers(pod(stage))["stage"])
    assert StageTask.model_validate_json(env["OSPREY_TASK"]) == told
    assert env["OSPREY_ATTEMPT"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert env["OSPREY_GRACE_PERIOD_SECONDS"] == "300"
    assert env["HOME"] == env["TMPDIR"] == "/osprey/scratch"


def test_a_dollar_in_a_task_reaches_the_stage_as_it_is():
    told = task(StageName.TOKENIZE, data=[{"source": {"uri": "s3://text/$(HOME)/$$.jsonl"}, "textField": "$(A)"}])
    (entry,) = [e for e in containers(pod(StageName.TOKENIZE, task=told))["stage"]["env"] if e["name"] == "OSPREY_TASK"]
    assert "$$(HOME)/$$$$.jsonl" in entry["value"]


@pytest.mark.parametrize("stage", TRAINER_STAGES)
def test_trainer_stages_run_the_trainer_image_alone(stage):
    spec = pod(stage)
    assert list(containers(spec)) == ["stage"]
    assert spec["containers"][0]["image"] == "osprey-trainer:latest"
    assert spec["containers"][0]["command"] == ["python3", "-m", "osprey_trainer", stage.value]


@pytest.mark.parametrize("stage", CLIENT_STAGES)
def test_client_stages_have_a_server_beside_them(stage):
    spec = pod(stage)
    init = [container["name"] for container in spec["initContainers"]]
    assert init == (["plugin", "fetch", "server"] if stage is StageName.EVALUATE else ["fetch", "server"])
    server = containers(spec)["server"]
    assert server["restartPolicy"] == "Always", "a native sidecar, or the client would never start"
    assert "startupProbe" not in server, "a failing probe would restart the server for ever: the client has a deadline"
    assert server["args"][server["args"].index("--host") + 1] == "127.0.0.1"
    assert environment(containers(spec)["stage"])["OSPREY_SERVER_URL"] == "http://127.0.0.1:30000"
    assert spec["containers"][0]["command"] == ["python3", "-m", "osprey_serving", stage.value]


@pytest.mark.parametrize("stage", CLIENT_STAGES)
def test_only_evaluate_drafts(stage):
    server = containers(pod(stage))["server"]
    drafts = stage is StageName.EVALUATE
    assert ("--speculative-algorithm" in server["args"]) == drafts
    assert ("PYTHONPATH" in environment(server)) == drafts
    assert ("/osprey/drafter" in mounts(server)) == drafts


def test_evaluate_drafts_as_its_config_says():
    args = containers(pod(StageName.EVALUATE))["server"]["args"]
    at = args.index("--speculative-algorithm")
    assert args[at:] == [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/osprey/drafter"),
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"),
    ]


def test_the_users_arguments_come_first_so_that_ours_win():
    args = containers(pod(StageName.BASELINE))["server"]["args"]
    assert args[:2] == ["--dtype", "bfloat16"]
    assert args[2:4] == ["--model-path", "/osprey/model"]
    assert args[args.index("--tp-size") + 1] == "2"


def test_fetch_is_told_what_to_fetch():
    told = task(StageName.EVALUATE)
    wanted = environment(containers(pod(StageName.EVALUATE, task=told))["fetch"])["OSPREY_WANTED"]
    files = ServerFiles.model_validate_json(wanted)
    assert files == ServerFiles(storage=told.storage, target=told.config.target, drafter=ARTIFACT)


def test_a_target_in_a_claim_is_served_from_there():
    target = {"uri": "pvc://models/qwen/8b"}
    spec = pod(StageName.BASELINE, task=task(StageName.BASELINE, target=target))
    server = containers(spec)["server"]
    assert server["args"][server["args"].index("--model-path") + 1] == "/osprey/claims/models/qwen/8b"
    for name in ("stage", "fetch", "server"):
        assert mounts(containers(spec)[name])["/osprey/claims/models"]["readOnly"] is True
    volume = {v["name"]: v for v in spec["volumes"]}["claim-models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_every_claim_of_the_sources_is_mounted_once():
    told = task(
        StageName.RESOLVE,
        model={"uri": "pvc://models/a"},
        data=[
            {"name": "a", "uri": "pvc://models/b", "kind": "Text", "field": "x"},
            {"name": "b", "uri": "pvc://other/b", "kind": "Text", "field": "x"},
        ],
    )
    spec = pod(StageName.RESOLVE, task=told)
    claims = sorted(v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v)
    assert claims == ["models", "other"]


def test_a_claim_that_is_source_and_cache_is_one_writable_volume():
    told = task(StageName.CONVERT, target={"uri": "pvc://models/qwen"})
    spec = pod(StageName.CONVERT, task=told, spec=drafter(modelCache={"claim": "models"}))
    (volume,) = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    stage = containers(spec)["stage"]
    assert mounts(stage)["/osprey/claims/models"]["readOnly"] is True
    assert "readOnly" not in mounts(stage)["/osprey/model-cache"]
    assert environment(stage)["HF_HOME"] == "/osprey/model-cache"


@pytest.mark.parametrize("stage", StageName)
def test_pods_are_what_restricted_admits(stage):
    spec = pod(stage)
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(spec).values():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        writable = {path for path, mount in mounts(container).items() if not mount.get("readOnly")}
        assert {"/osprey/scratch", "/tmp", "/dev/shm"} <= writable
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert {v["name"]: v for v in spec["volumes"]}["shm"]["emptyDir"] == {"medium": "Memory"}


def test_storage_keys_reach_only_the_containers_that_talk_to_s3():
    everything = containers(pod(StageName.EVALUATE, spec=drafter(hubCredentialsSecret="hf")))
    keys = [{"secretRef": {"name": "s3"}}]
    assert everything["stage"]["envFrom"] == everything["fetch"]["envFrom"] == keys
    token = {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}
    assert environment(everything["stage"])["HF_TOKEN"] == environment(everything["fetch"])["HF_TOKEN"] == token
    for name in ("server", "plugin"):
        assert "envFrom" not in everything[name]
        assert "HF_TOKEN" not in environment(everything[name])


def test_without_a_secret_the_service_account_of_the_pod_has_to_do():
    assert "envFrom" not in containers(pod(storage=Storage(uri="s3://drafters")))["stage"]


def test_a_job_is_one_attempt():
    spec = job()["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed", "two pods at once would write the same checkpoints"
    assert "ttlSecondsAfterFinished" not in spec, "the operator reads a finished Job before it goes"
    ignore, wrong_input = spec["podFailurePolicy"]["rules"]
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert wrong_input["action"] == "FailJob"
    assert wrong_input["onExitCodes"] == {"containerName": "stage", "operator": "In", "values": [64]}


def test_deadline_and_grace_period_come_from_the_spec():
    spec = drafter(
        job={"deadlineSeconds": 1000, "gracePeriodSeconds": 77, "stages": {"convert": {"deadlineSeconds": 60}}}
    )
    assert job(spec=spec)["spec"]["activeDeadlineSeconds"] == 1000
    assert pod(spec=spec)["terminationGracePeriodSeconds"] == 77
    assert job(StageName.CONVERT, spec=spec)["spec"]["activeDeadlineSeconds"] == 60


@pytest.mark.parametrize("stage", sorted(DISTRIBUTED))
def test_several_nodes_find_each_other_before_they_are_ready(stage):
    service, the_job = objects(stage, task=task(stage, nodes=4), spec=drafter(job={"nodes": 4, "gpusPerNode": 8}))
    name = the_job["metadata"]["name"]
    spec = the_job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == name
    stage_container = containers(spec["template"]["spec"])["stage"]
    assert environment(stage_container)["OSPREY_RENDEZVOUS"] == f"{name}-0.{name}"
    assert stage_container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


@pytest.mark.parametrize("stage", [s for s in StageName if s not in DISTRIBUTED])
def test_only_training_is_spread_and_has_gpus(stage):
    (the_job,) = objects(stage, task=task(stage, nodes=4), spec=drafter(job={"nodes": 4, "gpusPerNode": 8}))
    assert the_job["spec"]["completions"] == 1
    spec = the_job["spec"]["template"]["spec"]
    assert "subdomain" not in spec
    assert "resources" not in containers(spec)["stage"]


@pytest.mark.parametrize(("gpus", "asked"), [(None, "2"), (1, "1"), (0, None)])
def test_the_server_asks_for_the_gpus_of_the_target(gpus, asked):
    target = {"uri": "hf://Qwen/Qwen3-8B", "tensorParallel": 2, "gpus": gpus}
    server = containers(pod(StageName.BASELINE, spec=drafter(target=target)))["server"]
    assert server.get("resources") == (None if asked is None else {"limits": {"nvidia.com/gpu": asked}})


def test_without_gpus_training_asks_for_none():
    assert "resources" not in containers(pod(spec=drafter(job={"gpusPerNode": 0})))["stage"]


def test_a_queue_starts_the_job():
    queued = job(spec=drafter(job={"queue": "team-a"}))
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert queued["spec"]["suspend"] is True
    assert job()["spec"]["suspend"] is False


def test_the_image_of_the_server_is_the_drafters_or_the_operators():
    assert containers(pod(StageName.BASELINE))["server"]["image"] == "lmsysorg/sglang:v0.5.23"
    custom = drafter(serving={"image": "registry.example/sglang:custom"})
    assert containers(pod(StageName.BASELINE, spec=custom))["server"]["image"] == "registry.example/sglang:custom"
    assert (
        containers(pod(StageName.BASELINE, spec=drafter(serving=None)))["server"]["image"] == "lmsysorg/sglang:v0.5.23"
    )


def test_the_server_of_a_job_ends_with_its_client():
    program, delay, port = containers(pod(StageName.BASELINE))["server"]["lifecycle"]["preStop"]["exec"]["command"][2:]
    compile(program, "preStop", "exec")
    assert (delay, port) == ("0", "30000")


def fragment(value, name="stage"):
    return {"spec": {"containers": [{"name": name, "env": [{"name": "WHO", "value": value}]}]}}


def test_fragments_are_merged_from_the_general_to_the_particular():
    settings = Settings(pod_template=fragment("operator"))
    assert environment(containers(pod(settings=settings))["stage"])["WHO"] == "operator"
    for_all = drafter(job={"template": fragment("job")})
    assert environment(containers(pod(settings=settings, spec=for_all))["stage"])["WHO"] == "job"
    for_one = drafter(job={"template": fragment("job"), "stages": {"distil": {"template": fragment("distil")}}})
    assert environment(containers(pod(settings=settings, spec=for_one))["stage"])["WHO"] == "distil"
    assert environment(containers(pod(StageName.CONVERT, settings=settings, spec=for_one))["stage"])["WHO"] == "job"


def test_a_fragment_for_the_server_reaches_the_sidecar():
    spec = drafter(job={"template": fragment("me", "server")})
    assert environment(containers(pod(StageName.BASELINE, spec=spec))["server"])["WHO"] == "me"
    assert [c["name"] for c in pod(spec=spec)["containers"]] == ["stage"]


def test_a_fragment_cannot_take_our_labels_away():
    spec = drafter(job={"template": {"metadata": {"labels": {"osprey.dev/name": "other", "team": "a"}}}})
    labels = job(spec=spec)["spec"]["template"]["metadata"]["labels"]
    assert labels["osprey.dev/name"] == "qwen3-8b"
    assert labels["team"] == "a"


def test_the_hash_tells_whether_the_job_would_be_another_one():
    def template_hash(**changes):
        return job(**changes)["metadata"]["annotations"]["osprey.dev/template-hash"]

    assert template_hash() == template_hash()
    assert template_hash() != template_hash(settings=Settings(trainer_image="osprey-trainer:2"))
    assert template_hash() != template_hash(spec=drafter(job={"deadlineSeconds": 100}))


def test_children_say_whose_they_are():
    service, the_job = objects(task=task(StageName.DISTIL, nodes=2))
    for child in (service, the_job):
        (reference,) = child["metadata"]["ownerReferences"]
        assert reference["uid"] == UID
        assert reference["controller"] is True
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == FIELD_MANAGER
        assert child["metadata"]["labels"]["osprey.dev/stage"] == "distil"
    assert the_job["spec"]["template"]["metadata"]["labels"] == the_job["metadata"]["labels"]


LONG = [
    "a" * 50,
    "a" * 63,
    "a" * 60 + "-one",
    "a" * 60 + "-two",
    "a." * 99 + "a",
    "qwen3-1.7b",
    "7b",
    "n-7b",
    "osprey",
    "sglang",
]


@pytest.mark.parametrize("name", LONG)
def test_names_and_labels_fit(name):
    service, the_job = objects(owner=owner(name), task=task(StageName.DISTIL, nodes=256))
    job_name = the_job["metadata"]["name"]
    assert len(f"{job_name}-255") <= 63
    assert len(service["metadata"]["name"]) <= 63
    assert service["metadata"]["name"][0].isalpha(), "a Service's name begins with a letter"
    for labels in (the_job["metadata"]["labels"], the_job["spec"]["template"]["metadata"]["labels"]):
        assert all(len(value) <= 63 for value in labels.values())


def test_no_two_resources_share_a_name():
    children = [objects(owner=owner(name), task=task(StageName.DISTIL, nodes=2)) for name in LONG]
    names = [child["metadata"]["name"] for pair in children for child in pair[-1:]]
    services = [child["metadata"]["name"] for pair in children for child in pair[:1]]
    labels = [pair[-1]["metadata"]["labels"]["osprey.dev/name"] for pair in children]
    assert len(set(names)) == len(set(services)) == len(set(labels)) == len(LONG)


def test_long_claim_names_make_volumes():
    long = "models." * 30 + "x"
    spec = pod(StageName.CONVERT, task=task(StageName.CONVERT, target={"uri": f"pvc://{long}/m"}))
    (volume,) = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert len(volume["name"]) <= 63
    assert volume["persistentVolumeClaim"]["claimName"] == long


@pytest.mark.parametrize("stage", BACKBONE_STAGES)
def test_stages_of_backbones(stage):
    spec = pod(stage, owner=owner(kind="OspreyBackbone"), spec=backbone(hubCredentialsSecret="hf"))
    assert environment(containers(spec)["stage"])["HF_TOKEN"]["secretKeyRef"]["name"] == "hf"


def test_a_backbone_has_no_server():
    with pytest.raises(TypeError, match="stage of drafters"):
        objects(StageName.BASELINE, spec=backbone())


def test_everything_is_json():
    for stage in StageName:
        json.dumps(objects(stage, spec=drafter(modelCache={"claim": "models"}), storage=STORAGE))
    assert len(FINGERPRINT) == 64
