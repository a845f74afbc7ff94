"""Where the target's states come from: here, from the target itself; `states` reads those that were captured."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from osprey_runtime.manifest import Manifest
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.split import MICRO_BATCH_TOKENS
from osprey_trainer.models.target import Target, TargetStates


def answers_are_greedy(answers: Manifest) -> bool:
    """Says whether the next token of an answer is also the target's most likely one; else that one is computed."""
    return isinstance(answers.config, dict) and answers.config.get("temperature") == 0


def alike_in_length(dialogues: Sequence[Dialogue]) -> Iterator[list[Dialogue]]:
    """Yields all dialogues in batches of at most `MICRO_BATCH_TOKENS` with padding, unless one alone is longer."""
    batch: list[Dialogue] = []
    for dialogue in sorted(dialogues, key=len):
        if batch and (len(batch) + 1) * len(dialogue) > MICRO_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(dialogue)
    if batch:
        yield batch


class Teacher(Protocol):
    """Adds the target's states to dialogues."""

    def prepare(self, dialogues: Sequence[Dialogue]) -> None:
        """Is told what `batch` will be asked for next."""

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch."""


class OnlineTeacher:
    """Runs the target on every batch.

    Args:
        greedy: the answers are greedy, so the target's most likely token is the next one; otherwise it is
            computed.
    """

    def __init__(self, target: Target, *, greedy: bool, device: torch.device) -> None:
        self._target = target
        self._greedy = greedy
        self._device = device

    def prepare(self, dialogues: Sequence[Dialogue]) -> None:
        """Does nothing: the target runs where the drafter does."""

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch, on the target's device."""
        # Padded: the layers of some families carry a state along the sequence, which no mask keeps apart.
        ids = pad_sequence([dialogue.ids for dialogue in dialogues], batch_first=True).to(self._device)
        padded = self._target.states(ids)
        states = [
            TargetStates(taps[: len(dialogue)], last_hidden[: len(dialogue)])
            for dialogue, taps, last_hidden in zip(dialogues, padded.taps, padded.last_hidden, strict=True)
        ]
        batch = DialogueBatch.collate(
            ids=[dialogue.ids for dialogue in dialogues],
            answer=[dialogue.answer_mask for dialogue in dialogues],
            states=states,
            names=[dialogue.name for dialogue in dialogues],
        ).to(self._device)
        if self._greedy:
            return batch
        return dataclasses.replace(batch, greedy=self._target.greedy_tokens(batch.states.last_hidden))


class SharedTeacher(OnlineTeacher):
    """Runs a target that several consecutive ranks share, on the batch of each of them in turn.

    All of them must call `batch` equally often.
    """

    def __init__(self, target: Target, *, greedy: bool, device: torch.device, tensor_parallel: int) -> None:
        """tensor_parallel: ranks that share the target. All ranks of the process group must come here together."""
        super().__init__(target, greedy=greedy, device=device)
        self._place = dist.get_rank() % tensor_parallel
        self._group, _ = dist.new_subgroups(group_size=tensor_parallel)
        self._size = tensor_parallel

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Returns the dialogues as one micro-batch, on the target's device."""
        asked: list[Sequence[Dialogue]] = [[]] * self._size
        dist.all_gather_object(asked, list(dialogues), group=self._group)
        own: DialogueBatch | None = None
        for place, each in enumerate(asked):
            batch = super().batch(each)
            if place == self._place:  # nothing else is kept: all of them would fill a GPU
                own = batch
        if own is None:
            raise ValueError("this rank is none of those that share the target")
        return own
