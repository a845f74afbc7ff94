"""Losses of the two training stages as modules. SKELETON: signatures are final, bodies follow."""

from torch import Tensor, nn

from osprey_trainer.batch import DialogueBatch, WindowBatch
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Drafter


class Distillation(nn.Module):
    """Training-time test: sum over unroll steps k of decay^k times the mean soft cross-entropy."""

    def __init__(
        self,
        drafter: Drafter,
        target_head: Tensor,
        *,
        steps: int,
        decay: float = 0.8,
        train_embedding: bool = True,
        train_head: bool = True,
        chunk: int = 256,
    ) -> None:
        """target_head: [V, Ht], `Target.head`."""
        super().__init__()

    def rows(self, batch: DialogueBatch) -> Tensor:
        """Supervised rows of each unroll step: int64 [steps]."""
        raise NotImplementedError

    def forward(self, batch: DialogueBatch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """-> (sum over k of decay^k · scale[k] · sum of the rows' losses, totals for `summarise`)."""
        raise NotImplementedError

    def summarise(self, totals: Tensor) -> dict[str, float]:
        """-> `acceptance_length` simulated on the batches, `acceptance_1`... by draft position."""
        raise NotImplementedError


class Pretraining(nn.Module):
    """Next-token cross-entropy of a backbone."""

    def __init__(self, backbone: Backbone, *, train_embedding: bool = True, chunk: int = 256) -> None:
        super().__init__()

    def rows(self, batch: WindowBatch) -> Tensor:
        """Predicted tokens: int64 [1]."""
        raise NotImplementedError

    def forward(self, batch: WindowBatch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """-> (scale[0] · sum of the tokens' losses, totals for `summarise`)."""
        raise NotImplementedError

    def summarise(self, totals: Tensor) -> dict[str, float]:
        """-> `perplexity`, `accuracy`."""
        raise NotImplementedError
