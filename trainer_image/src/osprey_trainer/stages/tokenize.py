"""Text to token shards, with the tokenizer of the source LM.

Documents follow each other in the order of the data, each ended by the model's end token. No begin token is written:
a drafter never sees position 0 of a text, so Stage 2 leaves it out too. The text streams: memory holds one batch of
documents.
"""

import time
from collections.abc import Iterator, Sequence
from typing import cast

from osprey_api.conditions import FailureReason
from osprey_api.stages import StorageLocation, TokenizeConfig, TokenizeResult
from osprey_runtime.context import StageContext
from osprey_runtime.data import Ledger, documents, ledger
from osprey_runtime.errors import StageError
from osprey_trainer.data.shards import ShardWriter
from osprey_trainer.data.tokenizer import DocumentTokenizer

_BATCH_CHARACTERS = 2_000_000
"""Enough to keep all cores busy; about 20 MB with its tokens."""


def run(ctx: StageContext) -> TokenizeResult:
    """Writes the shards and their index, and what became of the rows.

    Raises:
        StageError: INVALID_DATA for too many rows without text, for none with it, or for data that is not what was
            resolved; UNSUPPORTED_MODEL if the tokenizer cannot be used.
    """
    config = cast(TokenizeConfig, ctx.config)
    tokenizer = DocumentTokenizer.load(ctx.model(config.tokenizer, weights=False))
    writer = ShardWriter(ctx.output, vocab_size=tokenizer.size, document_separator_id=tokenizer.end_id)
    began = time.monotonic()
    done = 0
    ledgers = [Ledger(text.source.uri, text.max_dropped) for text in config.data]
    for batch in _batches(_documents(config, ctx.task.storage, ledgers)):
        if ctx.stop.is_set():
            raise StageError(FailureReason.STOPPED, "tokenize was stopped; it starts from the beginning next time")
        writer.append(tokenizer.encode(batch))
        done += len(batch)
        ctx.progress.update(done, tokens_per_second=writer.tokens / (time.monotonic() - began))
    index = writer.finish()
    ledger.write(ctx.output, sources=ledgers)
    counts = ledger.total(ledgers)
    return TokenizeResult(rows=index.rows, tokens=index.tokens, rows_read=counts.read, dropped=counts.dropped)


def _documents(config: TokenizeConfig, storage: StorageLocation, ledgers: Sequence[Ledger]) -> Iterator[str]:
    for text, account in zip(config.data, ledgers, strict=True):
        yield from documents(text.source, text.text_field, storage, account)


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
