"""Which rows the drafter is asked for, and what the right answer is.

Row i holds the target's hidden state h_i and the input token x_{i+1}. At unroll step k it has drafted from the tokens
x_{i+1}..x_{i+1+k}, and predicts x_{i+2+k}, with the target's distribution after position i+1+k as its teacher.

Serving asks for row i at step k when all of x_{i+1}..x_{i+2+k} are the target's own tokens: the first such row is the
prompt's last token, with the first generated token as its input. All of them lie in one dialogue: beyond its end there
is none, whatever dialogue is packed behind it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from osprey_trainer.batch import DialogueBatch


def asked_rows(answer: Tensor, lasts: Tensor, steps: int) -> Tensor:
    """Rows that serving asks for at each step.

    Args:
        answer: bool [N], A: true on the target's own tokens.
        lasts: int64 [N], the place of the last token of each token's dialogue.
        steps: K, length of the unroll.

    Returns:
        bool [K, N]: row i at step k is A[i+1] and ... and A[i+2+k].
    """
    places = torch.arange(len(answer), device=answer.device)

    def follows(by: int) -> Tensor:
        return answer[(places + by).clamp(max=lasts)] & (places + by <= lasts)

    asked = follows(1)
    masks = []
    for k in range(steps):
        asked = asked & follows(2 + k)
        masks.append(asked)
    return torch.stack(masks)


@dataclass(frozen=True)
class Supervision:
    """The rows of a batch that are asked for at step 0, gathered: R of them, dialogue after dialogue.

    Attributes:
        rows: int64 [R], places in the batch, ascending.
        asked: bool [K, R], see `asked_rows`.
        scored: bool [K, R], asked and with a teacher that the drafter can express: the target's most likely
            token is in the draft vocabulary. These have a loss.
        labels: int64 [K, R], the token x_{i+2+k} that would be verified.
        teachers: int64 [K, R], the place i+1+k whose distribution is the teacher.
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
    lasts = batch.lasts
    masks = asked_rows(batch.answer, lasts, steps)
    rows = masks[0].nonzero().squeeze(1)
    ends = lasts[rows]
    labels, in_vocabulary, teachers = [], [], []
    for k in range(steps):
        label = batch.ids[(rows + 2 + k).clamp(max=ends)]
        teacher = (rows + 1 + k).clamp(max=ends)
        likely = label if batch.greedy is None else batch.greedy[teacher]
        labels.append(label)
        teachers.append(teacher)
        in_vocabulary.append(t2d[likely])
    asked = masks[:, rows]
    return Supervision(
        rows=rows,
        asked=asked,
        scored=asked & torch.stack(in_vocabulary),
        labels=torch.stack(labels),
        teachers=torch.stack(teachers),
    )
