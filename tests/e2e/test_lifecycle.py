"""From `kubectl apply` to a measured drafter that serves, through the deaths of everything on the way."""

import json
import os
import re
import subprocess
import sys

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dev.demo import results
from dev.install import METRICS_SERVICE
from osprey_api.naming import SERVER_PORT
from osprey_api.stages import ATTEMPT_VARIABLE, TASK_VARIABLE, Outcome, StageName, StorageLocation

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.timeout(2700)]
OD, OB = "ospreydrafter", "ospreybackbone"
NAME = "tiny"
QUICK_TO_GO = {"spec": {"terminationGracePeriodSeconds": 60}}
"""The usual ten minutes are for long answers; here they would be the time-out of the whole test."""
RESUMED = r"goes on from the checkpoint of step (\d+)"


@pytest.fixture(scope="module")
def applied(tenant, tiny):
    """Both resources, and a baseline drafter from scratch on the same data."""
    source = tiny[0]
    text = tenant.put("text", [json.dumps({"text": line}) for line in source.text(2000)])
    data = {
        domain: tenant.put(domain, [json.dumps({"prompt": prompt}) for prompt in source.prompts(domain, 60)])
        for domain in source.DOMAINS
    }
    tenant.apply(
        tenant.backbone(text),
        tenant.drafter(NAME, data, backbone="tiny-2l", serving={"replicas": 1, "template": QUICK_TO_GO}),
        tenant.drafter("scratch", data),
    )
    return tenant


def operator_pod(tenant):
    pods = tenant.kubectl.read("pods", "-n", tenant.installation.namespace)["items"]
    return next(pod for pod in pods if pod["status"]["phase"] == "Running")


def kill_operator(tenant, meanwhile=lambda: None):
    """SIGKILL it, do something while it is down, and return once the kubelet has started it again."""
    before = operator_pod(tenant)["status"]["containerStatuses"][0]["restartCount"]
    tenant.kill(operator_pod(tenant), "osprey_operator")
    meanwhile()

    def is_back():
        status = operator_pod(tenant)["status"]["containerStatuses"][0]
        return status["restartCount"] > before and status["ready"]

    tenant.until("the operator to be back", is_back, 90)


def pod_of(tenant, job):
    return next(iter(tenant.items("pods", "-l", f"batch.kubernetes.io/job-name={job}")), None)


def resumed_at(tenant, job):
    """The step after which a training pod says that it goes on; None before it says so."""
    pod = pod_of(tenant, job)
    if pod is None or pod["status"]["phase"] == "Pending":
        return None
    log = tenant.kubectl.run("kubectl", "logs", pod["metadata"]["name"], "-n", tenant.namespace)
    found = re.search(RESUMED, log)
    return int(found[1]) if found else None


def call(url, body):
    """Return status and answer of a JSON request."""
    answer = httpx.post(url, json=body, timeout=120)
    return answer.status_code, answer.json() if answer.is_success else None


@pytest.fixture(scope="module")
def finished(applied):
    """The resources once they are ready, after three murders."""
    tenant = applied

    def distilling():
        stage = tenant.stage(OD, NAME, "distil")
        return stage if stage["state"] == "Running" and (stage.get("step") or 0) > 25 else None

    running = tenant.until("distil past its first checkpoint", distilling, 1200)
    # The trainer dies at once, while no operator watches: by the time it is back, a quick machine would have ended.
    pod = pod_of(tenant, running["job"])
    kill_operator(tenant, lambda: tenant.kill(pod, "osprey_trainer distil"))

    def distilling_again():
        stage = tenant.stage(OD, NAME, "distil")
        return stage if stage.get("attempts", 0) > running["attempts"] and stage["state"] == "Running" else None

    again = tenant.until("distil to start again", distilling_again, 240)
    resumed = tenant.until("the new pod's log", lambda: resumed_at(tenant, again["job"]), 120)
    tenant.until_true(OD, NAME, "GatePassed", 600)
    assert tenant.condition(OD, NAME, "RolledOut")["status"] == "False"
    kill_operator(tenant)
    for kind, name in ((OB, "tiny-2l"), (OD, NAME), (OD, "scratch")):
        tenant.until_true(kind, name, "Ready", 600)
    return tenant, running, again, resumed


def test_the_killed_trainer_went_on_from_its_checkpoint(finished):
    tenant, before, again, resumed = finished
    assert resumed >= 20
    assert again["attempts"] == before["attempts"] + 1
    assert again["fingerprint"] == before["fingerprint"]
    stage = tenant.stage(OD, NAME, "distil")
    assert stage["state"] == "Succeeded"
    assert stage["attempts"] == again["attempts"]


def test_both_drafters_learned_from_the_same_states(finished):
    tenant, *_ = finished
    ours, theirs = (tenant.stage(OD, name, "capture") for name in (NAME, "scratch"))
    assert ours["artifact"] == theirs["artifact"]
    selector = "app.kubernetes.io/managed-by=osprey-operator"
    jobs = [item["metadata"]["name"] for item in tenant.items("jobs", "-l", selector)]
    assert sum("-capture-" in name for name in jobs) == 1


def test_the_result_is_that_of_an_undisturbed_run(finished, pod_s3, tmp_path):
    # The same task, run by hand without a kill: the drafters' weights are equal to the last bit.
    tenant, *_ = finished
    stage = tenant.stage(OD, NAME, "distil")
    job = tenant.read("job", stage["job"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    task = json.loads(next(entry["value"] for entry in container["env"] if entry["name"] == TASK_VARIABLE))
    task["namespace"] = "undisturbed"
    log = tmp_path / "termination-log"
    environment = os.environ | {  # noqa: TID251 - of a child
        TASK_VARIABLE: json.dumps(task),
        ATTEMPT_VARIABLE: "by-hand",
        "AWS_ACCESS_KEY_ID": pod_s3.access_key,
        "AWS_SECRET_ACCESS_KEY": pod_s3.secret_key,
        "OSPREY_CLAIMS_ROOT": str(tenant.models.parent),
        "OSPREY_TERMINATION_LOG": str(log),
        "OSPREY_METRICS_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    (tenant.models.parent / "models").symlink_to(tenant.models)
    command = [sys.executable, "-m", "osprey_trainer", "distil", "--scratch", str(tmp_path / "scratch")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    undisturbed = Outcome.model_validate_json(log.read_text()).artifact

    def weights(uri):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        body = pod_s3.client().get_object(Bucket=bucket, Key=f"{prefix}/manifest.json")["Body"].read()
        return next(file["sha256"] for file in json.loads(body)["files"] if file["path"] == "model.safetensors")

    assert weights(undisturbed.uri) == weights(stage["artifact"]["uri"])


def test_the_server_drafts_as_the_trainer_simulated(finished, pod_s3, tmp_path, monkeypatch):
    tenant, *_ = finished
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", pod_s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", pod_s3.secret_key)
    keys = tenant.installation.storage
    storage = StorageLocation(uri=keys.uri, endpoint=keys.endpoint, region=keys.region)
    for name in (NAME, "scratch"):
        resource = tenant.read(OD, name)
        evaluation = results.read_evaluation(resource, storage, tmp_path)
        assert evaluation.result.identical_outputs == 1
        steps = [request.verify_steps for request in evaluation.requests]
        simulated = results.simulated_steps(resource, evaluation, storage, tenant.models / "tiny", tmp_path)
        equal = sum(a == b for a, b in zip(steps, simulated, strict=True))
        assert equal >= 0.95 * len(steps)
        assert sum(simulated) == pytest.approx(sum(steps), rel=0.01)


def test_status_tells_the_story(finished):
    tenant, *_ = finished
    status = tenant.read(OD, NAME)["status"]
    assert status["acceptanceLength"]["evaluated"] > 1.05
    assert {domain["name"] for domain in status["acceptanceLength"]["byDomain"]} == {"counting", "naming"}
    assert status["tokensPerSecond"]["baseline"] > 0
    assert [revision["state"] for revision in status["revisions"]] == ["Serving"]
    assert status["observedGeneration"] == 1
    table = tenant.kubectl.run("kubectl", "get", "osprey", "-n", tenant.namespace)
    assert "serving" in table
    # The two drafters asked the same target the same prompts: the answers are one artifact, made by one Job.
    shared = {tenant.stage(OD, name, "regenerate")["artifact"]["digest"] for name in (NAME, "scratch")}
    assert len(shared) == 1
    assert len(tenant.items("jobs", "-l", "osprey.dev/stage=regenerate")) == 1


def greedy_answer(folder, message, tokens):
    """What transformers makes of a message with the target alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_service_answers_and_guards_its_weights(finished):
    tenant, *_ = finished
    address = tenant.read("service", NAME)["spec"]["clusterIP"]
    url = f"http://{address}:{SERVER_PORT}"
    message = {"role": "user", "content": "count 9 numbers from 3"}
    body = {"model": "x", "messages": [message], "max_tokens": 40, "temperature": 0}
    status, answer = call(f"{url}/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == greedy_answer(tenant.models / "tiny", message, tokens=40)
    assert call(f"{url}/update_weights_from_disk", {"model_path": "/x"})[0] == 401
    service = ("service", METRICS_SERVICE, "-n", tenant.installation.namespace)
    metrics = f"http://{tenant.kubectl.read(*service)['spec']['clusterIP']}:8080/metrics"

    def live():
        # What a server did before the operator's first look at it belongs to no window, so requests go on.
        assert call(f"{url}/v1/chat/completions", body)[0] == 200
        lines = httpx.get(metrics, timeout=10).text.splitlines()
        series = [line for line in lines if line.startswith("osprey_drafter_acceptance_length{")]
        return [float(line.rpartition(" ")[2]) for line in series if f'namespace="{tenant.namespace}"' in line]

    (acceptance,) = tenant.until("a live acceptance length", live, 120)
    assert 1 < acceptance <= 6


def test_a_new_learning_rate_trains_again_and_nothing_else(finished):
    tenant, *_ = finished
    before = {stage["name"]: stage["fingerprint"] for stage in tenant.read(OD, NAME)["status"]["stages"]}
    patch = json.dumps({"spec": {"suspend": True, "distillation": {"learningRate": 1e-3}}})
    tenant.kubectl.run("kubectl", "patch", OD, NAME, "-n", tenant.namespace, "--type=merge", "-p", patch)
    tenant.until("the edit to be seen", lambda: tenant.read(OD, NAME)["status"]["observedGeneration"] == 2, 30)
    after = {stage["name"]: stage["fingerprint"] for stage in tenant.read(OD, NAME)["status"]["stages"]}
    assert {name for name in before if before[name] != after[name]} == {StageName.DISTIL, StageName.EVALUATE}
    assert tenant.condition(OD, NAME, "Suspended")["status"] == "True"
    assert tenant.condition(OD, NAME, "Available")["status"] == "True"


def test_deleted_resources_leave_nothing_behind(finished):
    tenant, *_ = finished
    for kind, name in ((OD, NAME), (OD, "scratch"), (OB, "tiny-2l")):
        tenant.delete(kind, name)
    kinds = "jobs,pods,deployments,replicasets,services,configmaps,secrets"

    def left():
        selector = "app.kubernetes.io/managed-by=osprey-operator"
        return [f"{item['kind']} {item['metadata']['name']}" for item in tenant.items(kinds, "-l", selector)]

    tenant.until("children to go", lambda: not left(), 120)
    assert not tenant.items("osprey")
