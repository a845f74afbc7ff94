"""From a target's last hidden state to its logits, without ever keeping these."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TeacherHead:
    """The language-model head, and what some models do to its logits: cap · tanh(scale · x / cap).

    Attributes:
        weight: [V, Ht].
        scale: of the logits; Cohere, Granite and Falcon-H1 have one.
        cap: the logits stay below it, as in Gemma 2; None: they are left as they are.
    """

    weight: Tensor
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, weight: Tensor, config: Mapping[str, Any]) -> Self:
        """Reads scale and cap from the fields of a `config.json`, each model by its own name for it."""
        scale = float(config.get("logit_scale") or config.get("lm_head_multiplier") or 1.0)
        return cls(
            weight,
            scale=scale / float(config.get("logits_scaling") or 1.0),
            cap=config.get("final_logit_softcapping") or None,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., Ht] -> fp32 [..., V]."""
        logits = functional.linear(hidden, self.weight).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def rows(self, ids: Tensor) -> Self:
        """Only these tokens' logits: int64 [Vd]."""
        return dataclasses.replace(self, weight=self.weight.detach()[ids])

    def to(self, dtype: torch.dtype) -> Self:
        """With its weight in another dtype."""
        return dataclasses.replace(self, weight=self.weight.to(dtype))
