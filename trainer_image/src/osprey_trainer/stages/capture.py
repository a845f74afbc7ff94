"""The target's states of all answers, computed once: every drafter of these answers learns from them.

Shards go to the storage one by one, so that neither the pod's disk must hold all of it nor a lost pod costs more than
the shard at hand. What a shard holds does not depend on the number of processes.
"""

import logging
import shutil
import time
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from osprey_api.conditions import FailureReason
from osprey_api.stages import CaptureConfig, CaptureResult, InputRole
from osprey_runtime.context import StageContext, stopped
from osprey_runtime.errors import StageError
from osprey_trainer.data.answers import Dialogue, fit, read_dialogues
from osprey_trainer.data.states import ShardWriter, StatesIndex, shard_name, shards_of
from osprey_trainer.data.teacher import alike_in_length, answers_are_greedy
from osprey_trainer.models.draft import text_config
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.target import Target, TargetStates, check_shares, default_tapped_layers
from osprey_trainer.training import from_rank_0, process_group

log = logging.getLogger(__name__)

_GIB = 1 << 30
_TEN_GBIT = 1.25e9
"""Bytes per second."""


def run(ctx: StageContext) -> CaptureResult:
    """Writes the states.

    Raises:
        StageError: INVALID_DATA if no answer has a draftable token; INVALID_CONFIG if the states would take more room
            than the user allows; OUT_OF_DISK; STOPPED, the finished shards kept.
    """
    config = cast(CaptureConfig, ctx.config)
    folder = ctx.model(config.target, weights=False)
    text = text_config(read_config(folder))
    dialogues, counts = fit(
        read_dialogues(ctx.input(InputRole.ANSWERS), vocab_size=text["vocab_size"]),
        sequence_length=config.sequence_length,
    )
    log.info("dialogues: %s", counts)
    tokens = sum(map(len, dialogues))
    layers = default_tapped_layers(text["num_hidden_layers"])
    index = StatesIndex(
        dtype="bfloat16" if config.precision == "BF16" else "float32",
        hidden_size=text["hidden_size"],
        tapped_layers=layers,
        greedy=answers_are_greedy(ctx.remote_input(InputRole.ANSWERS).manifest),
    )
    check_room(len(dialogues), tokens, index.token_bytes, gib_limit=ctx.task.execution.captured_gib_limit)
    execution = ctx.task.execution
    sharers = execution.teacher_tensor_parallel
    check_shares(folder, sharers)
    shards = shards_of(dialogues, index.token_bytes, shard_bytes=execution.captured_shard_bytes)
    with process_group(ctx, config.precision) as device:
        found = from_rank_0(ctx.patiently(ctx.parts.found) if ctx.rank == 0 else {})
        missing = [number for number in range(len(shards)) if shard_name(number) not in found]
        # Ranks that share the target compute the same shard, and the first of them keeps it.
        groups = ctx.world_size // sharers
        rounds = [missing[first : first + groups] for first in range(0, len(missing), groups)]
        target = None
        if ctx.rank == 0 or sharers > 1 or ctx.rank < len(missing):
            target = Target(
                ctx.model(config.target),
                tapped_layers=layers,
                dtype=index.torch_dtype,
                device=device,
                tensor_parallel=sharers,
            )
        _Capture(ctx, target, shards, index, device).run(rounds)
        if target is not None and ctx.rank == 0:
            index.write(ctx.output, target.head, shards=len(shards))
    return CaptureResult(dialogues=len(dialogues), tokens=tokens, size_bytes=tokens * index.token_bytes)


def check_room(dialogues: int, tokens: int, token_bytes: int, *, gib_limit: int) -> None:
    """Says before anything is computed what the states will take.

    Raises:
        StageError: INVALID_CONFIG if that is more than `gib_limit`.
    """
    size = tokens * token_bytes
    hours = size / _TEN_GBIT / 3600
    takes = (
        f"the target's states of {dialogues} dialogues, {tokens} tokens of {token_bytes} bytes, take "
        f"{size / _GIB:.1f} GiB; to read them, once in every epoch of every drafter, takes {hours:.1f} h at 10 Gbit/s"
    )
    log.info("%s", takes)
    if size > gib_limit * _GIB:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"{takes[0].upper()}{takes[1:]}. That is above the limit of {gib_limit} GiB: set distillation.teacher.mode "
            "to Online, give fewer samples or a smaller distillation.sequenceLength, or raise "
            "distillation.teacher.maxStorageGiB.",
        )


