"""The target without a drafter on the held-out prompts: its outputs and its speed."""

import asyncio

from osprey_api.conditions import FailureReason
from osprey_api.stages import BaselineConfig, BaselineResult
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_serving.client import Client, Connection
from osprey_serving.measure import REPORT_FILE, Asked, by_domain, check_version, measure, tokens_per_second, write_rows
from osprey_serving.prompts import held_out_requests


def run(context: StageContext, connection: Connection) -> BaselineResult:
    """Ask a server that serves the target alone; write requests.jsonl and report.json.

    Raises:
        StageError: INVALID_CONFIG: the server has a drafter, or is of another version; what the client and the
            prompts raise.
    """
    config = context.task.config
    if not isinstance(config, BaselineConfig):
        raise TypeError(f"baseline was given the config of {config.stage}")
    rows = asyncio.run(_ask(context, config, connection))
    write_rows(context.output, rows)
    result = BaselineResult(requests=len(rows), tokens_per_second=tokens_per_second(by_domain(rows).values()))
    (context.output / REPORT_FILE).write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return result


async def _ask(context: StageContext, config: BaselineConfig, connection: Connection) -> list[Asked]:
    async with Client(connection, context.stop) as client:
        await client.wait_ready(connection.start_deadline_s)
        facts = await client.facts()
        check_version(facts, config.engine)
        if facts.algorithm is not None:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the baseline's server drafts ({facts.algorithm}): remove the --speculative arguments from the "
                "target's serverArgs, since the operator adds those of the drafter",
            )
        requests = held_out_requests(context, config, facts)
        context.progress.begin(total=sum(map(len, requests.values())))
        answers = await measure(client, requests, config.concurrency, context.progress.update)
    return [
        Asked(
            domain=domain,
            prompt_ids=request.prompt_ids,
            max_tokens=request.max_tokens,
            output_ids=answer.output_ids,
            finish=answer.finish,
            completion_tokens=answer.completion_tokens,
            started_seconds=answer.started_s - answers[domain][0].started_s,
            latency_seconds=answer.latency_s,
        )
        for domain in requests
        for request, answer in zip(requests[domain], answers[domain], strict=True)
    ]
