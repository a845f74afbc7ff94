"""The losses of the two training stages, as modules that the loop can run.

A loss is a sum over terms (steps of the unroll; one for next-token prediction), and each term is the mean over its
rows in the whole global batch: ranks and micro-batches weigh by their rows. So `forward` gets the scale of each
term from the loop, which has counted `rows` over all of them.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from osprey_trainer.acceptance import replay
from osprey_trainer.batch import DialogueBatch, WindowBatch
from osprey_trainer.losses import chunked
from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.masks import supervise
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Drafter
from osprey_trainer.teacher_head import TeacherHead
from osprey_trainer.unroll import unroll

BatchT = TypeVar("BatchT")


class Objective(nn.Module, ABC, Generic[BatchT]):
    """A loss and the model that it trains.

    Attributes:
        model: what is trained; its parameters that need no gradient stay as they are.
    """

    model: nn.Module

    @abstractmethod
    def rows(self, batch: BatchT) -> Tensor:
        """Rows of each term: int64 [terms]."""

    @abstractmethod
    def forward(self, batch: BatchT, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and totals of a micro-batch.

        Args:
            batch: the micro-batch.
            scale: fp32 [terms]; the loss is the sum over terms of scale · sum over rows.

        Returns:
            The loss and what `summarise` needs, fp32 [any]: sums, which the loop adds up over micro-batches and
            ranks.
        """

    @abstractmethod
    def summarise(self, totals: Tensor) -> dict[str, float]:
        """Metrics by name."""


