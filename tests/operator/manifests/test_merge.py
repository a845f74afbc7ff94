import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osprey_operator.manifests.merge import merged

BASE = {
    "metadata": {"labels": {"ours": "1"}},
    "spec": {
        "restartPolicy": "Never",
        "initContainers": [{"name": "server", "image": "sglang:1", "env": [{"name": "A", "value": "1"}]}],
        "containers": [
            {
                "name": "stage",
                "image": "trainer:1",
                "command": ["python3", "-m", "osprey_trainer", "distil"],
                "env": [
                    {"name": "HOME", "value": "/osprey/scratch"},
                    {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                ],
                "envFrom": [{"secretRef": {"name": "s3"}}],
                "ports": [{"containerPort": 9464, "name": "metrics"}],
                "resources": {"limits": {"nvidia.com/gpu": "8"}},
                "volumeMounts": [{"name": "scratch", "mountPath": "/osprey/scratch"}],
                "securityContext": {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}},
            }
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
}


def stage(fragment: dict) -> dict:
    result = merged(BASE, {"spec": {"containers": [{"name": "stage", **fragment}]}})
    (container,) = result["spec"]["containers"]
    return container


def spec(fragment: dict) -> dict:
    return merged(BASE, {"spec": fragment})["spec"]


def by_name(elements: list[dict]) -> dict[str, dict]:
    return {element["name"]: element for element in elements}


def test_an_empty_fragment_changes_nothing():
    assert merged(BASE, {}) == BASE


def test_maps_are_merged_and_the_fragment_wins():
    result = merged(
        BASE, {"metadata": {"labels": {"theirs": "2"}, "annotations": {"a": "b"}}, "spec": {"restartPolicy": "Always"}}
    )
    assert result["metadata"] == {"labels": {"ours": "1", "theirs": "2"}, "annotations": {"a": "b"}}
    assert result["spec"]["restartPolicy"] == "Always"
    assert result["spec"]["containers"] == BASE["spec"]["containers"]


def test_a_container_is_found_by_name_and_keeps_what_is_not_named():
    container = stage({"resources": {"limits": {"memory": "64Gi"}}})
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert container["image"] == "trainer:1"


def test_null_deletes_a_key():
    assert "limits" not in stage({"resources": {"limits": None}})["resources"]
    assert "runAsNonRoot" not in stage({"securityContext": {"runAsNonRoot": None}})["securityContext"]


def test_command_and_args_are_replaced_whole():
    assert stage({"command": ["sh"]})["command"] == ["sh"]


def test_env_is_merged_by_name_and_keeps_its_order():
    container = stage({"env": [{"name": "NEW", "value": "2"}, {"name": "HOME", "value": "/elsewhere"}]})
    assert [variable["name"] for variable in container["env"]] == ["HOME", "UID", "NEW"]
    assert by_name(container["env"])["HOME"] == {"name": "HOME", "value": "/elsewhere"}


def test_a_literal_replaces_a_reference_and_the_other_way_round():
    # Merged key by key, a variable would have both value and valueFrom, which the API server refuses.
    assert by_name(stage({"env": [{"name": "UID", "value": "1"}]})["env"])["UID"] == {"name": "UID", "value": "1"}
    reference = {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert by_name(stage({"env": [reference]})["env"])["HOME"] == reference


def test_a_volume_of_another_kind_replaces_and_one_of_the_same_kind_is_merged():
    volumes = by_name(
        spec(
            {
                "volumes": [
                    {"name": "scratch", "persistentVolumeClaim": {"claimName": "big"}},
                    {"name": "shm", "emptyDir": {"sizeLimit": "8Gi"}},
                ]
            }
        )["volumes"]
    )
    assert volumes["scratch"] == {"name": "scratch", "persistentVolumeClaim": {"claimName": "big"}}
    assert volumes["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}


def test_mounts_merge_by_path_and_ports_by_number():
    container = stage(
        {
            "volumeMounts": [
                {"mountPath": "/osprey/scratch", "name": "other"},
                {"mountPath": "/data", "name": "data", "readOnly": True},
            ],
            "ports": [{"containerPort": 9464, "hostPort": 1}, {"containerPort": 8080}],
        }
    )
    assert container["volumeMounts"] == [
        {"mountPath": "/osprey/scratch", "name": "other"},
        {"mountPath": "/data", "name": "data", "readOnly": True},
    ]
    assert container["ports"] == [{"containerPort": 9464, "name": "metrics", "hostPort": 1}, {"containerPort": 8080}]


def test_tolerations_and_env_from_grow_without_doubles():
    gpu, spot = {"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "spot", "operator": "Exists"}
    assert spec({"tolerations": [gpu, spot]})["tolerations"] == [gpu, spot]
    extra = {"configMapRef": {"name": "proxy"}}
    assert stage({"envFrom": [extra]})["envFrom"] == [{"secretRef": {"name": "s3"}}, extra]


def test_patch_delete_removes_an_element_and_a_map():
    assert [v["name"] for v in spec({"volumes": [{"name": "shm", "$patch": "delete"}]})["volumes"]] == ["scratch"]
    assert spec({"initContainers": [{"name": "server", "$patch": "delete"}]})["initContainers"] == []
    assert "resources" not in stage({"resources": {"$patch": "delete"}})
    assert spec({"volumes": [{"name": "absent", "$patch": "delete"}]})["volumes"] == BASE["spec"]["volumes"]


def test_patch_replace_takes_the_place_of_a_map_and_of_a_list():
    assert stage({"securityContext": {"$patch": "replace", "runAsUser": 7}})["securityContext"] == {"runAsUser": 7}
    only = {"name": "only", "value": "1"}
    assert stage({"env": [{"$patch": "replace"}, only]})["env"] == [only]


def test_an_entry_for_our_container_applies_wherever_the_pod_has_it():
    # In a Job the server is a sidecar, in a Deployment a container: one fragment means both.
    result = spec({"containers": [{"name": "server", "image": "sglang:2"}]})
    assert by_name(result["initContainers"])["server"]["image"] == "sglang:2"
    assert [container["name"] for container in result["containers"]] == ["stage"]
    swapped = spec({"initContainers": [{"name": "stage", "image": "trainer:2"}]})
    assert by_name(swapped["containers"])["stage"]["image"] == "trainer:2"
    assert [container["name"] for container in swapped["initContainers"]] == ["server"]


@pytest.mark.parametrize("name", ["sync", "fetch", "plugin"])
def test_an_entry_for_a_container_of_ours_that_this_pod_lacks_is_dropped(name):
    assert spec({"containers": [{"name": name, "image": "x"}]}) == BASE["spec"]


def test_a_container_of_the_users_is_added():
    extra = {"name": "logs", "image": "fluent-bit:4"}
    assert spec({"containers": [extra]})["containers"] == [*BASE["spec"]["containers"], extra]
    assert spec({"initContainers": [extra]})["initContainers"] == [*BASE["spec"]["initContainers"], extra]


def test_no_directive_is_left_in_what_is_added():
    result = spec({"containers": [{"name": "logs", "image": "x", "resources": {"$patch": "replace", "limits": {}}}]})
    assert by_name(result["containers"])["logs"]["resources"] == {"limits": {}}
    assert spec({"affinity": {"$patch": "delete"}}) == BASE["spec"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["spec", "containers", "env", "name", "volumes", "$patch", "metadata", "tolerations"])
            | st.text(max_size=3),
            children,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may hold the cores
@given(fragment=st.dictionaries(st.sampled_from(["spec", "metadata", "x"]), JSON, max_size=3))
def test_any_fragment_is_merged_without_an_error_and_no_argument_is_changed(fragment):
    # What users write is not checked before: the API server judges the result by a dry run.
    base, given_fragment = copy.deepcopy(BASE), copy.deepcopy(fragment)
    merged(base, fragment)
    assert base == BASE
    assert fragment == given_fragment


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may hold the cores
@given(fragment=st.dictionaries(st.sampled_from(["spec", "metadata", "x"]), JSON, max_size=3))
def test_merging_twice_is_merging_once(fragment):
    once = merged(BASE, _without_elements_without_key(fragment))
    assert merged(once, _without_elements_without_key(fragment)) == once


def _without_elements_without_key(value):
    """Elements that lack their merge key are appended each time: the API server refuses them anyway."""
    if isinstance(value, dict):
        return {key: _without_elements_without_key(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return []
    return value
