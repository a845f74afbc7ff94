"""Models -> CustomResourceDefinitions with a structural schema. Needs PyYAML, which nothing else here does.

    python -m osprey_api.schema            write crds/*.yaml
    python -m osprey_api.schema --check    fail if they are stale

Kubernetes wants a schema without references, null types or unknown keywords; pydantic writes all three.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel

from osprey_api import backbone, drafter
from osprey_api.naming import GROUP, VERSION

Schema = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[2]
_KEPT = {
    "type", "description", "default", "enum", "format", "pattern", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip


def structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Turn one JSON schema node, as pydantic writes it, into a structural schema node.

    Raises:
        ValueError: the node says something that a structural schema cannot say.
    """
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return structural({**target, **siblings}, definitions)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            members = [m for m in schema[union] if m.get("type") != "null"]
            if len(members) != 1:
                raise ValueError(f"a union of several types has no structural schema: {schema}")
            siblings = {key: value for key, value in schema.items() if key not in (union, "default")}
            if schema.get("default") is not None:
                siblings["default"] = schema["default"]
            return structural({**members[0], **siblings}, definitions)
    node: Schema = {}
    if "const" in schema:
        node["enum"] = [schema["const"]]
    for key, value in schema.items():
        if key in _KEPT:
            node[key] = value
    # OpenAPI 3.0, which CRDs use, has the exclusive bounds as flags beside the bound.
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:
            node[bound], node[exclusive] = node[exclusive], True
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in schema:
        node["properties"] = {name: structural(value, definitions) for name, value in schema["properties"].items()}
        _default_parts(node["properties"], schema["properties"], schema.get("required", ()))
        if schema.get("required"):
            node["required"] = sorted(schema["required"])
    if "items" in schema:
        node["items"] = structural(schema["items"], definitions)
    _free_or_typed_map(schema, node, definitions)
    _integer_format(node)
    return node


def _free_or_typed_map(schema: Mapping[str, Any], node: Schema, definitions: Mapping[str, Any]) -> None:
    values = schema.get("additionalProperties")
    if isinstance(values, dict) and not node.get("x-kubernetes-preserve-unknown-fields"):
        node["additionalProperties"] = structural(values, definitions)


def _integer_format(node: Schema) -> None:
    if node.get("type") == "integer":
        node["format"] = "int64"


def _default_parts(properties: Mapping[str, Schema], raw: Mapping[str, Any], required: Sequence[str]) -> None:
    """Default an optional part that cannot be null to `{}`: the API server then fills in its fields one by one.

    A part without a default would keep the defaults of its own fields out of the resource where it is left out.
    """
    for name, node in properties.items():
        nullable = "anyOf" in raw[name]
        if "properties" in node and name not in required and not nullable:
            node["default"] = {}


def definition(module: ModuleType) -> Schema:
    """Return the CustomResourceDefinition of a resource's module."""
    model: type[BaseModel] = getattr(module, module.KIND)
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = structural(raw, raw.get("$defs", {}))
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{module.PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": module.KIND,
                "listKind": f"{module.KIND}List",
                "plural": module.PLURAL,
                "singular": module.KIND.lower(),
                "shortNames": list(module.SHORT_NAMES),
                "categories": ["osprey"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {**schema, "required": ["spec"]}},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [dict(column) for column in module.PRINTER_COLUMNS],
                }
            ],
        },
    }


def rendered() -> dict[Path, str]:
    """Return each CRD file and its text."""
    head = "# Generated by `python -m osprey_api.schema` from osprey_api; do not edit.\n"
    return {
        FOLDER / f"{GROUP}_{module.PLURAL}.yaml": head
        + yaml.safe_dump(definition(module), sort_keys=False, width=120, allow_unicode=True)
        for module in (backbone, drafter)
    }


def main(arguments: list[str]) -> int:
    """Write or check the CRD files; the exit status is 1 when a checked file is stale."""
    parser = argparse.ArgumentParser(description="Generate the CustomResourceDefinitions.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    options = parser.parse_args(arguments)
    stale = 0
    for path, text in rendered().items():
        if path.exists() and path.read_text() == text:
            continue
        if options.check:
            sys.stderr.write(f"{path.name} is stale: run `python -m osprey_api.schema`\n")
            stale = 1
        else:
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
