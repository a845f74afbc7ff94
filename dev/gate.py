"""A gate before an S3 server: whoever stands there sees each request, and may hold, refuse or break it.

Clients are given the gate's endpoint. What they sign, the gate's address included, reaches the server as it is.
"""

import http.client
import http.server
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Phase(StrEnum):
    """How far a request has come."""

    BEFORE = "before"
    """The server knows nothing of it."""
    HALF = "half"
    """The server has half of its body; only of a request with a body."""
    AFTER = "after"
    """The server has done it, and the client does not know."""


@dataclass(frozen=True)
class Request:
    """A request as it came: `path` is /BUCKET/KEY, `query` what follows it."""

    method: str
    path: str
    query: str


@dataclass(frozen=True)
class Refusal:
    """What is answered in the server's place: an HTTP status, and S3's own word for the error."""

    status: int
    code: str


class Broken(Exception):  # noqa: N818 - not an error of the gate
    """Raised by a guard: both connections are closed, in the middle of whatever they do."""


Guard = Callable[[Request, Phase], Refusal | None]
"""Called in each phase of each request, from several threads; what it answers counts in the phase BEFORE."""


def lets_all_pass(_request: Request, _phase: Phase) -> None:
    """Be no guard at all."""


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True  # a client's connection may idle for ever

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client was killed between two requests."""


class Gate:
    """Open inside its context.

    Attributes:
        guard: may be changed at any time.
        endpoint: the URL that clients need.
    """

    def __init__(self, server: str) -> None:
        """server: its endpoint."""
        self.guard: Guard = lets_all_pass
        self._server = urlsplit(server).netloc
        self._listener = _Listener(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._listener.server_port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, name="gate")

    def __enter__(self) -> Self:
        """Open it."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                if not gate._serve(self):
                    self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = pass_on  # noqa: N815 - named by the base class

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _serve(self, client: http.server.BaseHTTPRequestHandler) -> bool:
        """Serve one request, and say whether the connection is good for another."""
        length = int(client.headers.get("Content-Length", 0))
        body = client.rfile.read(length)
        if len(body) < length:
            return False  # the client was killed
        path, _, query = client.path.partition("?")
        request = Request(client.command, path, query)
        server = http.client.HTTPConnection(self._server, timeout=120)
        try:
            refusal = self.guard(request, Phase.BEFORE)
            if refusal is not None:
                content = f"<Error><Code>{refusal.code}</Code><Message>refused</Message></Error>".encode()
                _answer(client, refusal.status, [], content)
                return True
            server.putrequest(client.command, client.path, skip_host=True, skip_accept_encoding=True)
            for name, value in client.headers.items():
                if name.lower() != "expect":  # answered already
                    server.putheader(name, value)
            server.endheaders()
            if body:
                server.send(body[: len(body) // 2])
                self.guard(request, Phase.HALF)
                server.send(body[len(body) // 2 :])
            answer = server.getresponse()
            content = answer.read()
            self.guard(request, Phase.AFTER)
            _answer(client, answer.status, answer.getheaders(), content)
        except (Broken, OSError, http.client.HTTPException):
            return False  # a side that is gone; the other one sees that its connection closes
        finally:
            server.close()
        return True


def _answer(
    client: http.server.BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], content: bytes
) -> None:
    length = str(len(content))
    client.send_response_only(status)
    for name, value in headers:
        if name.lower() == "content-length" and client.command == "HEAD":
            length = value
        if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
            client.send_header(name, value)
    client.send_header("Content-Length", length)
    client.end_headers()
    if client.command != "HEAD":
        client.wfile.write(content)
