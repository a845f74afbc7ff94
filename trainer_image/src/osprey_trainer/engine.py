"""DeepSpeed behind a small face: one objective, one optimizer, ZeRO by setting, gloo on CPUs and NCCL on GPUs."""

import atexit
import json
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__ as compatible_ops
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # it is, at run time

from osprey_runtime.settings import environment
from osprey_trainer.objectives import Objective
from osprey_trainer.optimizers import SCALE, optimizer_of
from osprey_trainer.settings import LoopSettings

log = logging.getLogger(__name__)

TAG = "state"
"""DeepSpeed's files lie in a folder of this name within a checkpoint."""
_PATIENCE = timedelta(hours=2)
"""How long a process waits for the others. NCCL's own ten minutes also bound the rendezvous, before which every pod
downloads the target, and the wait for a checkpoint's upload. A process that died is told by its exit code anyway."""


class Engine:
    """Trains an objective on all ranks.

    Attributes:
        device: of this rank.
        rank, world_size: of the process group.
    """

    def __init__(self, objective: Objective[Any], settings: LoopSettings, *, universal: bool = False) -> None:
        """Joins the process group and wraps the objective; parameters that need no gradient are left alone.

        universal: `load` will read what `universal.convert` made.
        """
        self.device = join_process_group()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._objective, self._zero_stage = objective, settings.zero_stage
        parameters = [p for p in objective.parameters() if p.requires_grad]
        self._optimizer = optimizer_of(objective.model, settings)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        config = deepspeed_config(settings, universal=universal)
        if self.rank == 0:
            log.info("DeepSpeed: %s", json.dumps(config))
        self._engine, *_ = deepspeed.initialize(
            model=_Autocast(objective.to(self.device), enabled=settings.bf16),
            model_parameters=parameters,
            optimizer=self._optimizer,
            dist_init_required=False,
            config=config,
        )

    def forward(self, batch: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and totals of one micro-batch, see `Objective.forward`."""
        result: tuple[Tensor, Tensor] = self._engine(batch, scale)
        return result

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient, divided by accumulation and world size."""
        self._engine.backward(loss)

    def step(self, learning_rate: float) -> bool:
        """After each micro-batch; updates the weights after the last one of a step.

        Returns False, the weights unchanged, if the gradient is not finite; all ranks agree on it.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get(SCALE, 1.0)
        if self._zero_stage == 0 and self._engine.is_gradient_accumulation_boundary():
            gradients = [p.grad for p in self._objective.parameters() if p.grad is not None]
            # Reduced already, so it is the same everywhere. DeepSpeed would scale the weights by it.
            if not torch.nn.utils.get_total_norm(gradients).isfinite():
                return False
        self._engine.step()
        return self._zero_stage == 0 or not self._engine.optimizer.overflow

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in float64."""
        total = values.detach().to(self.device, torch.float64)
        dist.all_reduce(total)
        return total

    def gather(self, value: Any) -> list[Any]:
        """A picklable object of every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def trained_weights(self) -> dict[str, Tensor]:
        """Parameters of the objective's model that are trained; whole on every rank below ZeRO stage 3."""
        return {name: p for name, p in self._objective.model.named_parameters() if p.requires_grad}

    def whole_weights(self) -> dict[str, Tensor]:
        """State dict of the objective's model on the CPU of rank 0, elsewhere empty; every rank must call it."""
        model = self._objective.model
        split = self._zero_stage == 3
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=split):
            if self.rank:
                return {}
            return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def save(self, folder: Path) -> None:
        """Weights that are trained, and their optimizer; every rank writes its own share.

        Those that are not, often the embedding of a large vocabulary, come from the artifact that training begins with.
        """
        self._engine.save_checkpoint(folder, tag=TAG, exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, at the same kind of ZeRO stage.

        At another world size it must have been converted, but under ZeRO stage 0, where nothing is split.
        """
        self._engine.load_checkpoint(folder, tag=TAG, custom_load_fn=_load_trained)

    def close(self) -> None:
        """Frees what DeepSpeed holds; the objective's weights stay."""
        self._engine.destroy()


def deepspeed_config(settings: LoopSettings, *, universal: bool) -> dict[str, Any]:
    """All that DeepSpeed is told. Nothing else reaches it: no file, and no field of a resource but these.

    Precision is not its affair: weights, gradients and their sums are fp32, and autocast does the rest.
    """
    return {
        # Batches are the objective's affair; DeepSpeed only wants consistent numbers.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": settings.clip_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "checkpoint": {"load_universal": universal},
    }


def _load_trained(src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """Loads weights of which only those that are not trained may be missing.

    Raises:
        RuntimeError: others are.
    """
    missing = set(dst.load_state_dict(src, strict=False).missing_keys)
    lacking = sorted(missing & {name for name, p in dst.named_parameters() if p.requires_grad})
    if lacking:
        raise RuntimeError(f"the checkpoint lacks {', '.join(lacking)}")


class _Autocast(nn.Module):
    """DeepSpeed switches autocast off around a module's forward pass, so it is switched on inside."""

    def __init__(self, objective: nn.Module, *, enabled: bool) -> None:
        super().__init__()
        self.objective = objective
        self.enabled = enabled

    def forward(self, batch: Any, scale: Tensor) -> Any:
        with torch.autocast(scale.device.type, torch.bfloat16, enabled=self.enabled):
            return self.objective(batch, scale)


def join_process_group() -> torch.device:
    """Joins the group that RANK and torch's other variables describe, or makes a group of one.

    Returns this rank's device. Joining again changes nothing. A group of several is left by whoever joined it, and
    only when all went well: where a peer is gone, leaving may never end.
    """
    on_gpu = torch.cuda.is_available()
    backend = "nccl" if on_gpu else "gloo"
    if not dist.is_initialized():
        if "RANK" in environment():
            dist.init_process_group(backend, timeout=_PATIENCE)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")  # noqa: TID251 - DeepSpeed insists on it
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            atexit.register(dist.destroy_process_group)  # NCCL complains about a group that is never left
    # Compiled at start (100 s) for an all-reduce among the processes of one machine without a GPU: not worth it.
    compatible_ops["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    if not on_gpu:
        torch.set_flush_denormal(True)  # early gradients are full of them, and they are slow
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
    torch.cuda.set_device(device)
    return device
