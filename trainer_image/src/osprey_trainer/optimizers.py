"""What makes a step of a gradient: AdamW, or Muon for the matrices and AdamW for all else.

Muon (Jordan et al. 2024) moves a matrix along its momentum with all singular values made equal, so that directions
in which the gradient is small are learnt too. Its updates are scaled to the size of AdamW's (Liu et al., arXiv
2502.16982), and follow the same schedule.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from osprey_trainer.settings import LoopSettings

SCALE = "scale"
"""Key of a group of parameters whose learning rate is so many times the one of the schedule."""
_BY_TOKEN = ("embed_tokens.weight", "lm_head.weight")
"""Matrices whose rows are looked up or compared one by one: no map from one space to another, so not Muon's."""


def optimizer_of(model: nn.Module, settings: LoopSettings) -> Optimizer:
    """Of the parameters of a model that are trained."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if settings.muon_scale is None:
        return _adamw((p for _, p in trained), settings)
    matrices = [p for name, p in trained if is_matrix(name, p)]
    others = [p for name, p in trained if not is_matrix(name, p)]
    muon = Muon(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    (group,) = muon.param_groups
    group[SCALE] = settings.muon_scale
    return Together(muon, _adamw(others, settings))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes this parameter of a model."""
    return parameter.ndim == 2 and not name.endswith(_BY_TOKEN)


def _adamw(parameters: Iterable[Tensor], settings: LoopSettings) -> AdamW:
    # Torch's: DeepSpeed's own AdamW compiles a kernel at the first start.
    return AdamW(
        parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )


class Together(Optimizer):
    """Several optimizers, of a group of parameters each, as one: DeepSpeed takes one."""

    def __init__(self, *parts: Optimizer) -> None:
        """Of optimizers that have not made a step."""
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all."""
        for part in self._parts:
            part.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """The parts work on the groups and the state that are seen, and saved, from outside."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
