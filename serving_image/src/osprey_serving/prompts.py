"""The prompts of a stage as requests to a server."""

import logging

from osprey_api.conditions import FailureReason
from osprey_api.stages import BaselineConfig, EvaluateConfig
from osprey_runtime.context import StageContext
from osprey_runtime.data import DropError
from osprey_runtime.errors import StageError
from osprey_runtime.prompts import held_out_prompts
from osprey_serving import target
from osprey_serving.chat import Chat
from osprey_serving.client import Request, ServerFacts

Requests = dict[str, list[Request]]
"""By domain."""

log = logging.getLogger("osprey_serving")


def held_out_requests(context: StageContext, config: BaselineConfig | EvaluateConfig, facts: ServerFacts) -> Requests:
    """Return the held-out prompts as greedy requests, by domain, in their order.

    Prompts that do not fit the target's context, or that its chat template refuses, are left out. An answer may be as
    long as the context lets it.

    Raises:
        StageError: INVALID_DATA: a domain has no prompt that fits; what reading and rendering prompts raise.
    """
    chat = Chat(target.folder(context, config.target))
    domains: Requests = {source.name: [] for source in config.prompts if source.evaluate}
    too_long = refused = 0
    for prompt in held_out_prompts(config.prompts, config.held_out, context.task.storage).prompts:
        try:
            ids = tuple(chat.render(prompt.conversation, facts.template_options))
        except DropError as error:
            refused += 1
            log.warning("a held-out prompt of %s is left out: %s", prompt.domain, error.detail)
            continue
        room = facts.room(ids)
        if room:
            domains[prompt.domain].append(Request(ids, min(config.max_tokens, room)))
        else:
            too_long += 1
    if too_long or refused:
        log.warning(
            "of the held-out prompts %d do not fit the target's context, and %d its chat template refuses",
            too_long,
            refused,
        )
    for domain, requests in domains.items():
        if not requests:
            raise StageError(
                FailureReason.INVALID_DATA,
                f"no held-out prompt of {domain} fits the target's context of {facts.capacity} tokens and its chat "
                "template: name other data for it",
            )
    return domains
