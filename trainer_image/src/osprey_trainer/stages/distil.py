"""Stage 4: the training-time-test unroll against the frozen target, on answers that the target gave itself.

The result is a drafter in the published format, which SGLang serves. Its tensors are fp32, so that another stage can
go on from it without loss; its config names the target's dtype, to which the server casts them. `training.json` beside
it says what it was trained on.

A dialogue longer than `sequence_length` loses the end of its answer; one whose prompt leaves no room for a draftable
token is dropped. Both are counted, in the log and in `training.json`.
"""

import heapq
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch

from osprey_api.conditions import FailureReason
from osprey_api.stages import DistilConfig, DistilResult, InputRole
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_trainer import memory
from osprey_trainer.acceptance import simulate, summarise
from osprey_trainer.data.answers import Dialogue, fit, read_dialogues
from osprey_trainer.data.dialogues import DialogueBatches
from osprey_trainer.data.states import StreamedTeacher
from osprey_trainer.data.teacher import OnlineTeacher, SharedTeacher, Teacher, alike_in_length, answers_are_greedy
from osprey_trainer.losses.divergence import Divergence, Kind
from osprey_trainer.models.draft import Arrangement, Drafter, text_config
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.target import Target, check_shares
from osprey_trainer.objectives import Distillation
from osprey_trainer.teacher_head import TeacherHead
from osprey_trainer.training import from_rank_0, process_group, run_loop, split_of, write_report

log = logging.getLogger(__name__)

_SAMPLE = 16
"""Dialogues on which the acceptance length is simulated during training."""
_FINAL_SAMPLE = 64
"""And at the end."""
_SIMULATIONS = 20
_LEAST_STEPS = 10
"""At most so many simulations in a run, at least so many steps apart: they should not slow it down."""


