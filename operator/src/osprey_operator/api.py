"""The API server's verbs for the kinds that the operator touches, without discovery: their paths never change."""

import json
from typing import Any
from urllib.parse import quote

import aiohttp
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from osprey_api import backbone, drafter
from osprey_api.naming import API_VERSION, FIELD_MANAGER
from osprey_operator.state import KubernetesObject

TIMEOUT_SECONDS = 30

PATHS = {
    backbone.KIND: (f"/apis/{API_VERSION}", backbone.PLURAL),
    drafter.KIND: (f"/apis/{API_VERSION}", drafter.PLURAL),
    "Job": ("/apis/batch/v1", "jobs"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "Event": ("/api/v1", "events"),
}
"""Kind -> where its objects are."""

PATCH_TEST_FAILED = "the server rejected our request due to an error in our request"
"""All that the API server says of a JSON patch whose test fails; a status that breaks the schema is named instead."""


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Api:
    """A client of the API server."""

    def __init__(self, client: Any) -> None:
        self._client = DynamicClient(client)

    async def get(self, kind: str, namespace: str, name: str) -> KubernetesObject | None:
        """Read an object; None where there is none."""
        try:
            return await self._call("get", _path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: str, namespace: str, *, labels: str | None = None, fields: str | None = None
    ) -> list[KubernetesObject]:
        """Read the objects of a kind that selectors choose."""
        answer = await self._call("get", _path(kind, namespace), label_selector=labels, field_selector=fields)
        return [{**item, "kind": kind} for item in answer["items"]]

    async def create(self, wanted: KubernetesObject) -> KubernetesObject:
        """Make an object."""
        path = _path(wanted["kind"], wanted["metadata"]["namespace"])
        return await self._call("post", path, body=wanted, field_manager=FIELD_MANAGER)

    async def apply(self, wanted: KubernetesObject) -> KubernetesObject:
        """Make an object, or change the fields of it that are this operator's."""
        metadata = wanted["metadata"]
        return await self._call(
            "patch",
            _path(wanted["kind"], metadata["namespace"], metadata["name"]),
            body=wanted,
            content_type="application/apply-patch+yaml",
            field_manager=FIELD_MANAGER,
            force_conflicts=True,
        )

    async def replace_status(self, resource: KubernetesObject, status: KubernetesObject) -> KubernetesObject | None:
        """Put a whole status in the place of a resource's; None where the resource is gone.

        Not by server-side apply: that leaves `null` where a map became empty, which the schema then refuses.
        """
        metadata = resource["metadata"]
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = _path(resource["kind"], metadata["namespace"], metadata["name"])
        try:
            return await self._call(
                "patch",
                f"{path}/status",
                body=patch,
                content_type="application/json-patch+json",
                field_manager=FIELD_MANAGER,
            )
        except ApiError as error:
            if error.status == 404 or (error.status == 422 and error.message == PATCH_TEST_FAILED):
                return None  # it is gone, or another one has its name by now
            raise

    async def delete(self, gone: KubernetesObject) -> None:
        """Delete exactly this object, and then what it owns; one that is gone already is no error."""
        metadata = gone["metadata"]
        options = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        try:
            await self._call("delete", _path(gone["kind"], metadata["namespace"], metadata["name"]), body=options)
        except ApiError as error:
            if error.status not in {404, 409}:  # 409: another object has the name by now
                raise

    async def has_kinds(self) -> bool:
        """Tell whether the CRDs are installed."""
        try:
            found = await self._call("get", f"/apis/{API_VERSION}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return {backbone.PLURAL, drafter.PLURAL} <= {entry["name"] for entry in found["resources"]}

    async def _call(self, method: str, path: str, **parameters: Any) -> KubernetesObject:
        try:
            response: aiohttp.ClientResponse = await self._client.request(
                method, path, serialize=False, _request_timeout=TIMEOUT_SECONDS, **parameters
            )
            answer: KubernetesObject = await response.json()
        except DynamicApiError as error:
            raise ApiError(error.status, _message(error)) from error
        return answer


def _path(kind: str, namespace: str, name: str = "") -> str:
    root, plural = PATHS[kind]
    path = f"{root}/namespaces/{quote(namespace)}/{plural}"
    return f"{path}/{quote(name)}" if name else path


def _message(error: DynamicApiError) -> str:
    """Return the server's own sentence."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
