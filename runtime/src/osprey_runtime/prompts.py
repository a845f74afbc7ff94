"""Which prompts train and which are held out: chosen by content, so that no prompt is on both sides."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from osprey_api.conditions import FailureReason
from osprey_api.stages import HeldOut, PromptSource, StorageLocation
from osprey_runtime.data import rows
from osprey_runtime.errors import StageError

log = logging.getLogger("osprey_runtime")


@dataclass(frozen=True)
class Prompt:
    """A user's message."""

    domain: str
    text: str


def held_out_prompts(sources: Sequence[PromptSource], held_out: HeldOut, storage: StorageLocation) -> list[Prompt]:
    """Return the prompts kept for evaluation: per domain in the order of `sources`, within it by hash.

    Of each domain that evaluates, the `held_out.samples` distinct prompts whose SHA-256(seed + newline + prompt)
    is smallest, or all where there are fewer.

    Raises:
        StageError: a source can't be read, or a row has no such text.
    """
    return [
        Prompt(source.name, text)
        for source in sources
        if source.evaluate
        for text in _by_hash(source, held_out, storage)[: held_out.samples]
    ]


def training_prompts(sources: Sequence[PromptSource], held_out: HeldOut, storage: StorageLocation) -> list[Prompt]:
    """Return the prompts to train on: per domain in the order of `sources`, within it by hash.

    Of each domain that trains, the first `source.samples` distinct prompts that no domain holds out and no
    earlier domain has.

    Raises:
        StageError: INVALID_DATA, none is left; a source can't be read, or a row has no such text.
    """
    ordered = {source.name: _by_hash(source, held_out, storage) for source in sources}
    taken = {text for source in sources if source.evaluate for text in ordered[source.name][: held_out.samples]}
    found: list[Prompt] = []
    for source in sources:
        if not source.train:
            continue
        texts = [text for text in ordered[source.name] if text not in taken][: source.samples]
        taken.update(texts)
        found += [Prompt(source.name, text) for text in texts]
    if not found:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"no prompt is left to train on after {held_out.samples} of each domain were held out: "
            "lower evaluation.samples, or give more data",
        )
    return found


def _by_hash(source: PromptSource, held_out: HeldOut, storage: StorageLocation) -> list[str]:
    """Return the distinct prompts of a domain, smallest hash first. Blank ones are left out, and counted in the log."""
    texts: set[str] = set()
    blank = 0
    for row in rows(source.source, storage):
        text = row.text(source.prompt_field)
        if text.strip():
            texts.add(text)
        else:
            blank += 1
    if blank:
        log.warning("%s: %d blank prompts left out", source.source.uri, blank)
    return sorted(texts, key=lambda text: hashlib.sha256(f"{held_out.seed}\n{text}".encode()).digest())
