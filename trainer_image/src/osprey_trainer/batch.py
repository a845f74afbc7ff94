"""What one micro-batch holds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.target import TargetStates


@dataclass(frozen=True)
class DialogueBatch:
    """Dialogues that a target answered, packed end to end, with the target's states: N tokens in all, none of padding.

    Attributes:
        ids: int64 [N].
        lengths: tokens of each dialogue; their sum is N.
        answer: bool [N], true on tokens that the target produced.
        states: taps [N, 3·Ht] and last hidden states [N, Ht].
        greedy: int64 [N], the target's most likely token after each position; None when the answers are greedy,
            since it then is the next token.
        names: of the dialogues, for reports.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    answer: Tensor
    states: TargetStates
    greedy: Tensor | None
    names: tuple[str, ...]

    @classmethod
    def collate(
        cls,
        ids: Sequence[Tensor],
        answer: Sequence[Tensor],
        states: Sequence[TargetStates],
        names: Sequence[str],
        greedy: Sequence[Tensor] | None = None,
    ) -> Self:
        """Packs dialogues of [n] ids, [n] answer marks and [n, ...] states.

        Raises:
            StageError: INVALID_DATA for a dialogue without a prompt: nothing asked for its answer.
        """
        for name, marks in zip(names, answer, strict=True):
            if bool(marks[0]):
                raise StageError(
                    FailureReason.INVALID_DATA,
                    f"Dialogue {name} begins with the target's answer; it needs at least one prompt token before.",
                )
        return cls(
            ids=torch.cat(list(ids)),
            lengths=tuple(len(x) for x in ids),
            answer=torch.cat(list(answer)),
            states=TargetStates(
                taps=torch.cat([x.taps for x in states]),
                last_hidden=torch.cat([x.last_hidden for x in states]),
            ),
            greedy=None if greedy is None else torch.cat(list(greedy)),
            names=tuple(names),
        )

    def to(self, device: torch.device) -> Self:
        """Moved to a device."""
        return dataclasses.replace(
            self,
            ids=self.ids.to(device),
            answer=self.answer.to(device),
            states=TargetStates(self.states.taps.to(device), self.states.last_hidden.to(device)),
            greedy=None if self.greedy is None else self.greedy.to(device),
        )

    @property
    def tokens(self) -> int:
        """Answer tokens, for the speed that is reported."""
        return int(self.answer.sum())

    @property
    def positions(self) -> Tensor:
        """int64 [N]: of each token in its own dialogue, from 0."""
        return torch.cat([torch.arange(length, device=self.ids.device) for length in self.lengths])

    @property
    def lasts(self) -> Tensor:
        """int64 [N]: for each token the place of the last token of its dialogue."""
        lengths = torch.tensor(self.lengths, device=self.ids.device)
        return (lengths.cumsum(0) - 1).repeat_interleave(lengths, output_size=len(self.ids))

    def by_dialogue(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits [N, ...] into the [length, ...] of each dialogue."""
        return torch.split(values, list(self.lengths))


@dataclass(frozen=True)
class WindowBatch:
    """Windows of plain text for next-token prediction.

    Attributes:
        ids: int64 [B, T + 1].
        names: of the windows, for reports.
    """

    ids: Tensor
    names: tuple[str, ...]

    def to(self, device: torch.device) -> Self:
        """Moved to a device."""
        return dataclasses.replace(self, ids=self.ids.to(device))

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return self.ids.shape[0] * (self.ids.shape[1] - 1)
