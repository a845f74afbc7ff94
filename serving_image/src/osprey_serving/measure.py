"""Asking a server the held-out prompts, domain by domain, on the clock: what baseline and evaluate share.

Both ask the same prompts in the same order with the same number in flight, with an empty prefix cache before each
domain, so that their times can be compared.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from osprey_api.conditions import FailureReason
from osprey_api.stages import Engine
from osprey_runtime.errors import StageError
from osprey_serving.client import LOG_HINT, Client, Completion, Request, ServerFacts

REQUESTS_FILE = "requests.jsonl"
REPORT_FILE = "report.json"
WARM_UP_TOKENS = 16
MEASUREMENTS = 3
"""A domain during which the server was restarted is asked again; so often in all."""
_RELEASE = re.compile(r"(\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)?)(?:-.*)?$")

log = logging.getLogger("osprey_serving")


class Asked(BaseModel):
    """One request of a measured stage: a line of requests.jsonl."""

    model_config = ConfigDict(frozen=True)

    domain: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    output_ids: tuple[int, ...]
    finish: str
    completion_tokens: int
    started_seconds: float
    """After the domain's first request was sent."""
    latency_seconds: float


class Judged(Asked):
    """One request of evaluate: also what became of the drafts."""

    verify_steps: int
    accepted_histogram: tuple[int, ...]
    """Verify steps in which exactly 0, 1, 2, … drafts were accepted."""
    first_divergence: int | None
    """First position at which the output differs from the baseline's; None: they are equal."""


Row = TypeVar("Row", bound=Asked)


def wall_seconds(rows: Sequence[Asked]) -> float:
    """Return the time from a domain's first request to its last answer."""
    return max(row.started_seconds + row.latency_seconds for row in rows)


def tokens_per_second(domains: Iterable[Sequence[Asked]]) -> float:
    """Return completion tokens / wall time over domains that were asked one after the other."""
    tokens, seconds = 0, 0.0
    for rows in domains:
        tokens += sum(row.completion_tokens for row in rows)
        seconds += wall_seconds(rows)
    return tokens / seconds


def by_domain(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by domain, in the order in which they come."""
    domains: dict[str, list[Row]] = {}
    for row in rows:
        domains.setdefault(row.domain, []).append(row)
    return domains


def write_rows(folder: Path, rows: Iterable[Asked]) -> None:
    """Write requests.jsonl."""
    with (folder / REQUESTS_FILE).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(row.model_dump_json() + "\n" for row in rows)


def read_rows(folder: Path, kind: type[Row]) -> list[Row]:
    """Read requests.jsonl."""
    with (folder / REQUESTS_FILE).open(encoding="utf-8", newline="\n") as file:
        return [kind.model_validate_json(line) for line in file]


def check_version(facts: ServerFacts, engine: Engine) -> None:
    """Check that the server is of the version that is measured, where the config names one.

    It may also hold a digest, an image, or a tag that is no version; what follows a version in a tag says for what
    hardware the image was built.

    Raises:
        StageError: INVALID_CONFIG: it is another one.
    """
    wanted = _RELEASE.match(engine.version)
    if wanted and wanted[1] != facts.version.partition("+")[0]:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"the server runs SGLang {facts.version}, and {wanted[1]} is to be measured: set images.sglang.version in "
            "the chart's values to what the image holds",
        )


async def measure(
    client: Client,
    prompts: dict[str, list[Request]],
    concurrency: int,
    on_progress: Callable[[int], None],
) -> dict[str, list[Completion]]:
    """Ask all prompts, a domain at a time, and return the answers in the prompts' order.

    Args:
        client: of a server that is ready.
        prompts: requests by domain; no domain is empty.
        concurrency: requests in flight.
        on_progress: told after each answer how many requests of all are answered.

    Raises:
        StageError: as `Client.generate_all`; SERVER_FAILED too if the server is restarted again and again.
    """
    everything = [request for requests in prompts.values() for request in requests]
    warm_up = [Request(request.prompt_ids, min(WARM_UP_TOKENS, request.max_tokens)) for request in everything]
    await client.generate_all(((None, request) for request in warm_up[:concurrency]), concurrency, lambda *_: None)
    answers: dict[str, list[Completion]] = {}
    done = 0
    for domain, requests in prompts.items():
        for _ in range(MEASUREMENTS):
            retries = client.retries
            answers[domain] = await _ask(client, requests, concurrency, done, on_progress)
            if client.retries == retries:
                break
            log.warning("the server was restarted during domain %s, which is measured again", domain)
        else:
            raise StageError(
                FailureReason.SERVER_FAILED,
                f"the SGLang server was restarted in each of {MEASUREMENTS} measurements of domain {domain}, "
                f"so no time could be taken: {LOG_HINT}",
            )
        done += len(requests)
    return answers


async def _ask(
    client: Client, requests: list[Request], concurrency: int, done: int, on_progress: Callable[[int], None]
) -> list[Completion]:
    await client.flush_cache()
    answered: dict[int, Completion] = {}

    def take(index: int, completion: Completion) -> None:
        answered[index] = completion
        on_progress(done + len(answered))

    await client.generate_all(enumerate(requests), concurrency, take)
    return [answered[index] for index in range(len(requests))]
