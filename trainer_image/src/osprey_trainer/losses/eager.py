"""The losses as their definitions read. They form all logits at once: the reference for `losses.chunked`."""

import torch
from torch import Tensor
from torch.nn import functional

from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.teacher_head import TeacherHead


def distillation(
    hidden: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: TeacherHead,
    weight: Tensor,
    *,
    teachers: Tensor,
    divergence: Divergence,
) -> tuple[Tensor, Tensor]:
    """How far the drafter is from the teacher, renormalised over the draft vocabulary.

    sum over rows of weight · divergence(p, q), with p the teacher's softmax over the draft vocabulary alone. The
    default, -sum_v p_v log q_v, is KL(p || q) up to a constant.

    Args:
        hidden: [R, H], the drafter's output.
        head: [Vd, H], the drafter's head.
        teacher_hidden: [N, Ht], last hidden states of the target.
        teacher_head: the target's head, [Vd, Ht]: its rows for the draft vocabulary.
        weight: [R].
        teachers: int64 [R], which of the teacher's states teaches each row.
        divergence: of a row.

    Returns:
        The loss, and the drafter's most likely draft ids, int64 [R].
    """
    logits = functional.linear(hidden, head).float()
    with torch.no_grad():
        target = teacher_head.logits(teacher_hidden)[teachers].softmax(-1)
    losses = divergence.losses(target, logits.log_softmax(-1))
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
