"""What one micro-batch holds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.target import TargetStates


@dataclass(frozen=True)
class DialogueBatch:
    """Dialogues that a target answered, with the target's states.

    Attributes:
        ids: int64 [B, L], padded on the right.
        lengths: int64 [B].
        answer: bool [B, L], true on tokens that the target produced; false on padding.
        states: taps [B, L, 3·Ht] and last hidden states [B, L, Ht]; those of the padding mean nothing.
        greedy: int64 [B, L], the target's most likely token after each position; None when the answers are greedy,
            since it then is the next token.
        names: of the dialogues, for reports.
    """

    ids: Tensor
    lengths: Tensor
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
        """Pads dialogues of [n] ids, [n] answer marks and [n, ...] states (captured before) to one batch.

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
            ids=pad_sequence(list(ids), batch_first=True),
            lengths=torch.tensor([len(x) for x in ids]),
            answer=pad_sequence(list(answer), batch_first=True),
            states=TargetStates(
                taps=pad_sequence([x.taps for x in states], batch_first=True),
                last_hidden=pad_sequence([x.last_hidden for x in states], batch_first=True),
            ),
            greedy=None if greedy is None else pad_sequence(list(greedy), batch_first=True),
            names=tuple(names),
        )

    def to(self, device: torch.device) -> Self:
        """Moved to a device."""
        return dataclasses.replace(
            self,
            ids=self.ids.to(device),
            lengths=self.lengths.to(device),
            answer=self.answer.to(device),
            states=TargetStates(self.states.taps.to(device), self.states.last_hidden.to(device)),
            greedy=None if self.greedy is None else self.greedy.to(device),
        )

    @property
    def tokens(self) -> int:
        """Answer tokens, for the speed that is reported."""
        return int(self.answer.sum())


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
