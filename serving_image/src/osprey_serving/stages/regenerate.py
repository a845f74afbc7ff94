"""The target answers the training prompts, so that the drafter learns the target's own words."""

import asyncio
import itertools
import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_api.rows import DropReason
from osprey_api.stages import RegenerateConfig, RegenerateResult
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.context import StageContext
from osprey_runtime.data import DropError, Ledger, ledger
from osprey_runtime.errors import StageError
from osprey_runtime.prompts import Prompt, training_prompts
from osprey_serving import target
from osprey_serving.chat import Chat
from osprey_serving.client import Client, Completion, Connection, Request, ServerFacts

CONVERSATIONS_PER_FILE = 10_000
SAVES = 32
"""Each checkpoint holds all answers so far, so there are at most this many of them."""

log = logging.getLogger("osprey_serving")


def run(context: StageContext, connection: Connection) -> RegenerateResult:
    """Ask a server for the answer to every training prompt; write answers-00000.jsonl, ….

    The answers lie in the order of the prompts. A stage that was stopped, or whose server failed, goes on where its
    last checkpoint ends.

    Raises:
        StageError: INVALID_CONFIG: the server has a drafter; INVALID_DATA: no prompt of a domain can be asked, or the
            chat template refuses too many; what the client and the prompts raise.
    """
    config = context.task.config
    if not isinstance(config, RegenerateConfig):
        raise TypeError(f"regenerate was given the config of {config.stage}")
    chosen = training_prompts(config.prompts, config.held_out, context.task.storage)
    prompts = chosen.prompts
    asked = {source.name: Ledger(source.source.uri, source.max_dropped) for source in config.prompts if source.train}
    answers = FinishedAnswers(
        context.scratch / "answers",
        context.checkpoints,
        save_every=max(context.task.execution.checkpoint_every_steps, len(prompts) // SAVES),
    )
    try:
        speed = asyncio.run(_ask(context, config, connection, prompts, answers, asked=asked))
    except StageError:
        answers.save()
        raise
    conversations, tokens, cut = _write(context.output, prompts, answers)
    ledger.write(context.output, sources=chosen.ledgers.values(), asked=asked.values())
    rows, unasked = ledger.total(chosen.ledgers.values()), ledger.total(asked.values()).dropped
    return RegenerateResult(
        prompts=conversations,
        answer_tokens=tokens,
        cut_at_limit=cut,
        skipped=unasked.get(DropReason.TOO_LONG, 0),
        refused=unasked.get(DropReason.TEMPLATE_REFUSED, 0),
        tokens_per_second=speed,
        rows_read=rows.read,
        rows_kept=rows.kept,
        dropped=rows.dropped,
    )


async def _ask(
    context: StageContext,
    config: RegenerateConfig,
    connection: Connection,
    prompts: list[Prompt],
    answers: "FinishedAnswers",
    *,
    asked: dict[str, Ledger],
) -> float:
    """Ask for the answers that are not there yet, and return tokens per second; `asked` counts the prompts."""
    chat = Chat(target.folder(context, config.target))
    tokens = 0
    async with Client(connection, context.stop) as client:
        await client.wait_ready(connection.start_deadline_s)
        facts = await client.facts()
        if facts.algorithm is not None:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"the server that answers drafts ({facts.algorithm}): remove the --speculative arguments from the "
                "target's serverArgs, since the operator adds those of the drafter",
            )
        askable = _askable(prompts, chat, facts, asked)
        order = [index for index in askable if index not in answers.finished]
        # Domains differ in length: a mixed order keeps the estimate of the time left honest.
        random.Random(config.seed).shuffle(order)
        context.progress.begin(total=len(askable), done=len(answers.finished))
        began = time.monotonic()

        def requests() -> Iterator[tuple[tuple[int, Request], Request]]:
            for index in order:
                # Rendered again when it is its turn: millions of prompts in token ids would fill the memory.
                ids = tuple(chat.render(prompts[index].conversation, facts.template_options))
                limit = min(config.max_tokens, facts.room(ids))
                request = Request(ids, limit, config.temperature, config.seed + index)
                yield (index, request), request

        def take(item: tuple[int, Request], answer: Completion) -> None:
            nonlocal tokens
            index, request = item
            answers.add(index, request.prompt_ids, answer)
            tokens += answer.completion_tokens
            context.progress.update(len(answers.finished), tokens_per_second=tokens / (time.monotonic() - began))

        await client.generate_all(requests(), context.task.execution.concurrency, take)
    return tokens / (time.monotonic() - began)


