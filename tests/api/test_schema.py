"""Habits of the API, in the spirit of Kubernetes' own API linters, and that the generated files are fresh."""

import re

import pytest
import yaml

from osprey_api import backbone, drafter, schema
from osprey_api.conditions import EXIT_CODE_OF, ConditionReason, ConditionType, FailureReason

MODULES = [backbone, drafter]
OPERATOR_ONLY = {
    "DeadlineExceeded",
    "ImagePull",
    "Unschedulable",
    "SecretNotFound",
    "ClaimNotFound",
    "NameTaken",
    "PodRefused",
}


def nodes(node, path):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


def every_node():
    for module in MODULES:
        top = schema.definition(module)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        yield from nodes(top, module.KIND)


NODES = dict(every_node())


def test_the_files_are_fresh():
    assert schema.main(["--check"]) == 0


def test_a_stale_file_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schema, "FOLDER", tmp_path)
    assert schema.main(["--check"]) == 1
    assert "python -m osprey_api.schema" in capsys.readouterr().err
    assert schema.main([]) == 0
    assert schema.main(["--check"]) == 0


def test_the_files_are_yaml():
    for path in schema.rendered():
        assert yaml.safe_load(path.read_text())["kind"] == "CustomResourceDefinition"


@pytest.mark.parametrize("path", [p for p in NODES if not re.search(r"(\[\]|\{\})$", p)])
def test_every_field_is_described(path):
    assert NODES[path].get("description", "").endswith(".") or path.count(".") == 0


@pytest.mark.parametrize("path", NODES)
def test_everything_is_bounded(path):
    node = NODES[path]
    match node.get("type"):
        case "string":
            assert "enum" in node or "maxLength" in node or node.get("format") == "date-time"
        case "array":
            assert node["maxItems"] <= 64
        case "object":
            closed = "properties" in node or node.get("x-kubernetes-preserve-unknown-fields") or "maxProperties" in node
            assert closed


@pytest.mark.parametrize("path", [p for p in NODES if ".spec" in p])
def test_numbers_of_a_spec_are_bounded(path):
    if NODES[path].get("type") in ("integer", "number"):
        assert {"minimum", "maximum"} <= set(NODES[path])


def test_no_phase_and_no_free_text_drives_anything():
    assert not [path for path in NODES if path.lower().endswith(".phase")]


def test_lists_with_names_merge_by_name():
    for path, node in NODES.items():
        if path.endswith((".conditions", ".stages", ".data")) and node["type"] == "array" and "pretraining" not in path:
            assert node.get("x-kubernetes-list-type") == "map" or "resolved" in path, path


def test_every_failure_of_a_stage_has_an_exit_code():
    assert {reason.value for reason in FailureReason} - {reason.value for reason in EXIT_CODE_OF} == OPERATOR_ONLY


def test_condition_words_are_words():
    for word in [*ConditionType, *ConditionReason, *FailureReason]:
        assert re.fullmatch(r"[A-Z][A-Za-z]*", word.value)
