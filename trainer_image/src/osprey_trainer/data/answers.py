"""The target's answers: read, checked, and made to fit the sequence length by a stated policy."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

SHORTEST_ANSWER = 2
"""The target itself makes the first answer token, so the second is the first that a drafter can be asked for."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Dialogue:
    """One prompt and its answer.

    Attributes:
        name: file and line, for reports.
        prompt_ids: [P], the chat template included.
        answer_ids: [A], the end token included when the answer stopped by itself.
    """

    name: str
    domain: str
    prompt_ids: Ids
    answer_ids: Ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def ids(self) -> Tensor:
        """int64 [P + A]."""
        return torch.from_numpy(np.concatenate([self.prompt_ids, self.answer_ids]).astype(np.int64))

    @property
    def answer_mask(self) -> Tensor:
        """Whether a token is of the answer: bool [P + A]."""
        return torch.arange(len(self)) >= len(self.prompt_ids)


@dataclass(frozen=True)
class FitCounts:
    """What became of the dialogues.

    Attributes:
        kept: dialogues to train on.
        truncated: of these, those whose answer was cut at the end to fit.
        too_long: dropped, since the prompt alone leaves no room for a draftable token.
        too_short: dropped, since the answer has no draftable token.
        answer_tokens: of the kept ones.
        draftable_tokens: answer tokens but the first of each dialogue, which the target makes itself.
    """

    kept: int
    truncated: int
    too_long: int
    too_short: int
    answer_tokens: int
    draftable_tokens: int

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(self).items())


def read_dialogues(folder: Path, *, vocab_size: int) -> Iterator[Dialogue]:
    """Yields the dialogues of an answers artifact, in the order of its files and lines.

    Args:
        folder: holds `answers-*.jsonl`.
        vocab_size: V, rows of the target.

    Raises:
        StageError: CORRUPT_ARTIFACT that names file and line.
    """
    for path in sorted(folder.glob("answers-*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                name = f"{path.name}, line {number}"
                try:
                    yield _dialogue(json.loads(line), name, vocab_size)
                except (ValueError, KeyError, TypeError) as error:
                    raise StageError(
                        FailureReason.CORRUPT_ARTIFACT, f"{name} of the answers cannot be read: {error!r}"
                    ) from error


def _dialogue(fields: dict[str, Any], name: str, vocab_size: int) -> Dialogue:
    prompt = np.asarray(fields["prompt_ids"], dtype=np.int32)
    answer = np.asarray(fields["answer_ids"], dtype=np.int32)
    for part in (prompt, answer):
        if part.ndim != 1 or (len(part) and not 0 <= part.min() <= part.max() < vocab_size):
            raise ValueError(f"ids must be a list of numbers from 0 to {vocab_size - 1}")
    if not len(prompt):
        raise ValueError("prompt_ids is empty: nothing asked for the answer")
    return Dialogue(name, fields["domain"], prompt, answer)


def fit(dialogues: Iterator[Dialogue], *, sequence_length: int) -> tuple[list[Dialogue], FitCounts]:
    """Makes dialogues fit: a prompt is never cut, since the server would not; an answer is, at its end.

    Raises:
        StageError: INVALID_DATA if no draftable token is left.
    """
    kept: list[Dialogue] = []
    truncated = too_long = too_short = 0
    for dialogue in dialogues:
        room = sequence_length - len(dialogue.prompt_ids)
        if len(dialogue.answer_ids) < SHORTEST_ANSWER:
            too_short += 1
        elif room < SHORTEST_ANSWER:
            too_long += 1
        elif len(dialogue.answer_ids) <= room:
            kept.append(dialogue)
        else:
            truncated += 1
            answer = dialogue.answer_ids[:room]
            kept.append(Dialogue(dialogue.name, dialogue.domain, dialogue.prompt_ids, answer))
    answer_tokens = sum(len(dialogue.answer_ids) for dialogue in kept)
    counts = FitCounts(len(kept), truncated, too_long, too_short, answer_tokens, answer_tokens - len(kept))
    if not kept:
        raise StageError(
            FailureReason.INVALID_DATA,
            f"No answer has a token to learn from ({counts}): raise distillation.sequenceLength (it is "
            f"{sequence_length}) if prompts are too long, or regeneration.maxTokens if answers are too short.",
        )
    return kept, counts


def count_answer_tokens(dialogues: Iterator[Dialogue], *, vocab_size: int) -> Tensor:
    """How often each token occurs in the answers: int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for dialogue in dialogues:
        np.add.at(counts, dialogue.answer_ids, 1)
    return torch.from_numpy(counts)
