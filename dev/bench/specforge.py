"""SpecForge's EAGLE-3 training step (github.com/sgl-project/SpecForge), from a checkout that the reader brings.

It is its own strategy, model and target head, on captured hidden states, with its eager loss in place of the Triton
kernel, which needs a GPU. One thing is given from outside: SpecForge shifts one loss mask along with the steps, so
that at step k it also trains rows before the answer, which serving never asks for. Each step gets the exact rows
here, or the losses would not be comparable; it costs SpecForge nothing, since it computes all rows all the same.
"""

import dataclasses
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dev.bench.inputs import Case, Inputs
from osprey_trainer.masks import asked_rows
from osprey_trainer.models.hf_names import read_tensors

DECAY = 0.8
"""Step k weighs this to the k: SpecForge's own, which we take too."""


class SpecForge:
    """Its step on the inputs of a case.

    Attributes:
        positions: of its padded batch; its losses are sums over rows divided by this.
    """

    def __init__(
        self, checkout: Path, case: Case, inputs: Inputs, *, compact_teacher: bool = False, eager: bool = False
    ) -> None:
        """compact_teacher: its option for offline training; eager: what it marks for torch.compile is not compiled."""
        torch._dynamo.config.disable = eager  # noqa: SLF001 - where torch has this switch
        sys.path.insert(0, str(checkout))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it tells what it would like to have installed
            eagle3 = importlib.import_module("specforge.algorithms.eagle3.model")
            adapters = importlib.import_module("specforge.core.eagle3_adapters")
            losses = importlib.import_module("specforge.core.loss")
            draft = importlib.import_module("specforge.modeling.draft")
            head = importlib.import_module("specforge.modeling.target.target_head")
            base = importlib.import_module("specforge.training.strategies.base")
            contracts = importlib.import_module("specforge.runtime.contracts")
        vars(eagle3)["LogSoftmaxLoss"] = _Eager(losses._compute_loss)  # noqa: SLF001 - its readable reference
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            inputs.drafter.save(folder)
            config = draft.LlamaForCausalLMEagle3.config_class.from_pretrained(folder)
            self.drafter = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa")
            self.drafter.load_state_dict(read_tensors(folder))
            target_head = head.TargetHead(str(folder))
        target_head.fc.weight.data = inputs.head.weight
        target_head.freeze_weights()
        self.drafter.embed_tokens.weight.requires_grad_(False)
        batch = _padded(inputs)
        shape = batch["input_ids"].shape
        self.positions = shape.numel()
        model = eagle3.OnlineEagle3Model(self.drafter, length=case.steps, attention_backend="sdpa")
        rows = _asked(inputs, case.steps)
        model._make_adapter = lambda: _exact(adapters.SdpaLikeAdapter, model, rows)  # noqa: SLF001 - its seam
        self._strategy = base.Eagle3TrainStrategy(
            model, target_head=target_head, ploss_decay=DECAY, compact_teacher=compact_teacher
        )
        self._batch = contracts.TrainBatch([], "eagle3", batch, {"target_repr": "hidden_state"})

    def step(self) -> list[float]:
        """Run forward and backward; return the losses of the unroll's steps, weighted as they are added."""
        self.free()
        output = self._strategy.forward_loss(self._batch)
        output.loss.backward()
        return [DECAY**k * float(loss) for k, loss in enumerate(output.metrics["plosses"])]

    def free(self) -> None:
        """Drop the gradients."""
        self.drafter.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """By the published names."""
        return {name: p.grad for name, p in self.drafter.named_parameters() if p.grad is not None}


class _Eager:
    """Takes the place of its autograd function."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.apply = loss


def _exact(adapter: Any, model: Any, rows: Tensor) -> Any:
    """Return its adapter, which gives each step these rows, bool [K, B, T], where the teacher's token is draftable."""

    class Exact(adapter):  # type: ignore[misc]
        def step_view(self, *, idx: int, **others: Any) -> Any:
            state = super().step_view(idx=idx, **others)
            # Its own mask, all positions being offered, is whether the teacher's token is in the draft vocabulary.
            mask = state.position_mask * rows[idx, ..., None]
            return dataclasses.replace(state, position_mask=mask)

    return Exact(model)


def _padded(inputs: Inputs) -> dict[str, Tensor]:
    """Return the dialogues as its collator pads them, on the right, every position offered to the loss."""
    samples = inputs.samples

    def padded(tensors: list[Tensor]) -> Tensor:
        return pad_sequence(tensors, batch_first=True)

    ids = padded([sample.ids for sample in samples])
    return {
        "input_ids": ids,
        "attention_mask": padded([torch.ones_like(sample.ids) for sample in samples]),
        "loss_mask": torch.ones_like(ids),
        "hidden_state": padded([sample.states.taps for sample in samples]),
        "target": padded([sample.states.last_hidden for sample in samples]),
    }


def _asked(inputs: Inputs, steps: int) -> Tensor:
    """Return the rows that serving asks for, bool [K, B, T]."""
    batch = inputs.batch()
    asked = asked_rows(batch.answer, batch.lasts, steps)
    return torch.stack([pad_sequence(list(batch.by_dialogue(rows)), batch_first=True) for rows in asked])
