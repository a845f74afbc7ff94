import os
import signal
import subprocess
import sys

import pytest

from dev import processes
from dev.cluster.api import ApiError
from dev.cluster.cluster import Cluster, ClusterError
from dev.settings import REPOSITORY


@pytest.fixture
def cluster(own_name):
    """A second cluster, beside the session's."""
    one = Cluster(own_name("second"), has_node=False)
    yield one
    one.down()


def command(*words):
    return [sys.executable, "-m", "dev.cluster", *words]


def test_namespaces_enforce_the_restricted_standard(api_cluster, namespace):
    name = namespace(api_cluster)
    root = {"name": "c", "image": "i", "securityContext": {"runAsUser": 0}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [root]}}

    with pytest.raises(ApiError, match="violates PodSecurity"):
        api_cluster.api().apply(f"/api/v1/namespaces/{name}/pods/p", pod)


def test_controllers_work(api_cluster, namespace):
    name = namespace(api_cluster)

    api_cluster.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", "-n", name, "--timeout=20s")


def test_two_clusters_run_side_by_side(api_cluster, cluster):
    cluster.up()
    cluster.kubectl("create", "namespace", "only-here")

    assert cluster.server != api_cluster.server
    with pytest.raises(ClusterError, match="not found"):
        api_cluster.kubectl("get", "namespace", "only-here")
    cluster.down()
    assert api_cluster.is_up()
    assert cluster.leftovers() == []


def test_up_again_changes_nothing_and_down_again_is_fine(cluster):
    cluster.up()
    before = cluster.leftovers()

    cluster.up()

    assert cluster.leftovers() == before
    cluster.down()
    cluster.down()
    assert cluster.leftovers() == []
    assert not cluster.is_up()


def test_up_replaces_a_cluster_that_is_only_partly_alive(cluster):
    cluster.up()
    old = cluster.server
    pids = {name: pid for pid, name in processes.running(str(cluster.state)).items()}
    os.kill(pids["etcd"], signal.SIGKILL)

    cluster.up()

    assert cluster.is_up()
    assert cluster.server != old


@pytest.mark.parametrize("until", ["etcd", "kube-apiserver", "kube-scheduler"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_an_up_that_is_stopped_on_its_way_leaves_nothing(cluster, how, until):
    with subprocess.Popen(command("up", "--no-node", "--name", cluster.name), cwd=REPOSITORY) as up:
        log = cluster.state / "none.log"
        processes.wait(until, lambda: until in processes.running(str(cluster.state)).values(), 60, log)
        up.send_signal(how)
        up.wait(timeout=30)
    assert up.returncode != 0
    if how == signal.SIGKILL:
        assert cluster.leftovers() != []
        cluster.down()

    assert cluster.leftovers() == []


def test_down_refuses_to_remove_a_folder_with_a_mount_in_it(cluster, tmp_path):
    if os.geteuid() != 0:
        pytest.fail("run as root: a mount is to be made")
    (tmp_path / "precious").touch()
    place = cluster.state / "mounted"
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", tmp_path, place], check=True)
    try:
        with pytest.raises(ClusterError, match="unmount"):
            cluster.down()
    finally:
        subprocess.run(["umount", place], check=True)
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("name", ["", "../x", "UPPER", "a/b", "-a"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(ClusterError, match="does not fit"):
        Cluster(name)


def test_the_command_says_how_to_start_a_cluster_that_is_not_up():
    done = subprocess.run(
        command("volumes", "ml", "--name", "nobody-made-it"),
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert "not up: run `python3 -m dev.cluster up`" in done.stderr
