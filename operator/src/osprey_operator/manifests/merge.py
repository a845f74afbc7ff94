"""Strategic merge of a fragment of a PodTemplateSpec, by the merge keys that Kubernetes itself uses.

The fragment wins. Maps are merged; `null` deletes a key. Lists of `MERGE_KEYS` are merged by that key, other
lists are replaced, but `tolerations` and `envFrom` grow: a fragment adds to what the operator needs there. An
element, or a map, with `$patch: delete` deletes its counterpart, one with `$patch: replace` takes its place.

One default fragment serves every pod of ours, though not every pod has the same containers. So an entry for one
of `OWN_CONTAINERS` changes the container of that name, in whichever list the pod has it, and is dropped where the
pod has none; an entry of another name is a container of the user's and is added. Nothing here judges whether the
result is a valid pod: the API server does once the Job or the Deployment is made, and what it says is a condition.
"""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Field -> the key that its elements are merged by."""

GROWING = frozenset({"tolerations", "envFrom"})
ONE_OF = frozenset({"env", "volumes"})
"""Fields whose elements have, beside their name, one of several keys: a fragment with another one replaces."""

OWN_CONTAINERS = frozenset({"stage", "server", "sync", "fetch", "plugin"})
DIRECTIVE = "$patch"

Json = dict[str, JsonValue]


def merged(template: Mapping[str, JsonValue], fragment: Mapping[str, JsonValue]) -> Json:
    """Return `template` changed by `fragment`; neither argument is changed."""
    return _merged_maps(template, _with_own_containers_in_place(template, fragment))


def _merged_maps(base: Mapping[str, JsonValue], patch: Mapping[str, JsonValue]) -> Json:
    if patch.get(DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != DIRECTIVE}
    result = dict(base)
    for key, value in patch.items():
        if value is None or (isinstance(value, Mapping) and value.get(DIRECTIVE) == "delete"):
            result.pop(key, None)
            continue
        result[key] = _merged_values(key, result.get(key), value)
    return result


def _merged_values(field: str, base: JsonValue, patch: JsonValue) -> JsonValue:
    if isinstance(patch, dict):
        return _merged_maps(base if isinstance(base, dict) else {}, patch)
    if isinstance(patch, list):
        if field in MERGE_KEYS:
            return _merged_lists(field, base if isinstance(base, list) else [], patch)
        if field in GROWING and isinstance(base, list):
            return [*base, *(element for element in patch if element not in base)]
    return patch


def _merged_lists(field: str, base: Sequence[JsonValue], patch: Sequence[JsonValue]) -> list[JsonValue]:
    key = MERGE_KEYS[field]
    if {DIRECTIVE: "replace"} in patch:
        return [element for element in patch if element != {DIRECTIVE: "replace"}]
    result = list(base)
    for element in patch:
        if not isinstance(element, dict) or key not in element:
            result.append(element)
            continue
        at = _position(result, key, element[key])
        if element.get(DIRECTIVE) == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(_merged_maps({}, element))
        else:
            result[at] = _merged_elements(field, result[at], element)
    return result


def _merged_elements(field: str, base: JsonValue, patch: Json) -> JsonValue:
    if not isinstance(base, dict) or (field in ONE_OF and set(patch) - set(base)):
        return _merged_maps({}, patch)
    return _merged_maps(base, patch)


def _position(elements: Sequence[JsonValue], key: str, value: JsonValue) -> int | None:
    for index, element in enumerate(elements):
        if isinstance(element, dict) and element.get(key) == value:
            return index
    return None


def _with_own_containers_in_place(template: Mapping[str, JsonValue], fragment: Mapping[str, JsonValue]) -> Json:
    """Return the fragment with each entry for a container of ours in the list where the template has it."""
    spec = fragment.get("spec")
    if not isinstance(spec, dict):
        return dict(fragment)
    base = template.get("spec")
    present = {field: _names(base.get(field)) if isinstance(base, dict) else set() for field in _CONTAINER_LISTS}
    entries: dict[str, list[JsonValue]] = {field: [] for field in _CONTAINER_LISTS}
    for field in _CONTAINER_LISTS:
        value = spec.get(field)
        if not isinstance(value, list):
            continue
        for entry in value:
            name = entry.get("name") if isinstance(entry, dict) else None
            if not isinstance(name, str) or name not in OWN_CONTAINERS:
                entries[field].append(entry)
                continue
            for place in _CONTAINER_LISTS:
                if name in present[place]:
                    entries[place].append(entry)
    lists: Json = {field: found for field, found in entries.items() if found}
    rest = {key: value for key, value in spec.items() if key not in _CONTAINER_LISTS or not isinstance(value, list)}
    return {**fragment, "spec": {**rest, **lists}}


_CONTAINER_LISTS = ("initContainers", "containers")


def _names(containers: JsonValue) -> set[JsonValue]:
    if not isinstance(containers, list):
        return set()
    return {entry["name"] for entry in containers if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