def run(ctx: StageContext) -> DistilResult:
    """Writes the trained drafter.

    Raises:
        StageError: INVALID_DATA if no answer has a draftable token; INVALID_CONFIG if drafter and target do not
            belong together, or the batch cannot be shared by the processes; OUT_OF_DISK; DIVERGED;
            STOPPED, with a checkpoint saved.
    """
    config = cast(DistilConfig, ctx.config)
    optimization = config.optimization
    split = split_of(ctx, optimization)
    drafter = Drafter.load(ctx.input(InputRole.DRAFTER))
    dialogues, counts = fit(
        read_dialogues(ctx.input(InputRole.ANSWERS), vocab_size=drafter.config.vocab_size),
        sequence_length=optimization.sequence_length,
    )
    draftable = _draftable_tokens(dialogues, drafter)
    log.info("dialogues: %s; draftable tokens in the draft vocabulary %d", counts, draftable)
    if config.teacher == "Online":
        folder = ctx.model(config.target, weights=False)
        text = text_config(read_config(folder))
        _check_sizes(drafter, text["vocab_size"], text["hidden_size"])
        check_shares(folder, ctx.task.execution.teacher_tensor_parallel)
    with process_group(ctx, optimization.precision, muon=optimization.muon_scale is not None) as device:
        _check_memory(ctx, config, drafter, dialogues, device)
        teacher, head = _teacher(ctx, config, drafter, dialogues, device)
        objective = Distillation(
            drafter,
            head,
            step_weights=config.loss_weights,
            divergence=Divergence(Kind(config.loss), lk_decay=config.lk_decay, hard=config.hard_label_weight),
            train_embedding=_trains_embedding(drafter, config),
        )
        sample = _spread(dialogues, _SAMPLE)
        steps = math.ceil(config.epochs * len(dialogues) / optimization.global_batch_size)

        def acceptance(step: int, metrics: Mapping[str, float]) -> float | None:
            # With ZeRO 3 no rank has the whole drafter.
            if ctx.task.execution.zero_stage == 3 or _is_shared(ctx, config):
                return metrics.get("acceptance_length")
            due = step % max(_LEAST_STEPS, steps // _SIMULATIONS) == 0
            return _acceptance_length(drafter, teacher, sample, config, device) if due else None

        trained = run_loop(
            ctx,
            objective,
            DialogueBatches(dialogues, teacher, split=split, seed=optimization.seed),
            optimization=optimization,
            steps=steps,
            accumulation=split.accumulation,
            acceptance=acceptance,
        )
        acceptance_length = 0.0
        final_sample = _spread(dialogues, _FINAL_SAMPLE)
        if ctx.rank and _is_shared(ctx, config):
            for batch in alike_in_length(final_sample):
                teacher.batch(batch)  # with rank 0
        if ctx.rank == 0:
            drafter = Drafter(drafter.config).to(device)
            drafter.load_state_dict(trained.result.weights)
            acceptance_length = _acceptance_length(drafter, teacher, final_sample, config, device)
            drafter.save(ctx.output)
            write_report(
                ctx,
                trained,
                dialogues=asdict(counts),
                draftable_tokens_in_draft_vocabulary=draftable,
                simulated_acceptance_length=acceptance_length,
            )
        acceptance_length = from_rank_0(acceptance_length)
    return DistilResult(
        steps=trained.result.steps,
        supervised_tokens=trained.result.tokens,
        first_loss=trained.first_loss,
        final_loss=trained.final_loss,
        simulated_acceptance_length=acceptance_length,
    )


def _trains_embedding(drafter: Drafter, config: DistilConfig) -> bool:
    """An EAGLE-3 drafter keeps the target's embedding: SGLang gives it the target's when it loads it."""
    return drafter.config.arrangement is Arrangement.OSPREY and not config.freeze_embedding


def _dtype(config: DistilConfig) -> torch.dtype:
    """Of the target."""
    return torch.bfloat16 if config.optimization.precision == "BF16" else torch.float32


def _draftable_tokens(dialogues: Sequence[Dialogue], drafter: Drafter) -> int:
    expressible = drafter.t2d.numpy()
    draftable = sum(int(expressible[dialogue.answer_ids[1:]].sum()) for dialogue in dialogues)
    if draftable == 0:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"None of the {len(dialogues)} answers has a token of the drafter's vocabulary "
            f"({drafter.config.draft_vocab_size} tokens): convert the drafter with these answers.",
        )
    return draftable


def _check_sizes(drafter: Drafter, vocab_size: int, hidden_size: int) -> None:
    wanted = (drafter.config.vocab_size, drafter.config.target_hidden_size)
    if (vocab_size, hidden_size) != wanted:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"The drafter was made for a target with {wanted[0]} tokens and hidden size {wanted[1]}, but this target "
            f"has {vocab_size} and {hidden_size}: convert a drafter for this target.",
        )


def _is_shared(ctx: StageContext, config: DistilConfig) -> bool:
    """Whether ranks run the target together, so that it never runs for one of them alone."""
    return config.teacher == "Online" and ctx.task.execution.teacher_tensor_parallel > 1


def _check_memory(
    ctx: StageContext, config: DistilConfig, drafter: Drafter, dialogues: Sequence[Dialogue], device: torch.device
) -> None:
    """Before the target is loaded, which may take minutes. Every rank calls it; rank 0 counts, and speaks for all.

    Raises:
        StageError: INVALID_CONFIG, on all ranks.
    """
    # Fetched by each pod at the same time: none should wait for rank 0's before it begins.
    folder = ctx.model(config.target) if config.teacher == "Online" else None
    refusal = None
    if ctx.rank == 0:
        try:
            _count_memory(ctx, config, drafter, dialogues, device, folder=folder)
        except StageError as error:
            refusal = error
    refusal = from_rank_0(refusal)
    if refusal is not None:
        raise refusal


