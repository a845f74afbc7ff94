"""Waiting for a server that does not come: each way of not coming has its own end."""

import asyncio
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_serving.client import DEATHS, Client, Connection


@contextmanager
def something_that_answers(status, port=0):
    """A server, though not SGLang, that answers everything with one status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def wait_ready(port, deadline_s, stop=None):
    async def wait():
        async with Client(Connection(f"http://127.0.0.1:{port}"), stop or threading.Event()) as client:
            await client.wait_ready(deadline_s)

    asyncio.run(wait())


def test_a_server_that_is_not_up_yet_is_waited_for(free_port):
    with pytest.raises(StageError, match=r"not ready within 1 s.*container `server`") as caught:
        wait_ready(free_port, 1)
    assert caught.value.reason is FailureReason.SERVER_TIMEOUT


def test_a_server_that_stays_unhealthy_is_a_timeout_too():
    with something_that_answers(503) as port, pytest.raises(StageError, match="/health with 503") as caught:
        wait_ready(port, 1)
    assert caught.value.reason is FailureReason.SERVER_TIMEOUT


def test_what_is_no_sglang_server_fails_at_once():
    began = time.monotonic()
    with something_that_answers(404) as port, pytest.raises(StageError, match="no working SGLang server") as caught:
        wait_ready(port, 60)
    assert caught.value.reason is FailureReason.SERVER_FAILED
    assert time.monotonic() - began < 5


def test_a_server_that_comes_up_and_ends_again_and_again_fails_before_the_deadline(free_port):
    def crash_loop():
        for _ in range(DEATHS):
            with something_that_answers(503, free_port):
                time.sleep(0.7)
            time.sleep(0.7)

    kubelet = threading.Thread(target=crash_loop)
    kubelet.start()
    began = time.monotonic()
    with pytest.raises(StageError, match=f"ended {DEATHS} times") as caught:
        wait_ready(free_port, 60)
    kubelet.join()
    assert caught.value.reason is FailureReason.SERVER_FAILED
    assert time.monotonic() - began < 20


def test_a_stopped_stage_does_not_wait(free_port):
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(StageError) as caught:
        wait_ready(free_port, 60, stop)
    assert caught.value.reason is FailureReason.STOPPED
    assert time.monotonic() - began < 5
