"""The target with the drafter on the baseline's prompts: acceptance length, speed, equality of the outputs."""

import asyncio
from collections.abc import Sequence
from importlib.metadata import version

from osprey_api.conditions import FailureReason
from osprey_api.stages import DomainAcceptance, EvaluateConfig, EvaluateResult, InputRole, Speculation
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_serving.acceptance import (
    Counted,
    acceptance_by_position,
    corpus_acceptance_length,
    first_divergence,
    mean_acceptance_length,
)
from osprey_serving.client import LOG_HINT, Client, Connection, Request, ServerFacts
from osprey_serving.measure import (
    REPORT_FILE,
    Asked,
    Judged,
    by_domain,
    check_version,
    measure,
    read_rows,
    tokens_per_second,
    write_rows,
)
from osprey_serving.prompts import held_out_requests

ALGORITHM = "EAGLE3"
"""The only one under which SGLang gives the drafter the target's states."""


def run(context: StageContext, connection: Connection) -> EvaluateResult:
    """Ask a server that serves the target with the drafter; write requests.jsonl and report.json.

    Raises:
        StageError: INVALID_CONFIG: the server is of another version or does not draft as the config says, or the
            baseline was asked other prompts; INVALID_DATA: a domain's answers are too short to judge a draft; what the
            client and the prompts raise.
    """
    config = context.task.config
    if not isinstance(config, EvaluateConfig):
        raise TypeError(f"evaluate was given the config of {config.stage}")
    baseline = read_rows(context.input(InputRole.BASELINE), Asked)
    rows = asyncio.run(_ask(context, config, connection, baseline))
    write_rows(context.output, rows)
    result = summary(rows, baseline, config.speculation.steps)
    (context.output / REPORT_FILE).write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return result


def summary(rows: Sequence[Judged], baseline: Sequence[Asked], steps: int) -> EvaluateResult:
    """Return the figures of an evaluation.

    Args:
        rows: what the server with the drafter answered.
        baseline: what the server without it answered to the same prompts, in the same order.
        steps: most drafts that a verify step can accept.

    Raises:
        StageError: INVALID_DATA: a domain has no answer with a verify step.
    """
    domains, reference = by_domain(rows), by_domain(baseline)
    return EvaluateResult(
        requests=len(rows),
        requests_without_verify_step=sum(row.verify_steps == 0 for row in rows),
        by_domain=tuple(_domain(name, domains[name], reference[name]) for name in domains),
        acceptance_length=mean_acceptance_length(_counted(rows)),
        acceptance_length_corpus=corpus_acceptance_length(_counted(rows)),
        acceptance_by_position=acceptance_by_position([row.accepted_histogram for row in rows], steps),
        tokens_per_second=tokens_per_second(domains.values()),
        baseline_tokens_per_second=tokens_per_second(reference.values()),
        identical_outputs=sum(row.first_divergence is None for row in rows) / len(rows),
    )


def check_same_prompts(requests: dict[str, list[Request]], baseline: Sequence[Asked]) -> None:
    """Check that the baseline was asked what is about to be asked.

    Raises:
        StageError: INVALID_CONFIG: it was not.
    """
    asked = by_domain(baseline)
    if list(asked) != list(requests):
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"the baseline was asked the domains {', '.join(asked)}, not {', '.join(requests)}: "
            "it belongs to other data",
        )
    for domain, wanted in requests.items():
        if [request.prompt_ids for request in wanted] != [row.prompt_ids for row in asked[domain]]:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the baseline was asked {len(asked[domain])} prompts of {domain} that are not the {len(wanted)} of "
                "this evaluation: its data, its tokenizer or the memory of its server was another one",
            )


def check_speculation(facts: ServerFacts, wanted: Speculation) -> None:
    """Check that the server drafts as it is to be judged.

    Raises:
        StageError: INVALID_CONFIG: it does not; SERVER_FAILED: its plugin is missing or of another version.
    """
    if facts.algorithm != ALGORITHM:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"the server drafts by {facts.algorithm or 'nothing'}, and a drafter is judged under {ALGORITHM}: "
            "remove the --speculative arguments from the target's serverArgs",
        )
    if facts.speculation != dict(wanted):
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"the server drafts by {facts.speculation}, and {dict(wanted)} is to be judged: "
            "remove the --speculative arguments from the target's serverArgs, and set serving.speculation",
        )
    if facts.plugin != version("osprey-serving"):
        raise StageError(
            FailureReason.SERVER_FAILED,
            f"the server runs Osprey's plugin in version {facts.plugin or 'none'}, and {version('osprey-serving')} is "
            f"wanted: the init container `plugin` did not put it on the server's PYTHONPATH; {LOG_HINT}",
        )


async def _ask(
    context: StageContext, config: EvaluateConfig, connection: Connection, baseline: Sequence[Asked]
) -> list[Judged]:
    async with Client(connection, context.stop) as client:
        await client.wait_ready(connection.start_deadline_s)
        facts = await client.facts()
        check_version(facts, config.engine)
        check_speculation(facts, config.speculation)
        check_same_prompts(held_out_requests(context, config, facts), baseline)
        # The baseline's limits: with the drafter in its memory this server may have set tighter ones.
        requests = {domain: [_request(row, facts) for row in rows] for domain, rows in by_domain(baseline).items()}
        context.progress.begin(total=len(baseline))
        answers = await measure(client, requests, config.concurrency, context.progress.update)
    return [
        Judged(
            domain=domain,
            prompt_ids=row.prompt_ids,
            max_tokens=row.max_tokens,
            output_ids=answer.output_ids,
            finish=answer.finish,
            completion_tokens=answer.completion_tokens,
            started_seconds=answer.started_s - answers[domain][0].started_s,
            latency_seconds=answer.latency_s,
            verify_steps=answer.verify_steps,
            accepted_histogram=answer.accepted_histogram,
            first_divergence=first_divergence(answer.output_ids, row.output_ids),
        )
        for domain, rows in by_domain(baseline).items()
        for row, answer in zip(rows, answers[domain], strict=True)
    ]


def _request(row: Asked, facts: ServerFacts) -> Request:
    if facts.room(row.prompt_ids) < row.max_tokens:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"with the drafter the server has room for {facts.capacity} tokens per request, less than the baseline's "
            "server had: raise --mem-fraction-static or --max-total-tokens in the target's serverArgs, "
            "or lower evaluation.maxTokens",
        )
    return Request(row.prompt_ids, row.max_tokens)


def _domain(name: str, rows: Sequence[Judged], reference: Sequence[Asked]) -> DomainAcceptance:
    counted = _counted(rows)
    if not any(answer.verify_steps for answer in counted):
        raise StageError(
            FailureReason.INVALID_DATA,
            f"every answer of domain {name} ended with its first token, so no draft was ever judged: raise "
            "evaluation.maxTokens, or name other prompts",
        )
    return DomainAcceptance(
        name=name,
        requests=len(rows),
        acceptance_length=mean_acceptance_length(counted),
        acceptance_length_corpus=corpus_acceptance_length(counted),
        tokens_per_second=tokens_per_second([rows]),
        baseline_tokens_per_second=tokens_per_second([reference]),
    )


def _counted(rows: Sequence[Judged]) -> list[Counted]:
    return [Counted(row.completion_tokens, row.verify_steps) for row in rows]
