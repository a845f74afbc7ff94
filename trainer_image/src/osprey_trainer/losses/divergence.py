"""How far a drafter's distribution q is from the teacher's p, row by row, with the gradient by the drafter's logits.

Cross-entropy is the usual objective. The LK losses (Samarin et al., arXiv 2602.23881) aim at what speculative sampling
asks for, the chance α = sum_v min(p_v, q_v) that a token drawn from q is kept (Leviathan et al., arXiv 2211.17192).
Both are over the draft vocabulary, over which p is renormalised: where it is compressed, α is the chance given that the
target's token is in it.

* LKAlpha: -log α.
* LKLambda: λ · cross-entropy + (1 - λ) · (1 - α), λ = exp(-decay · α): cross-entropy where the drafter is far off and
  α has hardly a gradient, α where it is near. λ is held constant in the gradient. The paper takes it from the mean of a
  batch; here each row has its own, so that the loss does not depend on how rows are split over batches and processes.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

_SMALLEST = torch.finfo(torch.float32).tiny
"""Of α: two distributions that share no token, as far as fp32 can tell, still have a logarithm."""


class Kind(StrEnum):
    """What is minimised."""

    CROSS_ENTROPY = "CrossEntropy"
    LK_ALPHA = "LKAlpha"
    LK_LAMBDA = "LKLambda"


@dataclass(frozen=True)
class Divergence:
    """A loss of a row: (1 - hard) · divergence of p and q + hard · cross-entropy against the most likely token of p.

    Attributes:
        kind: of the divergence.
        lk_decay: of λ; only LKLambda has it.
        hard: weight of the most likely token, 0 to 1.
    """

    kind: Kind = Kind.CROSS_ENTROPY
    lk_decay: float = 3.0
    hard: float = 0.0

    def losses(self, p: Tensor, log_q: Tensor) -> Tensor:
        """As the definitions read, for autograd: p, log_q: [R, V] -> [R]."""
        cross_entropy = -(p * log_q).sum(-1)
        alpha = torch.minimum(p, log_q.exp()).sum(-1)
        match self.kind:
            case Kind.CROSS_ENTROPY:
                losses = cross_entropy
            case Kind.LK_ALPHA:
                losses = -alpha.clamp_min(_SMALLEST).log()
            case Kind.LK_LAMBDA:
                mix = self._mix(alpha.detach())
                losses = mix * cross_entropy + (1 - mix) * (1 - alpha)
        if not self.hard:
            return losses
        label = p.argmax(-1, keepdim=True)
        return (1 - self.hard) * losses - self.hard * log_q.gather(-1, label).squeeze(-1)

    def losses_and_gradients(self, p: Tensor, log_q: Tensor) -> Tensor:
        """The same, with the gradient: log_q [R, V] becomes d loss / d logits in place. Returns the losses [R].

        d cross-entropy / d z = q - p. With m = 1 where q < p and A = sum_v m_v q_v, dα / d z = q (m - A).
        """
        losses: Tensor = -torch.linalg.vecdot(p, log_q)
        if self.kind is Kind.CROSS_ENTROPY and not self.hard:  # the default, without another tensor of this size
            log_q.exp_().sub_(p)
            return losses
        q = log_q.exp()
        gradient = q - p
        if self.kind is not Kind.CROSS_ENTROPY:
            alpha, of_alpha = _acceptance(p, q)
            if self.kind is Kind.LK_ALPHA:
                losses = -alpha.log()
                gradient = of_alpha.div_(-alpha[:, None])
            else:
                mix = self._mix(alpha)
                losses = torch.lerp(1 - alpha, losses, mix)
                gradient = torch.lerp(of_alpha.neg_(), gradient, mix[:, None])
        if self.hard:
            label = p.argmax(-1, keepdim=True)
            losses = torch.lerp(losses, -log_q.gather(-1, label).squeeze(-1), self.hard)
            gradient = torch.lerp(gradient, q.scatter_add_(-1, label, -torch.ones_like(q[:, :1])), self.hard)
        log_q.copy_(gradient)
        return losses

    def _mix(self, alpha: Tensor) -> Tensor:
        return torch.exp(-self.lk_decay * alpha)


def _acceptance(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """-> α [R] and its gradient by the logits of q [R, V]."""
    lower = (q < p).to(q.dtype)
    below = torch.linalg.vecdot(lower, q)
    return torch.minimum(p, q).sum(-1).clamp_min_(_SMALLEST), lower.sub_(below[:, None]).mul_(q)
