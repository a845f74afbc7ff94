"""The few calls that the cluster makes to its own API server, with the standard library alone."""

import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from dev.cluster.certificates import Authority

FIELD_MANAGER = "osprey-dev"


class ApiError(RuntimeError):
    """The API server refused a request; the message is its own."""


@dataclass(frozen=True)
class Api:
    """A client of one API server, as one of the authority's users."""

    server: str
    authority: Authority
    user: str
    _context: ssl.SSLContext = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the user's pair once."""
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        context.load_cert_chain(str(self.authority.cert(self.user)), str(self.authority.key(self.user)))
        object.__setattr__(self, "_context", context)

    def get(self, path: str) -> Any:
        """Read an object or a list.

        Raises:
            ApiError: the server refuses.
            OSError: it does not answer.
        """
        return json.loads(self._call("GET", path))

    def is_ready(self) -> bool:
        """Whether the server says that it is."""
        try:
            return self._call("GET", "/readyz") == b"ok"
        except (OSError, http.client.HTTPException, ApiError):
            return False

    def exists(self, path: str) -> bool:
        """Whether an object can be read."""
        try:
            self.get(path)
        except ApiError:
            return False
        return True

    def apply(self, path: str, manifest: dict[str, Any]) -> None:
        """Apply an object on the server's side; ``path`` ends with its name.

        Raises:
            ApiError: the server refuses.
        """
        query = f"?fieldManager={FIELD_MANAGER}&force=true"
        self._call("PATCH", path + query, json.dumps(manifest), "application/apply-patch+yaml")

    def delete(self, path: str) -> None:
        """Ask for the deletion of an object.

        Raises:
            ApiError: the server refuses, also if there is none.
        """
        self._call("DELETE", path)

    def _call(self, method: str, path: str, body: str | None = None, kind: str = "application/json") -> bytes:
        place = urlsplit(self.server)
        connection = http.client.HTTPSConnection(
            cast(str, place.hostname), place.port, timeout=10, context=self._context
        )
        try:
            connection.request(method, path, body, {"Content-Type": kind, "Accept": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ApiError(f"{method} {path}: {answer.status} {content.decode(errors='replace')}")
        return content
