"""The chart as Helm renders it, and as the operator reads it."""

import json
import re
import subprocess

import pytest
import yaml

from dev.cluster import binaries
from dev.settings import REPOSITORY
from osprey_operator.settings import Ports, from_environment, ports
from osprey_operator.state import Settings

CHART = REPOSITORY / "charts" / "osprey-operator"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def helm(*arguments, values=None):
    """Run Helm, with `values` as a file on standard input; returns what it prints."""
    extra = ["--values", "-"] if values is not None else []
    text = None if values is None else values if isinstance(values, str) else yaml.safe_dump(values)
    done = subprocess.run(
        [binaries.path("helm"), *arguments, *extra],
        check=False,
        capture_output=True,
        text=True,
        input=text,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def render(values=None, release="osprey-operator", namespace="ml"):
    text = helm("template", release, str(CHART), "--namespace", namespace, values=values or {})
    return [found for found in yaml.safe_load_all(text) if found]


def find(objects, kind):
    return [found for found in objects if found["kind"] == kind]


def operator_pod(values=None, **release):
    (deployment,) = find(render(values, **release), "Deployment")
    return deployment["spec"]["template"]["spec"]


def environment(values=None):
    """The variables as the operator's process sees them."""
    (container,) = operator_pod(values)["containers"]
    return {entry["name"]: entry["value"].replace("$$", "$") for entry in container["env"]}


def test_lint():
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_operator_reads_what_the_chart_writes():
    settings = from_environment(environment())
    default = Settings()
    assert settings.trainer_image == f"osprey-trainer:{app_version()}"
    assert settings.serving_image == f"osprey-serving:{app_version()}"
    for field in ("sglang_image", "sglang_version", "image_pull_policy", "workers", "poll_seconds", "resync_seconds"):
        assert getattr(settings, field) == getattr(default, field), "the chart's default is the operator's"
    for field in (
        "retry_base_seconds",
        "retry_max_seconds",
        "settled_seconds",
        "storage",
        "namespaces",
        "pod_template",
    ):
        assert getattr(settings, field) == getattr(default, field)
    assert ports(environment()) == Ports()


def app_version():
    return yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


def test_every_value_reaches_the_operator():
    template = {"spec": {"priority": 1000000, "containers": [{"name": "stage", "args": ["$(HOME)", '"quoted"', "ü"]}]}}
    values = {
        "namespaces": ["a", "b"],
        "storage": {"uri": "s3://drafters/x", "endpoint": "https://s3", "region": "eu", "credentialsSecret": "s3"},
        "podTemplate": template,
        "workers": 3,
        "pollSeconds": 0.5,
        "retryMaxSeconds": 1000000,
        "metrics": {"port": 9000},
        "health": {"port": 9001},
        "images": {
            "sglang": {"repository": "mine/sglang", "version": "0.6.0"},
            "trainer": {"digest": "sha256:" + "a" * 64},
        },
    }
    settings = from_environment(environment(values))
    assert settings.namespaces == ("a", "b")
    assert (settings.storage.uri, settings.storage.credentials_secret) == ("s3://drafters/x", "s3")
    assert settings.pod_template == template
    assert (settings.workers, settings.poll_seconds, settings.retry_max_seconds) == (3, 0.5, 1000000)
    assert settings.sglang_version == "0.6.0"
    assert settings.trainer_image == "osprey-trainer@sha256:" + "a" * 64
    assert ports(environment(values)) == Ports(metrics=9000, health=9001)


@pytest.mark.parametrize(
    ("sglang", "version"),
    [
        ({}, "0.5.23"),
        ({"tag": "v0.6.0"}, "0.6.0"),
        ({"tag": 20261130}, "20261130"),
        ({"tag": "v0.6.0", "version": "0.6.0.post1"}, "0.6.0.post1"),
        ({"digest": "sha256:" + "a" * 64}, "sha256:" + "a" * 64),
    ],
)
def test_another_sglang_is_another_version(sglang, version):
    assert from_environment(environment({"images": {"sglang": sglang}})).sglang_version == version


@pytest.mark.parametrize("tag", ["20261130", '"20261130"', '"1e5"', '"0012"'])
def test_tags_of_digits_stay_as_they_are(tag):
    settings = from_environment(environment(f"images: {{trainer: {{tag: {tag}}}}}"))
    assert settings.trainer_image == f"osprey-trainer:{tag.strip(chr(34))}"


def test_large_numbers_keep_their_digits():
    # Helm reads numbers as floating point: printed carelessly, a million is 1e+06.
    (container,) = operator_pod("resources: {limits: {example.com/things: 123456789}}\nworkers: 1000000")["containers"]
    assert container["resources"]["limits"]["example.com/things"] == 123456789
    assert {"name": "OSPREY_WORKERS", "value": "1000000"} in container["env"]
    source = {crd["metadata"]["name"]: crd for crd in map(yaml.safe_load, crd_files().values())}
    for crd in find(render(), "CustomResourceDefinition"):
        assert crd["spec"] == source[crd["metadata"]["name"]]["spec"]


def crd_files():
    return {path.name: path.read_text() for path in (REPOSITORY / "crds").glob("*.yaml")}


def test_the_chart_carries_the_generated_crds_themselves():
    carried = {path.name: path for path in (CHART / "files" / "crds").iterdir()}
    assert carried.keys() == crd_files().keys()
    for path in carried.values():
        assert path.is_symlink(), "a copy would grow stale"
        assert path.resolve() == REPOSITORY / "crds" / path.name


def test_a_packaged_chart_has_the_crds_in_it(tmp_path):
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.iterdir()
    text = helm("template", "osprey", str(package))
    assert text.count("kind: CustomResourceDefinition") == len(crd_files())


def test_crds_are_kept_and_upgraded_or_left_out():
    crds = find(render(), "CustomResourceDefinition")
    assert {crd["metadata"]["annotations"]["helm.sh/resource-policy"] for crd in crds} == {"keep"}
    (first, *_) = find(render({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "annotations" not in first["metadata"]
    assert not find(render({"crds": {"install": False}}), "CustomResourceDefinition")


def test_the_operator_pod_is_what_restricted_admits():
    pod = operator_pod()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_one_operator_at_a_time():
    (deployment,) = find(render(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_the_operator_can_run_from_a_mounted_environment():
    values = {
        "command": ["/venv/bin/python", "-m", "osprey_operator"],
        "extraEnv": [{"name": "A", "value": "1"}],
        "extraVolumes": [{"name": "venv", "persistentVolumeClaim": {"claimName": "venv"}}],
        "extraVolumeMounts": [{"name": "venv", "mountPath": "/venv", "readOnly": True}],
    }
    pod = operator_pod(values)
    (container,) = pod["containers"]
    assert container["command"] == values["command"]
    assert values["extraEnv"][0] in container["env"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    assert values["extraVolumes"][0] in pod["volumes"]


def test_namespaced_mode_has_nothing_cluster_wide_but_the_crds():
    objects = render({"namespaces": ["a", "b"]})
    assert not find(objects, "ClusterRole")
    assert not find(objects, "ClusterRoleBinding")
    assert [role["metadata"]["namespace"] for role in find(objects, "Role")] == ["a", "b"]
    for binding in find(objects, "RoleBinding"):
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "osprey-operator", "namespace": "ml"}]


def test_the_role_has_no_wildcard_and_cannot_read_secrets():
    (role,) = [r for r in find(render(), "ClusterRole") if r["metadata"]["name"] == "ml:osprey-operator"]
    verbs = {
        (group, kind): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
    }
    assert not any("*" in [*key, *allowed] for key, allowed in verbs.items())
    assert verbs["", "secrets"] == {"create"}
    assert verbs["osprey.dev", "ospreydrafters"] == {"list", "watch"}, "the operator never writes spec"
    (namespaced, *_) = find(render({"namespaces": ["a"]}), "Role")
    assert namespaced["rules"] == role["rules"]


def test_two_releases_of_one_name_have_no_cluster_wide_object_in_common():
    values = {"crds": {"install": False}}
    cluster_wide = [
        {
            (o["kind"], o["metadata"]["name"])
            for o in render(values, namespace=namespace)
            if "namespace" not in o["metadata"]
        }
        for namespace in ("a", "b")
    ]
    assert cluster_wide[0]
    assert not cluster_wide[0] & cluster_wide[1]


@pytest.mark.parametrize("release", ["osprey", "x", "a" * 53])
def test_names_fit(release):
    for found in render(release=release):
        if found["kind"] in {"Service", "Deployment", "ServiceAccount"}:
            assert len(found["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in found["metadata"]["labels"].values())


def test_selectors_hold_across_versions():
    (deployment,) = find(render(), "Deployment")
    (service,) = find(render(), "Service")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.keys() == {"app.kubernetes.io/name", "app.kubernetes.io/instance"}
    assert service["spec"]["selector"] == selector


def test_service_monitor():
    assert not find(render(), "ServiceMonitor")
    values = {"metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prom"}, "interval": "15s"}}}
    (monitor,) = find(render(values), "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert monitor["spec"]["endpoints"][0]["interval"] == "15s"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workerz": 1}, "workerz"),
        ({"image": {"tagg": "x"}}, "tagg"),
        ({"storage": {"uri": "gs://b/x"}}, "storage/uri"),
        ({"storage": {"region": "eu"}}, "uri"),
        ({"workers": 0}, "workers"),
        ({"logLevel": "LOUD"}, "logLevel"),
        ({"podTemplate": {"containers": []}}, "podTemplate"),
        ({"metrics": {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}}}, "metrics/service/enabled"),
    ],
)
def test_a_wrong_value_is_refused(values, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        render(values)


def leaves(schema, path=()):
    """The values that a schema knows, as paths."""
    if schema.get("additionalProperties") is False:
        return {leaf for name, part in schema["properties"].items() for leaf in leaves(part, (*path, name))}
    return {path}


FREE = {("storage",), ("podTemplate",), ("global",)}
"""Values whose parts have no default; `global` is Helm's own."""


def test_the_schema_knows_every_value_and_no_other():
    def paths(values, schema, path=()):
        if schema.get("additionalProperties") is False and path not in FREE:
            return {
                leaf for name, part in values.items() for leaf in paths(part, schema["properties"][name], (*path, name))
            }
        return {path}

    known = {leaf for leaf in leaves(SCHEMA) if leaf[:1] not in FREE}
    assert {leaf for leaf in paths(VALUES, SCHEMA) if leaf[:1] not in FREE} == known


def test_every_value_is_described():
    """A value, or the group that it is in, has a comment that begins with `# --` above it."""
    described = False
    for line in (CHART / "values.yaml").read_text().splitlines():
        key = re.match(r"( *)(\w+):", line)
        if line.strip().startswith("# --"):
            described = True
        elif key and not key[1]:
            group = described or line.endswith(":")
            assert group, f"{key[2]} has no description"
            within = described
            described = False
        elif key and len(key[1]) == 2 and not line.endswith(":"):
            assert described or within, f"{key[2]} has no description"
            described = False


def test_notes_say_what_comes_next():
    text = helm("install", "osprey-operator", str(CHART), "--dry-run=client", "--namespace", "ml")
    assert "kubectl -n ml rollout status deployment/osprey-operator" in text
    assert "No default storage is set" in text