class _Capture:
    """The shards that are missing, one for each group of ranks in a round."""

    def __init__(
        self,
        ctx: StageContext,
        target: Target | None,
        shards: Sequence[Sequence[Dialogue]],
        index: StatesIndex,
        device: torch.device,
    ) -> None:
        self._ctx, self._target, self._shards, self._index, self._device = ctx, target, shards, index, device
        self._sharers = ctx.task.execution.teacher_tensor_parallel
        self._began = time.monotonic()
        self._dialogues = self._tokens = 0

    def run(self, rounds: Sequence[Sequence[int]]) -> None:
        """Computes them. Every rank calls it; after each round all of them agree to go on, or stop together.

        So when it returns, the shards of all ranks are uploaded, and rank 0 may publish.
        """
        ctx = self._ctx
        group = ctx.rank // self._sharers
        ctx.progress.begin(sum(len(self._shards[number]) for numbers in rounds for number in numbers))
        for numbers in rounds:
            done = self._shard(numbers[group], others=len(numbers)) if group < len(numbers) else 0
            if self._sharers > 1 and self._target is not None:
                # Several groups divide the weights once more, so all must run equally often.
                most = max(sum(1 for _ in alike_in_length(self._shards[number])) for number in numbers)
                for _ in range(most - done):
                    self._target.states(torch.zeros(1, 1, dtype=torch.long, device=self._device))
            stops = torch.tensor([float(ctx.stop.is_set())], device=self._device)
            dist.all_reduce(stops)
            if stops.item():
                raise stopped()
            self._dialogues += sum(len(self._shards[number]) for number in numbers)
            self._tokens += sum(len(dialogue) for number in numbers for dialogue in self._shards[number])

    def _shard(self, number: int, *, others: int) -> int:
        """Computes and uploads one shard, and returns in how many batches. others: shards of this round."""
        ctx, index = self._ctx, self._index
        if self._target is None:
            raise ValueError("a rank with a shard to compute needs the target")
        keep = ctx.rank % self._sharers == 0
        dialogues, path = self._shards[number], ctx.scratch / shard_name(number)
        if keep:
            _check_disk(ctx, dialogues, index)
        writer = ShardWriter(path, dialogues, index) if keep else None
        batches = done = tokens = 0
        for members in alike_in_length(dialogues):
            if ctx.stop.is_set() and self._sharers == 1:
                return batches  # unfinished: `run` stops all ranks
            ids = pad_sequence([dialogue.ids for dialogue in members], batch_first=True).to(self._device)
            states = self._target.states(ids)
            greedy = None if index.greedy else self._target.greedy_tokens(states.last_hidden)
            for row, dialogue in enumerate(members):
                if writer:
                    one = TargetStates(states.taps[row], states.last_hidden[row])
                    writer.put(dialogue, one, None if greedy is None else greedy[row])
            batches += 1
            done += len(members)
            tokens += sum(map(len, members))
            ctx.progress.update(
                self._dialogues + done * others,
                tokens_per_second=(self._tokens + tokens * others) / (time.monotonic() - self._began),
            )
        if writer:
            writer.finish()
            ctx.patiently(lambda: ctx.parts.add(path, path.name))
            path.unlink()
        return batches


def _check_disk(ctx: StageContext, dialogues: Sequence[Dialogue], index: StatesIndex) -> None:
    processes = ctx.task.execution.processes_per_node
    needed = sum(map(len, dialogues)) * index.token_bytes * processes
    free = shutil.disk_usage(ctx.scratch).free
    if needed > free:
        raise StageError(
            FailureReason.OUT_OF_DISK,
            f"Shards of the target's captured states need {needed / _GIB:.1f} GiB for {processes} processes, but the "
            f"scratch volume has {free / _GIB:.1f} GiB left: give the pod a larger one.",
        )
