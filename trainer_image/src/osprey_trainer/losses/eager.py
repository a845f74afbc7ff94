"""The losses as their definitions read. They form all logits at once: the reference for `losses.chunked`."""

import torch
from torch import Tensor
from torch.nn import functional

from osprey_trainer.teacher_head import TeacherHead


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: TeacherHead, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the teacher, renormalised over the draft vocabulary.

    sum over rows of weight · -sum_v p_v log q_v, with p the teacher's softmax over the draft vocabulary alone; up to
    a constant it is KL(p || q).

    Args:
        hidden: [R, H], the drafter's output.
        head: [Vd, H], the drafter's head.
        teacher_hidden: [R, Ht], last hidden states of the target.
        teacher_head: the target's head, [Vd, Ht]: its rows for the draft vocabulary.
        weight: [R].

    Returns:
        The loss, and the drafter's most likely draft ids, int64 [R].
    """
    logits = functional.linear(hidden, head).float()
    with torch.no_grad():
        target = teacher_head.logits(teacher_hidden).softmax(-1)
    losses = -(target * logits.log_softmax(-1)).sum(-1)
    return (losses * weight).sum(), logits.argmax(-1)


def hard_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy against tokens.

    Args:
        hidden: [R, H].
        head: [V, H].
        labels: int64 [R].
        weight: [R].

    Returns:
        sum over rows of weight · -log q_label, and the most likely ids, int64 [R].
    """
    logits = functional.linear(hidden, head).float()
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return (losses * weight).sum(), logits.argmax(-1)
