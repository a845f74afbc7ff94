"""A small load on a served model, bounded in time: what live acceptance length and throughput are measured on."""

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx


def run(url: str, prompts: Sequence[str], *, seconds: float, concurrency: int, max_tokens: int) -> int:
    """Ask a server over its OpenAI-compatible API for a while and return how many answers came.

    Args:
        url: base URL of the Service.
        prompts: asked one after the other, over and over.
        seconds: no request is started after this.
        concurrency: requests in flight.
        max_tokens: longest answer, in tokens.

    Raises:
        httpx.HTTPError: the server refused a request, or went away.
    """
    todo = itertools.cycle(prompts)
    taking = threading.Lock()
    end = time.monotonic() + seconds

    def ask() -> int:
        answered = 0
        with httpx.Client(base_url=url, timeout=120) as client:
            while time.monotonic() < end:
                with taking:
                    prompt = next(todo)
                message = {"role": "user", "content": prompt}
                body = {"model": "default", "messages": [message], "max_tokens": max_tokens, "temperature": 0}
                client.post("/v1/chat/completions", json=body).raise_for_status()
                answered += 1
        return answered

    with ThreadPoolExecutor(concurrency) as pool:
        return sum(pool.map(lambda _: ask(), range(concurrency)))
