"""Which prompts train and which are held out: chosen by content, so that no prompt is on both sides."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from osprey_api.conditions import FailureReason
from osprey_api.stages import HeldOut, Pinned, PromptSource, StorageLocation
from osprey_runtime.conversation import Conversation, conversation
from osprey_runtime.data import DropError, Ledger, TextRows, rows
from osprey_runtime.errors import StageError


@dataclass(frozen=True)
class Prompt:
    """What the target is asked."""

    domain: str
    conversation: Conversation
    place: str = field(default="", compare=False)
    """File and line, for reports."""


@dataclass(frozen=True)
class Chosen:
    """Prompts, and what became of the rows from which they were chosen.

    Attributes:
        prompts: per domain in the order of the sources, within it by hash.
        ledgers: of each source that was read, by its domain.
    """

    prompts: list[Prompt]
    ledgers: dict[str, Ledger]


def conversations(
    source: Pinned, prompt_field: str | None, storage: StorageLocation, ledger: Ledger, *, limit: int | None = None
) -> Iterator[tuple[str, Conversation]]:
    """Yield the prompts of a source, in their order, with their places; for arguments and errors see `rows`.

    Args:
        prompt_field: of a row that holds the prompt; None: it is recognised by its name.
    """
    for row in rows(source, storage, ledger, text=TextRows.LINE, limit=limit):
        try:
            found = conversation(row, prompt_field)
        except DropError as error:
            ledger.drop(error.reason, row.place, error.detail)
        else:
            yield row.place, found


def held_out_prompts(sources: Sequence[PromptSource], held_out: HeldOut, storage: StorageLocation) -> Chosen:
    """Return the prompts kept for evaluation.

    Of each domain that evaluates, the `held_out.samples` distinct prompts whose SHA-256(seed + newline + prompt)
    is smallest, or all where there are fewer.

    Raises:
        StageError: a source can't be read, or too many of its rows are of no use.
    """
    ledgers = {source.name: _ledger(source) for source in sources if source.evaluate}
    found = [
        prompt
        for source in sources
        if source.evaluate
        for prompt in list(_by_hash(source, held_out, storage, ledgers[source.name]).values())[: held_out.samples]
    ]
    return Chosen(found, ledgers)


def training_prompts(sources: Sequence[PromptSource], held_out: HeldOut, storage: StorageLocation) -> Chosen:
    """Return the prompts to train on.

    Of each domain that trains, the first `source.samples` distinct prompts that no domain holds out and no
    earlier domain has.

    Raises:
        StageError: INVALID_DATA, none is left; a source can't be read, or too many of its rows are of no use.
    """
    ledgers = {source.name: _ledger(source) for source in sources}
    ordered = {source.name: _by_hash(source, held_out, storage, ledgers[source.name]) for source in sources}
    taken = {
        rank for source in sources if source.evaluate for rank, _ in list(ordered[source.name])[: held_out.samples]
    }
    found: list[Prompt] = []
    for source in sources:
        if not source.train:
            continue
        chosen = [key for key in ordered[source.name] if key[0] not in taken][: source.samples]
        taken.update(rank for rank, _ in chosen)
        found += [ordered[source.name][key] for key in chosen]
    if not found:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"no prompt is left to train on after {held_out.samples} of each domain were held out: "
            "lower evaluation.samples, or give more data",
        )
    return Chosen(found, ledgers)


def _ledger(source: PromptSource) -> Ledger:
    return Ledger(source.source.uri, source.max_dropped)


def _by_hash(
    source: PromptSource, held_out: HeldOut, storage: StorageLocation, ledger: Ledger
) -> dict[tuple[bytes, str], Prompt]:
    """Return the distinct prompts of a domain by their hash and the template's options, the smallest first.

    What is the same but for its spelling is one prompt: the spelling kept does not depend on the order of the rows.
    """
    found: dict[tuple[bytes, str], Prompt] = {}
    for place, prompt in conversations(source.source, source.prompt_field, storage, ledger):
        key = prompt.rank(held_out.seed), json.dumps(prompt.options, sort_keys=True)
        if key not in found or prompt.spelled < found[key].conversation.spelled:
            found[key] = Prompt(source.name, prompt, place)
    return dict(sorted(found.items()))
