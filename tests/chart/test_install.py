"""The chart in a real API server: installed, upgraded, uninstalled; what the operator may do, and what not."""

import json
import os
import subprocess
from contextlib import contextmanager

import pytest
import yaml

from dev.cluster import binaries
from dev.settings import REPOSITORY

pytestmark = pytest.mark.cluster

CHART = REPOSITORY / "charts" / "osprey-operator"
PLURALS = ("ospreybackbones", "ospreydrafters")
CRD = "ospreydrafters.osprey.dev"
OWNER = r"meta\.helm\.sh/release"


class Helm:
    """Helm against a cluster; what it installed goes with the test."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.installed = []

    def __call__(self, *arguments, values=None):
        done = subprocess.run(
            [binaries.path("helm"), *arguments, *(["--values", "-"] if values else [])],
            check=False,
            capture_output=True,
            text=True,
            input=yaml.safe_dump(values) if values else None,
            env={**os.environ, **self.cluster.environment()},  # noqa: TID251 - Helm wants HOME and the like
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    def install(self, namespace, name="osprey-operator", values=None):
        self("install", name, str(CHART), "--namespace", namespace, values=values)
        self.installed.append((name, namespace))

    def upgrade(self, namespace, name="osprey-operator", values=None):
        return self("upgrade", name, str(CHART), "--namespace", namespace, values=values)

    def uninstall(self, name, namespace):
        self.installed.remove((name, namespace))
        self("uninstall", name, "--namespace", namespace)


@pytest.fixture
def helm(api_cluster):
    helm = Helm(api_cluster)
    had_crd = has_crd(api_cluster)
    yield helm
    for name, namespace in list(helm.installed):
        helm.uninstall(name, namespace)
    if not had_crd:
        for plural in PLURALS:
            api_cluster.kubectl("delete", "crd", f"{plural}.osprey.dev", "--ignore-not-found")


def has_crd(cluster):
    return bool(cluster.kubectl("get", "crd", CRD, "--ignore-not-found", "-o", "name"))


@pytest.fixture
def may(api_cluster):
    """Which of some (verb, kind) the operator of a release in one namespace may do in another one."""

    def review(home, verb, kind, where):
        resource, _, subresource = kind.partition("/")
        plural, _, group = resource.partition(".")
        attributes = {"namespace": where, "verb": verb, "group": group, "resource": plural, "subresource": subresource}
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": f"system:serviceaccount:{home}:osprey-operator", "resourceAttributes": attributes},
        }

    def may(home, where, actions):
        reviews = [review(home, verb, kind, where) for verb, kind in actions]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
        answers = api_cluster.kubectl("create", "-f", "-", "-o", r'jsonpath={.status.allowed}{"\n"}', text=text).split()
        return [action for action, answer in zip(actions, answers, strict=True) if answer == "true"]

    return may


JOBS = ("create", "jobs.batch")
DRAFTERS = ("list", "ospreydrafters.osprey.dev")


def test_install_upgrade_uninstall(api_cluster, helm, namespace):
    name = namespace(api_cluster)
    helm.install(name)
    if not has_crd(api_cluster):
        pytest.fail("the CRDs were not installed")
    before = api_cluster.kubectl(
        "get", "deployment", "osprey-operator", "-n", name, "-o", "jsonpath={.metadata.generation}"
    )
    helm.upgrade(name)
    after = api_cluster.kubectl(
        "get", "deployment", "osprey-operator", "-n", name, "-o", "jsonpath={.metadata.generation}"
    )
    assert before == after == "1", "an upgrade to the same changes nothing"
    helm.uninstall("osprey-operator", name)
    assert has_crd(api_cluster), "resources outlive the release"
    assert not api_cluster.kubectl("get", "clusterrole", f"{name}:osprey-operator", "--ignore-not-found")


def test_an_upgrade_brings_the_crds_up_to_date(api_cluster, helm, namespace):
    name = namespace(api_cluster)
    helm.install(name)
    with adopted_crds(api_cluster, "osprey-operator", name):
        api_cluster.kubectl(
            "patch", "crd", CRD, "--type=json", '--patch=[{"op": "remove", "path": "/spec/names/shortNames"}]'
        )
        helm.upgrade(name, values={"logLevel": "DEBUG"})
        assert "od" in api_cluster.kubectl("get", "crd", CRD, "-o", "jsonpath={.spec.names.shortNames}")


def test_crds_of_somebody_else_are_left_alone(api_cluster, helm, namespace):
    first, second = namespace(api_cluster), namespace(api_cluster)
    helm.install(first)
    with adopted_crds(api_cluster, "osprey-operator", first):
        helm.install(second)
        notes = helm.upgrade(second, values={"logLevel": "DEBUG"})
        assert "ospreybackbones.osprey.dev, ospreydrafters.osprey.dev are not this release's" in notes
        assert "kubectl apply --server-side --force-conflicts" in notes
        assert "are not this release's" not in helm.upgrade(first)
        owner = api_cluster.kubectl("get", "crd", CRD, "-o", rf"jsonpath={{.metadata.annotations.{OWNER}-namespace}}")
        assert owner == first


@contextmanager
def adopted_crds(cluster, release, namespace):
    """Let the CRDs belong to a release: in a cluster where others applied them before, the release found them so."""
    for plural in PLURALS:
        annotations = (f"meta.helm.sh/release-name={release}", f"meta.helm.sh/release-namespace={namespace}")
        cluster.kubectl("annotate", "crd", f"{plural}.osprey.dev", "--overwrite", *annotations)
        cluster.kubectl("label", "crd", f"{plural}.osprey.dev", "--overwrite", "app.kubernetes.io/managed-by=Helm")
    yield
    for plural in PLURALS:
        cluster.kubectl(
            "annotate", "crd", f"{plural}.osprey.dev", "meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-"
        )


def test_two_releases_of_one_name_each_own_their_namespaces(api_cluster, helm, namespace, may):
    first, second = namespace(api_cluster), namespace(api_cluster)
    for home in (first, second):
        helm.install(home, values={"namespaces": [home]})
    for home, other in ((first, second), (second, first)):
        assert may(home, home, [JOBS, DRAFTERS]) == [JOBS, DRAFTERS]
        assert may(home, other, [JOBS, DRAFTERS]) == []
    helm.uninstall("osprey-operator", first)
    assert may(second, second, [JOBS]), "the other release is as it was"


def test_two_cluster_wide_releases_of_one_name(api_cluster, helm, namespace, may):
    first, second = namespace(api_cluster), namespace(api_cluster)
    helm.install(first)
    helm.install(second)
    helm.uninstall("osprey-operator", first)
    assert may(second, first, [JOBS])


ALLOWED = [
    *((verb, f"{kind}.osprey.dev") for verb in ("list", "watch") for kind in PLURALS),
    *(("patch", f"{kind}.osprey.dev/status") for kind in PLURALS),
    *((verb, "jobs.batch") for verb in ("get", "list", "watch", "create", "delete")),
    *((verb, "deployments.apps") for verb in ("get", "list", "watch", "create", "patch", "delete")),
    *(
        (verb, kind)
        for kind in ("services", "configmaps")
        for verb in ("get", "list", "watch", "create", "patch", "delete")
    ),
    *((verb, "pods") for verb in ("list", "watch")),
    ("create", "secrets"),
    ("list", "events"),
    ("create", "events"),
]
DENIED = [
    ("get", "ospreydrafters.osprey.dev"),
    ("get", "pods"),
    ("update", "ospreydrafters.osprey.dev"),
    ("delete", "ospreydrafters.osprey.dev"),
    ("patch", "jobs.batch"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("delete", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods/exec"),
    ("list", "nodes"),
    ("list", "namespaces"),
]


def test_the_operator_may_do_what_it_does_and_no_more(api_cluster, helm, namespace, may):
    home = namespace(api_cluster)
    helm.install(home, values={"namespaces": [home]})
    assert may(home, home, ALLOWED) == ALLOWED
    assert may(home, home, DENIED) == []


def test_the_pod_is_admitted_by_restricted(api_cluster, helm, namespace):
    name = namespace(api_cluster)
    helm.install(name)
    api_cluster.kubectl(
        "wait", "--for=create", "pod", "--selector=app.kubernetes.io/name=osprey-operator", "-n", name, "--timeout=30s"
    )
