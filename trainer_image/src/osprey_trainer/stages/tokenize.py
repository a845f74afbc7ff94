"""Text to token shards, with the tokenizer of the source LM.

Documents follow each other in the order of the data, each ended by the model's end token. No begin token is written:
a drafter never sees position 0 of a text, so Stage 2 leaves it out too. The text streams: memory holds two batches of
documents, and the disk one shard, since a full one is uploaded at once. Whoever begins again goes on behind the last of
these: the text is read from its beginning, which is quick, but tokenized from there on. The bytes are the same.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import cast

from osprey_api.stages import StorageLocation, TokenizeConfig, TokenizeResult
from osprey_runtime.context import StageContext, stopped
from osprey_runtime.data import Ledger, documents, ledger
from osprey_runtime.parts import Parts
from osprey_trainer.data.shards import End, ShardWriter, shard_bytes, shard_names
from osprey_trainer.data.tokenizer import DocumentTokenizer, grouped

_STOP_EVERY = 10_000
"""Documents that are passed over between two looks at whether to stop."""


def run(ctx: StageContext) -> TokenizeResult:
    """Writes the shards and their index, and what became of the rows.

    Raises:
        StageError: INVALID_DATA for too many rows without text, for none with it, or for data that is not what was
            resolved; UNSUPPORTED_MODEL if the tokenizer cannot be used.
    """
    config = cast(TokenizeConfig, ctx.config)
    tokenizer = DocumentTokenizer.load(ctx.model(config.tokenizer, weights=False))
    shards, begin = ctx.patiently(lambda: _finished(ctx.parts, shard_bytes(tokenizer.size)))

    def upload(shard: Path, end: Path) -> None:
        for path in (end, shard):  # in this order: a shard that counts has an end
            ctx.patiently(partial(ctx.parts.add, path, path.name))
            path.unlink()

    writer = ShardWriter(
        ctx.output,
        vocab_size=tokenizer.size,
        document_separator_id=tokenizer.end_id,
        full=upload,
        shards=shards,
        begin=begin,
    )
    ledgers = [Ledger(text.source.uri, text.max_dropped) for text in config.data]
    texts = _after(begin.documents, _documents(config, ctx.task.storage, ledgers), ctx.stop)
    done, before = begin.documents, writer.tokens
    began = time.monotonic()
    with closing(writer):
        for batch in _ahead(grouped(texts)):
            if ctx.stop.is_set():
                raise stopped()
            writer.append(tokenizer.encode(batch))
            done += len(batch)
            ctx.progress.update(done, tokens_per_second=(writer.tokens - before) / (time.monotonic() - began))
        index = writer.finish()
    ledger.write(ctx.output, sources=ledgers)
    counts = ledger.total(ledgers)
    return TokenizeResult(rows=index.rows, tokens=index.tokens, rows_read=counts.read, dropped=counts.dropped)


def _finished(parts: Parts, size: int) -> tuple[int, End]:
    """How many full shards are stored, from the first on, and where the last of them ends."""
    found = parts.found()
    number, end = 0, End()
    while True:
        shard, says_where = (found.get(name) for name in shard_names(number))
        if shard is None or says_where is None or shard.size != size:
            return number, end
        number, end = number + 1, End(**json.loads(parts.read(says_where)))


def _documents(config: TokenizeConfig, storage: StorageLocation, ledgers: Sequence[Ledger]) -> Iterator[str]:
    for text, account in zip(config.data, ledgers, strict=True):
        yield from documents(text.source, text.text_field, storage, account)


def _after(count: int, texts: Iterator[str], stop: threading.Event) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number >= count:
            yield text
        elif number % _STOP_EVERY == 0 and stop.is_set():
            raise stopped()


def _ahead(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """Reads the next batch while the last one is tokenized, which leaves Python's lock to others."""
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch
