import sys
from pathlib import Path

import pytest

from dev.cluster.volumes import machine_paths, pod_template, volumes
from dev.settings import REPOSITORY
from osprey_api.naming import SCRATCH_PATH
from osprey_operator.manifests.merge import merged


def test_every_mount_has_its_claim_and_every_claim_its_volume(tmp_path):
    extra = {"models": tmp_path}
    template = pod_template(extra)["spec"]
    objects = volumes("ml", extra)
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    folders = {
        one["spec"]["claimRef"]["name"]: one["spec"]["hostPath"]["path"]
        for one in objects
        if one["kind"] == "PersistentVolume"
    }

    claimed = {one["name"] for one in template["volumes"] if "persistentVolumeClaim" in one}
    assert claimed == claims == set(folders)
    for container in template["containers"]:
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"] if one.get("readOnly")}
        assert mounts == folders


def test_the_interpreter_and_the_packages_are_there():
    paths = machine_paths().values()

    for needed in (Path(sys.base_prefix).resolve(), REPOSITORY / "crds" / "src", REPOSITORY / ".venv"):
        assert any(needed.is_relative_to(path) for path in paths)


def test_what_can_be_written_is_no_folder_of_this_machine():
    template = pod_template()["spec"]
    writable = {
        mount["name"]
        for container in template["containers"]
        for mount in container["volumeMounts"]
        if not mount.get("readOnly")
    }

    assert writable == {one["name"] for one in template["volumes"] if "emptyDir" in one} == {"scratch", "shm"}


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(NotADirectoryError, match=r"volume models: .*/nothing is not a folder"):
        volumes("ml", {"models": tmp_path / "nothing"})


def test_more_variables_win():
    template = pod_template(env={"HOME": "/elsewhere"}, containers=["stage"])

    assert "initContainers" not in template["spec"]
    env = {one["name"]: one["value"] for one in template["spec"]["containers"][0]["env"]}
    assert env["HOME"] == "/elsewhere"
    assert env["TMPDIR"] == SCRATCH_PATH


def test_the_containers_of_a_pod_that_has_few_are_the_only_ones_after_the_merge():
    stage = {"name": "stage", "image": "i", "volumeMounts": []}
    pod = {"metadata": {}, "spec": {"containers": [stage], "volumes": []}}

    spec = merged(pod, pod_template())["spec"]

    assert [one["name"] for one in spec["containers"]] == ["stage"]
    assert "initContainers" not in spec
    assert "/usr" in {one["mountPath"] for one in spec["containers"][0]["volumeMounts"]}
