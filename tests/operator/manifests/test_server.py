import base64
import json
from dataclasses import replace

import pytest

from osprey_api.serving import ServerFiles
from osprey_operator.manifests.server import admin_secret, admin_secret_name, server_name
from osprey_operator.state import Settings
from tests.operator.manifests.builders import (
    ARTIFACT,
    RESOLVED,
    UID,
    containers,
    drafter,
    environment,
    mounts,
    owner,
    served,
)


def parts(**changes):
    config_map, deployment, service = served(**changes)
    return config_map, deployment, service


def pod(**changes):
    return parts(**changes)[1]["spec"]["template"]["spec"]


def test_containers_in_their_order():
    spec = pod()
    assert [c["name"] for c in spec["initContainers"]] == ["plugin", "fetch", "sync"]
    assert [c["name"] for c in spec["containers"]] == ["server"]
    assert containers(spec)["sync"]["restartPolicy"] == "Always"
    assert [c["name"] for c in pod(drafter=None)["initContainers"]] == ["fetch", "sync"]


def test_the_target_serves_alone_until_there_is_a_drafter():
    server = containers(pod(drafter=None))["server"]
    assert "--speculative-algorithm" not in server["args"]
    assert "PYTHONPATH" not in environment(server)
    config_map = parts(drafter=None)[0]
    assert ServerFiles.model_validate_json(config_map["data"]["wanted.json"]).drafter is None


def test_the_server_drafts_as_the_spec_says():
    spec = drafter(serving={"speculation": {"steps": 3, "topK": 4, "draftTokens": 16}})
    args = containers(pod(spec=spec))["server"]["args"]
    for flag, value in {
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "4",
        "--speculative-num-draft-tokens": "16",
        "--speculative-draft-model-path": "/osprey/drafter",
        "--host": "0.0.0.0",  # noqa: S104 - an argument in a test
        "--port": "30000",
    }.items():
        assert args[args.index(flag) + 1] == value
    assert "--enable-metrics" in args


def test_the_files_to_load_are_in_a_config_map_called_by_its_content():
    config_map, deployment, _ = parts()
    files = ServerFiles.model_validate_json(config_map["data"]["wanted.json"])
    assert (files.target, files.drafter) == (RESOLVED.model, ARTIFACT)
    other_map, other_deployment, _ = parts(drafter=ARTIFACT.model_copy(update={"digest": "sha256:" + "1" * 64}))
    assert config_map["metadata"]["name"] != other_map["metadata"]["name"]
    assert deployment["spec"]["template"] != other_deployment["spec"]["template"], "another drafter has to roll out"
    spec = deployment["spec"]["template"]["spec"]
    (volume,) = [v for v in spec["volumes"] if v["name"] == "wanted"]
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    for name in ("fetch", "sync"):
        assert mounts(containers(spec)[name])["/osprey/wanted"]["readOnly"] is True


def test_replicas_are_left_to_an_autoscaler_where_they_are_unset():
    assert "replicas" not in parts()[1]["spec"]
    assert parts(spec=drafter(serving={"replicas": 0}))[1]["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("rollout", "strategy"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}),
        ({"maxSurge": 2}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}}),
        ({"strategy": "Recreate"}, {"type": "Recreate"}),
    ],
)
def test_a_roll_needs_spare_gpus_only_where_they_are_declared(rollout, strategy):
    assert parts(spec=drafter(serving={"rollout": rollout}))[1]["spec"]["strategy"] == strategy


def test_the_admin_key_comes_from_the_secret():
    spec = pod()
    server = containers(spec)["server"]
    # One word in 64 that are random begins with "-", and would be taken for another option.
    assert server["args"][-1] == "--admin-api-key=$(OSPREY_ADMIN_KEY)"
    reference = {"secretKeyRef": {"name": "qwen3-8b-admin-key", "key": "OSPREY_ADMIN_KEY"}}
    assert environment(server)["OSPREY_ADMIN_KEY"] == reference
    assert environment(containers(spec)["sync"])["OSPREY_ADMIN_KEY"] == reference
    for name in ("fetch", "plugin"):
        assert "OSPREY_ADMIN_KEY" not in environment(containers(spec)[name])


