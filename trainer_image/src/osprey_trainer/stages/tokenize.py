"""Text to token shards, with the tokenizer of the source LM.

Documents follow each other in the order of the data, each ended by the model's end token. No begin token is written:
a drafter never sees position 0 of a text, so Stage 2 leaves it out too. The text streams: memory holds one batch of
documents.
"""

import time
from collections.abc import Iterator
from typing import cast

from osprey_api.conditions import FailureReason
from osprey_api.stages import StorageLocation, TokenizeConfig, TokenizeResult
from osprey_runtime.context import StageContext
from osprey_runtime.data import rows
from osprey_runtime.errors import StageError
from osprey_trainer.data.shards import ShardWriter
from osprey_trainer.data.tokenizer import DocumentTokenizer

_BATCH_CHARACTERS = 2_000_000
"""Enough to keep all cores busy; about 20 MB with its tokens."""


def run(ctx: StageContext) -> TokenizeResult:
    """Writes the shards and their index.

    Raises:
        StageError: INVALID_DATA for a row without the field, for no text at all, or for data that is not what was
            resolved; UNSUPPORTED_MODEL if the tokenizer cannot be used.
    """
    config = cast(TokenizeConfig, ctx.config)
    tokenizer = DocumentTokenizer.load(ctx.model(config.tokenizer, weights=False))
    writer = ShardWriter(ctx.output, vocab_size=tokenizer.size, document_separator_id=tokenizer.end_id)
    began = time.monotonic()
    done = 0
    for batch in _batches(_documents(config, ctx.task.storage)):
        if ctx.stop.is_set():
            raise StageError(FailureReason.STOPPED, "tokenize was stopped; it starts from the beginning next time")
        writer.append(tokenizer.encode(batch))
        done += len(batch)
        ctx.progress.update(done, tokens_per_second=writer.tokens / (time.monotonic() - began))
    if not done:
        uris = ", ".join(text.source.uri for text in config.data)
        raise StageError(FailureReason.INVALID_DATA, f"{uris}: no row has text: give data with text to train on")
    index = writer.finish()
    return TokenizeResult(rows=index.rows, tokens=index.tokens)


def _documents(config: TokenizeConfig, storage: StorageLocation) -> Iterator[str]:
    for text in config.data:
        for row in rows(text.source, storage):
            document = row.text(text.text_field)
            if document:
                yield document


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