def _askable(prompts: list[Prompt], chat: Chat, facts: ServerFacts, asked: dict[str, Ledger]) -> list[int]:
    """Return which prompts the target can be asked; the others are counted before the first answer costs anything.

    Raises:
        StageError: INVALID_DATA: the chat template refuses too many of a domain, or none of it can be asked.
    """
    found = []
    for index, prompt in enumerate(prompts):
        account = asked[prompt.domain]
        account.read += 1
        try:
            ids = tuple(chat.render(prompt.conversation, facts.template_options))
        except DropError as error:
            account.drop(error.reason, prompt.place, error.detail)
            continue
        if facts.room(ids):
            found.append(index)
        else:
            account.drop(
                DropReason.TOO_LONG,
                prompt.place,
                f"{len(ids)} tokens leave no room for an answer in the {facts.capacity} of the target's server",
            )
    for account in asked.values():
        account.check()
    return found


class FinishedAnswers:
    """Answers on the disk in the order in which they came, in files that a checkpoint takes as they are."""

    def __init__(self, folder: Path, checkpoints: Checkpoints, save_every: int) -> None:
        """Restore the newest checkpoint, if there is one, into `folder`, which is made anew."""
        self.finished: set[int] = set()
        """Numbers of the prompts that are answered."""
        self._folder = folder
        self._open = folder.with_suffix(".open")
        self._snapshot = folder.with_suffix(".snapshot")
        self._checkpoints = checkpoints
        self._save_every = save_every
        self._unsaved = 0
        self._open.unlink(missing_ok=True)
        for left_over in (folder, self._snapshot):
            shutil.rmtree(left_over, ignore_errors=True)
        folder.mkdir(parents=True)
        if newest := checkpoints.latest():
            checkpoints.restore(newest, folder)
            self.finished = {index for index, _, _ in self._places()}
            log.info("%d answers were there already", len(self.finished))

    def add(self, index: int, prompt_ids: tuple[int, ...], answer: Completion) -> None:
        """Keep an answer; it survives the pod once the next checkpoint is complete."""
        line = {"index": index, "prompt_ids": prompt_ids, "answer_ids": answer.output_ids, "finish": answer.finish}
        with self._open.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.finished.add(index)
        self._unsaved += 1
        if self._unsaved >= self._save_every:
            self._checkpoint()

    def save(self) -> None:
        """Save all answers, and return when the checkpoint is complete."""
        if self._unsaved:
            self._checkpoint()
        self._checkpoints.wait()

    def in_order(self) -> Iterator[dict[str, Any]]:
        """Yield the answers in the order of their prompts, as `add` wrote them."""
        if self._unsaved:
            self._close()
        for _, path, offset in sorted(self._places()):
            with path.open("rb") as file:
                file.seek(offset)
                yield json.loads(file.readline())

    def _checkpoint(self) -> None:
        self._close()
        self._snapshot.mkdir()  # `save` takes the folder that it is given
        for part in self._folder.iterdir():
            (self._snapshot / part.name).hardlink_to(part)
        self._checkpoints.save(self._snapshot, len(self.finished))

    def _close(self) -> None:
        self._open.rename(self._folder / f"part-{len(self.finished):09d}.jsonl")
        self._unsaved = 0

    def _places(self) -> Iterator[tuple[int, Path, int]]:
        for path in sorted(self._folder.glob("part-*.jsonl")):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    yield json.loads(line)["index"], path, offset
                    offset += len(line)


def _write(output: Path, prompts: list[Prompt], answers: FinishedAnswers) -> tuple[int, int, int]:
    """Write the artifact; return conversations, answer tokens, and how many answers were cut."""
    conversations = tokens = cut = 0
    numbered = enumerate(answers.in_order())
    for shard, group in itertools.groupby(numbered, lambda entry: entry[0] // CONVERSATIONS_PER_FILE):
        with (output / f"answers-{shard:05d}.jsonl").open("w", encoding="utf-8") as file:
            for _, answer in group:
                line = {"domain": prompts[answer.pop("index")].domain, **answer}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                conversations += 1
                tokens += len(answer["answer_ids"])
                cut += answer["finish"] == "length"
    return conversations, tokens, cut
