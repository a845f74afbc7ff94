"""The rights that the chart gives are enough, and in namespaced mode they reach no further than the namespace."""

import json
import re
import subprocess

import pytest
import yaml

from dev.cluster.binaries import path
from tests.integration.operator.conftest import running
from tests.integration.operator.test_lifecycle import to_ready
from tests.operator.world import DRAFTER_SPEC

pytestmark = pytest.mark.cluster

CHART = "charts/osprey-operator"


@pytest.fixture
def kubeconfig(place, tmp_path, request):
    """Credentials of the service account that the chart makes, with the Role of the chart."""
    chart = request.config.rootpath / CHART
    command = [str(path("helm")), "template", "osprey", str(chart), "-n", place.namespace]
    rendered = subprocess.run(
        [*command, "--set", f"namespaces={{{place.namespace}}}"], capture_output=True, text=True, check=True
    ).stdout
    kinds = {"Role", "RoleBinding", "ServiceAccount"}
    rights = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] in kinds]
    assert {each["kind"] for each in rights} == kinds
    place.cluster.kubectl(
        "apply",
        "-n",
        place.namespace,
        "-f",
        "-",
        text=json.dumps({"apiVersion": "v1", "kind": "List", "items": rights}),
    )
    account = next(each["metadata"]["name"] for each in rights if each["kind"] == "ServiceAccount")
    token = place.cluster.kubectl("create", "token", account, "-n", place.namespace).strip()
    config = yaml.safe_load(place.cluster.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = tmp_path / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_drafter_becomes_ready_with_the_rights_of_the_chart(place, kubeconfig, tmp_path):
    spec = {key: value for key, value in DRAFTER_SPEC.items() if key != "backbone"}
    with running(place, tmp_path, KUBECONFIG=str(kubeconfig)) as operator:
        place.apply("OspreyDrafter", "small", spec)
        to_ready(place)
        place.patch("OspreyDrafter", "small", {"spec": {"suspend": True, "distillation": {"epochs": 1}}})
        place.until(lambda: place.condition("OspreyDrafter", "small", "Suspended")["status"] == "True")
        place.until(lambda: not place.jobs("distil"))
        place.delete("OspreyDrafter", "small")
        assert operator.stop() == 0
    refused = re.compile(r"\b403: |forbidden", re.IGNORECASE)  # a time may well end in ",403"
    assert not refused.findall(operator.log.read_text())
