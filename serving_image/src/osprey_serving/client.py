"""A client of one SGLang server: wait for it, ask it many things at a time, and outlive its restarts."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from osprey_api.conditions import FailureReason
from osprey_runtime.context import stopped
from osprey_runtime.errors import StageError
from osprey_serving.plugin import VERSION_KEY

Item = TypeVar("Item")

LOG_HINT = "look at the log of the container `server` of this pod"
STOP_POLL_S = 0.2
"""How soon a stopped stage gives up its requests."""
HEALTH_TIMEOUT_S = 30.0
"""SGLang itself gives up a health check after 20 s."""
ATTEMPTS = 4
"""A request is asked this often before the stage fails."""
DEATHS = 3
"""A server that came up and went away this often while it was waited for will not become ready."""


@dataclass(frozen=True)
class Connection:
    """Where a server is, and how long it is waited for."""

    url: str
    admin_key: str | None = None
    """Needed for flushing the cache where the server has one."""
    start_deadline_s: float = 3600.0
    """A server that loads hundreds of gigabytes takes its time; the Job's own deadline may be shorter."""
    restart_deadline_s: float = 900.0
    """How long a server that was ready may be away."""


@dataclass(frozen=True)
class Request:
    """One prompt to be answered."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    """Has an effect where the temperature is above 0 and the server runs with --enable-deterministic-inference."""


@dataclass(frozen=True)
class Completion:
    """One answer."""

    output_ids: tuple[int, ...]
    """With the end token, where the answer ended by itself."""
    finish: str
    """`stop` or `length`."""
    completion_tokens: int
    verify_steps: int
    """0 without a drafter."""
    accepted_histogram: tuple[int, ...]
    """Verify steps in which exactly 0, 1, 2, … drafts were accepted."""
    started_s: float
    """On the clock of `time.monotonic`."""
    latency_s: float


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    version: str
    capacity: int
    """Longest prompt and answer together, in tokens: the model's context, or the server's memory if that is less."""
    algorithm: str | None
    """Speculative algorithm; None: the target is served alone."""
    speculation: dict[str, int | None]
    """Its numbers, by the names of `Speculation`; empty without a drafter."""
    plugin: str | None
    """Version of Osprey's plugin, if every one of the server's schedulers runs it in one version."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """What it gives the chat template where a request says nothing else (--default-chat-template-kwargs)."""

    def room(self, prompt_ids: tuple[int, ...] | list[int]) -> int:
        """Return the longest answer that fits behind a prompt, in tokens; 0: the prompt does not fit."""
        # SGLang wants prompts shorter than max_req_input_len, which is 6 below the context, and answers that end
        # one token before the limit (0.5.23, tp_worker.py and init_req_max_new_tokens).
        return self.capacity - len(prompt_ids) if len(prompt_ids) <= self.capacity - 5 else 0


class _UnavailableError(Exception):
    """The server did not answer this time."""


class Client:
    """Talks to one server. Use as an asynchronous context manager."""

    def __init__(self, connection: Connection, stop: threading.Event) -> None:
        """Args: `stop` ends all waiting with StageError STOPPED."""
        self.retries = 0
        """Requests that had to be asked again: a time that was measured meanwhile is worthless."""
        self._connection = connection
        self._stop = stop
        self._recovery = asyncio.Lock()
        self._http = httpx.AsyncClient(
            base_url=connection.url,
            # No limit on reading: an answer comes whole, after minutes; a server that hangs ends itself.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy of the cluster must not see what goes to localhost
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the server answers.

        Raises:
            StageError: SERVER_TIMEOUT: it did not within `deadline_s`; SERVER_FAILED: it came up and went away
                several times, or something else listens there; STOPPED.
        """
        end = time.monotonic() + deadline_s
        deaths, listened = 0, False
        last = "nothing listens there yet"
        while time.monotonic() < end:
            self._check_stop()
            try:
                answer = await self._http.get(
                    "/health", timeout=min(HEALTH_TIMEOUT_S, max(1.0, end - time.monotonic()))
                )
            except httpx.TransportError as error:
                last = _describe(error)
                if listened and isinstance(error, httpx.ConnectError):
                    deaths, listened = deaths + 1, False
                if deaths >= DEATHS:
                    raise StageError(
                        FailureReason.SERVER_FAILED,
                        f"the SGLang server came up and ended {deaths} times before it was ready: {LOG_HINT}",
                    ) from error
            else:
                if answer.status_code == httpx.codes.OK:
                    return
                listened = True
                last = f"it answers /health with {answer.status_code}"
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    raise StageError(
                        FailureReason.SERVER_FAILED,
                        f"{self._connection.url} is no working SGLang server: {last}; {LOG_HINT}",
                    )
            await asyncio.sleep(STOP_POLL_S)
        raise StageError(
            FailureReason.SERVER_TIMEOUT,
            f"the SGLang server was not ready within {deadline_s:g} s ({last}): {LOG_HINT}",
        )

    async def facts(self) -> ServerFacts:
        """Return what the server says of itself.

        Raises:
            StageError: SERVER_FAILED: it does not say.
        """
        info = await self._get("/server_info")
        algorithm = info.get("speculative_algorithm")
        plugins = {state.get(VERSION_KEY) for state in info["internal_states"]}
        return ServerFacts(
            version=str(info["version"]),
            capacity=int(info["max_req_input_len"]) + 4,
            algorithm=algorithm,
            speculation={}
            if algorithm is None
            else {
                "steps": info.get("speculative_num_steps"),
                "top_k": info.get("speculative_eagle_topk"),
                "draft_tokens": info.get("speculative_num_draft_tokens"),
            },
            plugin=plugins.pop() if len(plugins) == 1 else None,
            template_options=info.get("default_chat_template_kwargs") or {},
        )

    async def flush_cache(self) -> None:
        """Forget all prefixes, so that what was asked before does not make the next answers faster.

        Raises:
            StageError: INVALID_CONFIG: the admin key is not the server's; SERVER_FAILED: it would not.
        """
        key = self._connection.admin_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            # The server waits this long, in seconds, for running requests to end.
            answer = await self._http.post("/flush_cache", params={"timeout": 60}, headers=headers, timeout=90)
        except httpx.TransportError as error:
            raise StageError(
                FailureReason.SERVER_FAILED, f"the SGLang server went away ({_describe(error)}): {LOG_HINT}"
            ) from error
        if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                "the SGLang server refuses the admin key: give OSPREY_ADMIN_KEY and --admin-api-key the same value",
            )
        if answer.status_code != httpx.codes.OK:
            raise StageError(
                FailureReason.SERVER_FAILED,
                f"the SGLang server did not flush its cache ({answer.text.strip()}): {LOG_HINT}",
            )

    async def generate(self, request: Request) -> Completion:
        """Ask for one answer, again where the server was restarted meanwhile.

        Raises:
            StageError: SERVER_FAILED: no answer in several attempts, or the server did not come back;
                INVALID_CONFIG: the server refuses the request, or cut the answer; STOPPED.
        """
        last: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                self.retries += 1
                await self._recover()
            try:
                return await self._generate_once(request)
            except _UnavailableError as error:
                last = error
        raise StageError(
            FailureReason.SERVER_FAILED,
            f"the SGLang server failed {ATTEMPTS} times at one request of {len(request.prompt_ids)} tokens "
            f"({last}): {LOG_HINT}",
        ) from last

    async def generate_all(
        self,
        requests: Iterable[tuple[Item, Request]],
        concurrency: int,
        on_answer: Callable[[Item, Completion], None],
    ) -> None:
        """Keep `concurrency` requests in flight, taken from `requests` in order, until all are answered.

        `on_answer` is called as answers come, in any order.

        Raises:
            StageError: as `generate`; the requests in flight are given up.
        """
        source = iter(requests)
        pending: dict[asyncio.Task[Completion], Item] = {}
        try:
            while True:
                while len(pending) < concurrency and (entry := next(source, None)) is not None:
                    pending[asyncio.create_task(self.generate(entry[1]))] = entry[0]
                if not pending:
                    return
                done, _ = await asyncio.wait(pending, timeout=STOP_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    on_answer(pending.pop(task), task.result())
                self._check_stop()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _generate_once(self, request: Request) -> Completion:
        body = {
            "input_ids": request.prompt_ids,
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": request.temperature,
                "sampling_seed": request.seed,
            },
        }
        started = time.monotonic()
        try:
            answer = await self._http.post("/generate", json=body)
        except httpx.TransportError as error:
            raise _UnavailableError(_describe(error)) from error
        latency = time.monotonic() - started
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            raise _UnavailableError(f"it answered {answer.status_code}: {answer.text[:300]}")
        if answer.status_code != httpx.codes.OK:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the SGLang server refuses a request of {len(request.prompt_ids)} prompt tokens and at most "
                f"{request.max_tokens} answer tokens with {answer.status_code}: {answer.text[:300]}; "
                "look at the target's serverArgs",
            )
        value = answer.json()
        meta = value["meta_info"]
        finish = meta["finish_reason"]["type"]
        if finish == "abort":
            raise _UnavailableError(f"it gave the request up: {meta['finish_reason'].get('message', '')}")
        tokens = int(meta["completion_tokens"])
        if finish == "length" and tokens < request.max_tokens:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the SGLang server cut an answer at {tokens} of {request.max_tokens} tokens: its memory is too small; "
                "raise --mem-fraction-static or --max-total-tokens in the target's serverArgs, or lower maxTokens",
            )
        return Completion(
            output_ids=tuple(value["output_ids"]),
            finish=finish,
            completion_tokens=tokens,
            verify_steps=int(meta.get("spec_verify_ct", 0)),
            accepted_histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
            started_s=started,
            latency_s=latency,
        )

    async def _recover(self) -> None:
        async with self._recovery:  # one asks whether the server is back, the others wait
            try:
                await self.wait_ready(self._connection.restart_deadline_s)
            except StageError as error:
                if error.reason is not FailureReason.SERVER_TIMEOUT:
                    raise
                raise StageError(
                    FailureReason.SERVER_FAILED,
                    "the SGLang server ended while it was asked, and was not back within "
                    f"{self._connection.restart_deadline_s:g} s: {LOG_HINT}",
                ) from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = await self._http.get(path, timeout=60)
        except httpx.TransportError as error:
            raise StageError(
                FailureReason.SERVER_FAILED, f"the SGLang server went away ({_describe(error)}): {LOG_HINT}"
            ) from error
        if answer.status_code != httpx.codes.OK:
            raise StageError(
                FailureReason.SERVER_FAILED,
                f"the SGLang server answers {path} with {answer.status_code}: {LOG_HINT}",
            )
        value: dict[str, Any] = answer.json()
        return value

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise stopped()


def _describe(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