class Distillation(Objective[DialogueBatch]):
    """Training-time test: sum over unroll steps k of weight[k] times the mean divergence from the teacher."""

    model: Drafter
    teacher_weight: Tensor
    step_weights: Tensor

    def __init__(
        self,
        drafter: Drafter,
        target_head: TeacherHead,
        *,
        step_weights: Sequence[float],
        divergence: Divergence,
        train_embedding: bool = True,
        train_head: bool = True,
        chunk: int = 256,
    ) -> None:
        """Of a drafter and the head of its target.

        Args:
            drafter: the drafter, its draft vocabulary chosen.
            target_head: `Target.head`, [V, Ht].
            step_weights: K weights, one for each step of the unroll.
            divergence: of a row.
            train_embedding: false freezes the drafter's embedding.
            train_head: false freezes its head.
            chunk: rows whose [chunk, Vd] logits exist at one time.
        """
        super().__init__()
        drafter.embed_tokens.requires_grad_(train_embedding)
        drafter.lm_head.requires_grad_(train_head)
        self.model = drafter
        self.steps, self.divergence, self.chunk = len(step_weights), divergence, chunk
        self.register_buffer("step_weights", torch.tensor(step_weights, dtype=torch.float32), persistent=False)
        # Logits of the draft vocabulary are all that the teacher is asked for.
        teacher = target_head.rows(drafter.draft_ids)
        # A buffer, so that it moves with the module; the rest of the head comes back in `forward`.
        self.register_buffer("teacher_weight", teacher.weight, persistent=False)
        self._teacher = teacher

    def rows(self, batch: DialogueBatch) -> Tensor:
        """Supervised rows of each unroll step: int64 [steps]."""
        return supervise(batch, self.model.t2d, self.steps).scored.sum(1)

    def forward(self, batch: DialogueBatch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """-> (sum over k of weight[k] · scale[k] · sum of the rows' losses, totals for `summarise`)."""
        drafter = self.model
        supervision = supervise(batch, drafter.t2d, self.steps)
        scored, labels = supervision.scored, supervision.labels
        outputs = unroll(drafter, batch, supervision.rows.tolist(), self.steps)
        term, _ = picked = scored.nonzero(as_tuple=True)
        loss, predicted = chunked.distillation(
            hidden=torch.cat([output[rows] for output, rows in zip(outputs, scored, strict=True)]),
            head=drafter.lm_head.weight,
            teacher_hidden=batch.states.last_hidden,
            teacher_head=dataclasses.replace(self._teacher, weight=self.teacher_weight),
            weight=(self.step_weights * scale)[term],
            teachers=supervision.teachers[picked],
            divergence=self.divergence,
            chunk=self.chunk,
        )
        hits = torch.zeros_like(scored)
        hits[picked] = drafter.draft_ids[predicted] == labels[picked]
        requests = replay(batch, supervision, hits)
        totals = torch.tensor(
            [
                [request.completion_tokens, request.verify_steps, *request.drafted, *request.accepted]
                for request in requests
                if request.verify_steps
            ],
            dtype=torch.float32,
        ).view(-1, 2 + 2 * self.steps)
        return loss, totals.sum(0)

    def summarise(self, totals: Tensor) -> dict[str, float]:
        """-> `acceptance_length` simulated on the batches; `acceptance_1` and so on by draft position."""
        tokens, verify_steps, *positions = totals.tolist()
        metrics = {"acceptance_length": tokens / verify_steps} if verify_steps else {}
        pairs = zip(positions[: self.steps], positions[self.steps :], strict=True)
        return metrics | {
            f"acceptance_{k}": accepted / drafted for k, (drafted, accepted) in enumerate(pairs, 1) if drafted
        }


_NOT_PREDICTED = -1


class Pretraining(Objective[WindowBatch]):
    """Next-token cross-entropy of a backbone."""

    model: Backbone
    vocabulary: Tensor | None
    index: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        train_embedding: bool = True,
        vocabulary: Tensor | None = None,
        chunk: int = 256,
    ) -> None:
        """Of a backbone.

        Args:
            backbone: the pruned language model.
            train_embedding: false freezes the embedding, and a head that is tied to it.
            vocabulary: int64 [Vl], ids that are predicted; other next tokens have no loss. None: all.
            chunk: rows whose [chunk, Vl] logits exist at one time.
        """
        super().__init__()
        backbone.embed_tokens.requires_grad_(train_embedding)
        self.model = backbone
        self.chunk = chunk
        rows = len(backbone.head_weight)
        ids = torch.arange(rows) if vocabulary is None else vocabulary
        index = torch.full((rows,), _NOT_PREDICTED).index_copy_(0, ids, torch.arange(len(ids)))
        self.register_buffer("vocabulary", None if vocabulary is None else ids, persistent=False)
        self.register_buffer("index", index, persistent=False)

    def rows(self, batch: WindowBatch) -> Tensor:
        """Predicted tokens: int64 [1]."""
        return (self._labels(batch) != _NOT_PREDICTED).sum().view(1)

    def forward(self, batch: WindowBatch, scale: Tensor) -> tuple[Tensor, Tensor]:
        """-> (scale[0] · sum of the tokens' losses, totals for `summarise`)."""
        labels = self._labels(batch)
        predicted_rows = labels != _NOT_PREDICTED
        hidden = self.model(batch.ids[:, :-1]).flatten(0, 1)[predicted_rows]
        labels = labels[predicted_rows]
        head = self.model.head_weight if self.vocabulary is None else self.model.head_weight[self.vocabulary]
        loss, predicted = chunked.hard_cross_entropy(hidden, head, labels, scale.expand(len(labels)), chunk=self.chunk)
        total = loss.detach() / scale[0]
        return loss, torch.stack([total, (predicted == labels).sum(), total.new_tensor(len(labels))])

    def _labels(self, batch: WindowBatch) -> Tensor:
        """-> next tokens as rows of the head, or `_NOT_PREDICTED`: int64 [B · T]."""
        labels: Tensor = self.index[batch.ids[:, 1:].flatten()]
        return labels

    def summarise(self, totals: Tensor) -> dict[str, float]:
        """-> `accuracy` and `cross_entropy`, nats a token; nothing where no token was predicted."""
        total, correct, rows = totals.tolist()
        return {"cross_entropy": total / rows, "accuracy": correct / rows} if rows else {}
