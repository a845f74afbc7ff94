"""The target's states of all answers, computed once: every drafter of these answers learns from them.

Shards go to the storage one by one, so that neither the pod's disk must hold all of it nor a lost pod costs more than
the shard at hand. What a shard holds does not depend on the number of processes.
"""

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from osprey_api.conditions import FailureReason
from osprey_api.stages import CaptureConfig, CaptureResult, InputRole
from osprey_runtime.context import StageContext, stopped
from osprey_runtime.errors import StageError
from osprey_trainer.data.answers import Dialogue, fit, read_dialogues
from osprey_trainer.data.states import ShardWriter, StatesIndex, shard_names, shards_of
from osprey_trainer.data.teacher import alike_in_length, answers_are_greedy
from osprey_trainer.models.draft import text_config
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.target import Target, TargetStates, default_tapped_layers
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
    text = text_config(read_config(ctx.model(config.target, weights=False)))
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
    shards = shards_of(dialogues, index.token_bytes)
    sharers = ctx.task.execution.teacher_tensor_parallel
    with process_group(ctx, config.precision) as device:
        found = from_rank_0(ctx.parts.found() if ctx.rank == 0 else {})
        missing = [number for number in range(len(shards)) if not found.keys() >= set(shard_names(number))]
        # Ranks that share the target compute the same shards, and the first of them keeps these.
        groups = ctx.world_size // sharers
        work = [{number: shards[number] for number in missing[group::groups]} for group in range(groups)]
        mine = work[ctx.rank // sharers]
        if mine or ctx.rank == 0 or sharers > 1:
            target = Target(
                ctx.model(config.target),
                tapped_layers=layers,
                dtype=index.torch_dtype,
                device=device,
                tensor_parallel=sharers,
            )
            batches = _capture(ctx, target, mine, index, device, keep=ctx.rank % sharers == 0)
            if sharers > 1:  # several groups divide the weights once more, so all must run equally often
                _keep_running(target, max(map(_batches, work)) - batches, device)
            if ctx.rank == 0:
                index.write(ctx.output, target.head, shards=len(shards))
        dist.barrier()  # rank 0 publishes what all have captured
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


def _capture(
    ctx: StageContext,
    target: Target,
    shards: Mapping[int, Sequence[Dialogue]],
    index: StatesIndex,
    device: torch.device,
    *,
    keep: bool,
) -> int:
    """Computes shards, and returns how many batches that were. keep: this process uploads them."""
    ctx.progress.begin(sum(map(len, shards.values())))
    done = tokens = batches = 0
    began = time.monotonic()
    for number, dialogues in shards.items():
        shard, blocks = (ctx.scratch / name for name in shard_names(number))
        if keep:
            _check_disk(ctx.scratch, dialogues, index)
        writer = ShardWriter(shard, dialogues, index) if keep else None
        for members in alike_in_length(dialogues):
            if ctx.stop.is_set():
                raise stopped()
            ids = pad_sequence([dialogue.ids for dialogue in members], batch_first=True).to(device)
            states = target.states(ids)
            greedy = None if index.greedy else target.greedy_tokens(states.last_hidden)
            for row, dialogue in enumerate(members):
                if writer:
                    one = TargetStates(states.taps[row], states.last_hidden[row])
                    writer.put(dialogue, one, None if greedy is None else greedy[row])
                tokens += len(dialogue)
            done += len(members)
            batches += 1
            ctx.progress.update(done, tokens_per_second=tokens / (time.monotonic() - began))
        if writer:
            writer.finish(blocks)
            for path in (shard, blocks):
                ctx.parts.add(path, path.name)
                path.unlink()
    return batches


def _batches(shards: Mapping[int, Sequence[Dialogue]]) -> int:
    return sum(1 for dialogues in shards.values() for _ in alike_in_length(dialogues))


def _keep_running(target: Target, times: int, device: torch.device) -> None:
    for _ in range(times):
        target.states(torch.zeros(1, 1, dtype=torch.long, device=device))


def _check_disk(scratch: Path, dialogues: Sequence[Dialogue], index: StatesIndex) -> None:
    needed = sum(map(len, dialogues)) * index.token_bytes
    free = shutil.disk_usage(scratch).free
    if needed > free:
        raise StageError(
            FailureReason.OUT_OF_DISK,
            f"A shard of the target's captured states needs {needed / _GIB:.1f} GiB for each process, but the scratch "
            f"volume has {free / _GIB:.1f} GiB left: give the pod a larger one.",
        )