def test_the_secret_holds_the_key():
    secret = admin_secret(owner(), "geheim")
    assert secret["metadata"]["name"] == admin_secret_name(owner())
    assert secret["metadata"]["name"] != admin_secret_name(replace(owner(), uid="another"))
    assert base64.b64decode(secret["data"]["OSPREY_ADMIN_KEY"]) == b"geheim"
    assert secret["metadata"]["ownerReferences"][0]["uid"] == UID


def test_a_dollar_in_an_argument_is_no_reference():
    spec = drafter(target={"uri": "hf://Qwen/Qwen3-8B", "serverArgs": ["--chat-template", "$(OSPREY_ADMIN_KEY)"]})
    assert containers(pod(spec=spec))["server"]["args"][1] == "$$(OSPREY_ADMIN_KEY)"


def test_probes_wait_longer_than_sglang_itself_does():
    server = containers(pod())["server"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["timeoutSeconds"] > 20, "/health gives up after 20 s and never answers in under 1 s"
        assert server[probe]["httpGet"]["port"] == "http"
    startup, liveness = server["startupProbe"], server["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 300


def test_a_pod_is_ready_when_its_server_drafts_with_what_is_wanted():
    sync = containers(pod())["sync"]
    probe = sync["readinessProbe"]
    assert probe["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert {"name": "metrics", "containerPort": 9464} in sync["ports"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300, "one slow answer must not cost a working server"


def test_streams_have_time_to_end():
    spec = pod()
    program, delay, port = containers(spec)["server"]["lifecycle"]["preStop"]["exec"]["command"][2:]
    compile(program, "preStop", "exec")
    assert port == "30000"
    assert spec["terminationGracePeriodSeconds"] > int(delay) + 300


def test_the_selector_never_changes():
    _, deployment, service = parts()
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == selector
    _, changed, _ = parts(
        drafter=None, settings=Settings(serving_image="osprey-serving:2"), spec=drafter(serving={"replicas": 3})
    )
    assert changed["spec"]["selector"]["matchLabels"] == selector
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= selector.items()
    assert labels["osprey.dev/owner-uid"] == UID


def test_service():
    _, deployment, service = parts()
    assert service["metadata"]["name"] == deployment["metadata"]["name"] == server_name(owner()) == "qwen3-8b"
    assert service["spec"]["type"] == "ClusterIP"
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["port"]) == ("http", 30000)


@pytest.mark.parametrize("name", ["a" * 50, "a" * 63, "a" * 60 + "-one", "a" * 60 + "-two", "a." * 99 + "a", "7b"])
def test_names_and_labels_fit(name):
    for child in served(owner=owner(name)):
        assert len(child["metadata"]["name"]) <= 63
        assert child["metadata"]["name"][0].isalpha()
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())


def test_fragments_of_the_operator_and_of_the_drafter():
    def fragment(who):
        return {"spec": {"containers": [{"name": "server", "env": [{"name": "WHO", "value": who}]}]}}

    settings = Settings(pod_template=fragment("operator"))
    assert environment(containers(pod(settings=settings))["server"])["WHO"] == "operator"
    spec = drafter(serving={"template": fragment("drafter")})
    assert environment(containers(pod(settings=settings, spec=spec))["server"])["WHO"] == "drafter"


def test_the_jobs_template_does_not_reach_the_servers():
    spec = drafter(job={"template": {"spec": {"nodeSelector": {"pool": "training"}}}})
    assert "nodeSelector" not in pod(spec=spec)


def test_only_fetch_and_sync_hold_storage_keys():
    everything = containers(pod(spec=drafter(hubCredentialsSecret="hf")))
    holders = {name for name, container in everything.items() if "envFrom" in container}
    assert holders == {"fetch", "sync"}
    assert {name for name, container in everything.items() if "HF_TOKEN" in environment(container)} == {"fetch"}


def test_nothing_to_serve_is_an_error():
    with pytest.raises(ValueError, match=r"spec\.serving is unset"):
        served(spec=drafter(serving=None))


def test_everything_is_json():
    json.dumps(served())