def _count_memory(
    ctx: StageContext,
    config: DistilConfig,
    drafter: Drafter,
    dialogues: Sequence[Dialogue],
    device: torch.device,
    *,
    folder: Path | None,
) -> None:
    """folder: of the target, where it teaches online."""
    execution = ctx.task.execution
    split = split_of(ctx, config.optimization)
    together = math.ceil(split.global_batch_size / split.world_size / split.accumulation)
    target = 0
    if folder is not None:
        # Groups that share the target divide its weights once more.
        processes = ctx.world_size if execution.teacher_tensor_parallel > 1 else 1
        target = memory.target_bytes(folder, _dtype(config), processes=processes)
    of_drafter = memory.drafter_bytes(
        drafter.config,
        trains_embedding=_trains_embedding(drafter, config),
        muon=config.optimization.muon_scale is not None,
        zero_stage=execution.zero_stage,
        world_size=ctx.world_size,
    )

    def unrolled(batch: Sequence[Dialogue]) -> int:
        return memory.unroll_bytes(
            drafter.config,
            tokens=[len(dialogue) for dialogue in batch],
            rows=[len(dialogue.answer_ids) - 1 for dialogue in batch],
            steps=config.unroll,
            bf16=config.optimization.precision == "BF16",
            device=device,
        )

    # Prompts are run once, and answers once for each step. A batch may well hold all of the longest.
    sizes = (len, lambda one: len(one.answer_ids))
    candidates = [heapq.nlargest(together, dialogues, key=size) for size in sizes]
    needed, worst = max(((unrolled(batch), batch) for batch in candidates), key=lambda pair: pair[0])
    sharing = 1 if device.type == "cuda" else execution.processes_per_node
    memory.check(
        memory.Need(target, of_drafter, needed),
        tokens=max(map(len, worst)),
        available=memory.device_bytes(device) // sharing,
    )


def _teacher(
    ctx: StageContext, config: DistilConfig, drafter: Drafter, dialogues: Sequence[Dialogue], device: torch.device
) -> tuple[Teacher, TeacherHead]:
    """Returns what adds the target's states to dialogues, and the target's head."""
    layers = drafter.config.tapped_layers
    if config.teacher == "Captured":
        remote = ctx.remote_input(InputRole.STATES)
        captured = StreamedTeacher(remote, dialogues, ctx.scratch / f"states-{ctx.rank}", ctx.patiently)
        _check_sizes(drafter, *captured.head.weight.shape)
        if layers is not None and captured.index.tapped_layers != layers:
            raise StageError(
                FailureReason.INVALID_CONFIG,
                f"The drafter taps layers {list(layers)} of the target, and the states are of layers "
                f"{list(captured.index.tapped_layers)}: set distillation.teacher.mode to Online.",
            )
        return captured, captured.head
    sharers = ctx.task.execution.teacher_tensor_parallel
    target = Target(
        ctx.model(config.target), tapped_layers=layers, dtype=_dtype(config), device=device, tensor_parallel=sharers
    )
    greedy = answers_are_greedy(ctx.remote_input(InputRole.ANSWERS).manifest)
    if _is_shared(ctx, config):
        return SharedTeacher(target, greedy=greedy, device=device, tensor_parallel=sharers), target.head
    return OnlineTeacher(target, greedy=greedy, device=device), target.head


def _spread(dialogues: Sequence[Dialogue], count: int) -> list[Dialogue]:
    """At most `count` dialogues, evenly spread over all of them, so over the domains too."""
    return [dialogues[i * len(dialogues) // count] for i in range(count)] if len(dialogues) > count else list(dialogues)


def _acceptance_length(
    drafter: Drafter, teacher: Teacher, sample: Sequence[Dialogue], config: DistilConfig, device: torch.device
) -> float:
    """Mean over dialogues of tokens per verify step. Every one has a verify step: `fit` saw to that."""
    bf16 = config.optimization.precision == "BF16"
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        requests = [
            request
            for batch in alike_in_length(sample)
            for request in simulate(drafter, teacher.batch(batch).to(device), steps=config.unroll)
        ]
    return summarise(requests).per_request or 0.0
