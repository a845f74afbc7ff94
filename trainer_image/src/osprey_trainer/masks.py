"""Which rows the drafter is asked for, and what the right answer is.

Row i holds the target's hidden state h_i and the input token x_{i+1}. At unroll step k it has drafted from the tokens
x_{i+1}..x_{i+1+k}, and predicts x_{i+2+k}, with the target's distribution after position i+1+k as its teacher.

Serving asks for row i at step k when all of x_{i+1}..x_{i+2+k} are the target's own tokens: the first such row is the
prompt's last token, with the first generated token as its input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from osprey_trainer.batch import DialogueBatch


def asked_rows(answer: Tensor, steps: int) -> Tensor:
    """Rows that serving asks for at each step.

    Args:
        answer: bool [B, L], A: true on the target's own tokens.
        steps: K, length of the unroll.

    Returns:
        bool [K, B, L]: row i at step k is A[i+1] and ... and A[i+2+k].
    """
    asked = shifted(answer, 1)
    masks = []
    for k in range(steps):
        asked = asked & shifted(answer, 2 + k)
        masks.append(asked)
    return torch.stack(masks)


def shifted(x: Tensor, by: int) -> Tensor:
    """Column i of the result is column i + by of x: [B, L]; zero (False) beyond the end."""
    result = torch.zeros_like(x)
    if by < x.shape[1]:
        result[:, : x.shape[1] - by] = x[:, by:]
    return result


@dataclass(frozen=True)
class Supervision:
    """The rows of a batch that are asked for at step 0, gathered: R is the largest number of them in a dialogue.

    Attributes:
        rows: int64 [B, R], ascending; a dialogue with fewer than R is filled with rows that are not asked for.
        asked: bool [K, B, R], see `asked_rows`.
        scored: bool [K, B, R], asked and with a teacher that the drafter can express: the target's most likely
            token is in the draft vocabulary. These have a loss.
        labels: int64 [K, B, R], the token x_{i+2+k} that would be verified.
        teachers: int64 [K, B, R], the position i+1+k whose distribution is the teacher.
    """

    rows: Tensor
    asked: Tensor
    scored: Tensor
    labels: Tensor
    teachers: Tensor


def supervise(batch: DialogueBatch, t2d: Tensor, steps: int) -> Supervision:
    """Gathers the supervised rows of a batch.

    Args:
        batch: the dialogues.
        t2d: bool [V], whether the drafter can propose a token.
        steps: K, length of the unroll.
    """
    masks = asked_rows(batch.answer, steps)
    # A stable sort brings the rows asked for to the front, in order.
    order = masks[0].int().argsort(dim=1, descending=True, stable=True)
    rows = order[:, : int(masks[0].sum(1).max())]
    at = torch.arange(len(rows), device=rows.device)[:, None]
    end = batch.ids.shape[1] - 1
    labels, asked, in_vocabulary, teachers = [], [], [], []
    for k in range(steps):
        label = batch.ids[at, (rows + 2 + k).clamp_max(end)]
        teacher = (rows + 1 + k).clamp_max(end)
        likely = label if batch.greedy is None else batch.greedy[at, teacher]
        labels.append(label)
        teachers.append(teacher)
        asked.append(masks[k][at, rows])
        in_vocabulary.append(t2d[likely])
    stacked = torch.stack(asked)
    return Supervision(
        rows=rows,
        asked=stacked,
        scored=stacked & torch.stack(in_vocabulary),
        labels=torch.stack(labels),
        teachers=torch.stack(teachers),
    )
