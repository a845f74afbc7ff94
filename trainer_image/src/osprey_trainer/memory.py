"""What distillation needs of a device's memory at least, known before anything large is loaded.

What the unroll keeps for its backward pass is counted, not estimated: the same code runs on a drafter without data, of
torch's fake tensors, and what autograd saves is added up. In practice more is needed, for what lives only for a moment.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.models.draft import DraftConfig, Drafter
from osprey_trainer.models.hf_names import read_config, weight_files
from osprey_trainer.models.supported import unpacked
from osprey_trainer.models.target import TargetStates
from osprey_trainer.optimizers import is_matrix
from osprey_trainer.unroll import unroll

log = logging.getLogger(__name__)

_GIB = 1 << 30
_PACKED = {"U8": 2, "I32": 8}
"""Weights of four bits in a number of a quantised model's tensors, by its type."""
_CPU = torch.device("cpu")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Need:
    """Bytes on one device.

    Attributes:
        target: weights of the target that teaches, this process's share.
        drafter: weights, gradient and optimizer, this process's share.
        unroll: what the unroll over the longest dialogues keeps for its backward pass.
    """

    target: int
    drafter: int
    unroll: int

    @property
    def total(self) -> int:
        """Of all."""
        return self.target + self.drafter + self.unroll


def drafter_bytes(config: DraftConfig, *, trains_embedding: bool, muon: bool, zero_stage: int, world_size: int) -> int:
    """Weights, gradient and optimizer of a drafter in fp32, as ZeRO divides them."""
    with torch.device("meta"):
        parameters = dict(Drafter(config).named_parameters())
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    weights = sum(sizes.values())
    trained = weights if trains_embedding else weights - sizes["embed_tokens.weight"]
    # A gradient is as large as what is trained, and AdamW's two moments twice as large; Muon has one.
    one_moment = sum(sizes[name] for name, p in parameters.items() if muon and is_matrix(name, p))
    parts = ((weights, 3), (trained, 2), (2 * trained - one_moment, 1))
    return sum(size // (world_size if zero_stage >= stage else 1) for size, stage in parts)


def unroll_bytes(
    config: DraftConfig,
    *,
    tokens: Sequence[int],
    rows: Sequence[int],
    steps: int,
    bf16: bool,
    device: torch.device = _CPU,
) -> int:
    """What one unroll keeps for its backward pass, its weights not counted.

    Args:
        config: of the drafter.
        tokens: of each dialogue of the batch, prompt and answer.
        rows: supervised ones of each dialogue.
        steps: K.
        bf16: matrix products are in bfloat16.
        device: of a kind whose kernels and autocast keep what they keep; nothing is allocated there.
    """
    with FakeTensorMode(), device, torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        drafter = Drafter(config)
        batch = _batch(config, tuple(tokens), torch.bfloat16 if bf16 else torch.float32)
        # The last token of a dialogue has no row: nothing follows it.
        asked = [
            end - 1 - count + row for end, count in zip(accumulate(tokens), rows, strict=True) for row in range(count)
        ]
        weights = {_storage(tensor) for tensor in (*drafter.parameters(), *drafter.buffers())}
        kept: dict[int, int] = {}
        alive: list[Tensor] = []  # a storage that is freed would give its number to another one

        def keep(tensor: Tensor) -> Tensor:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            unroll(drafter, batch, asked, steps)
    return sum(size for storage, size in kept.items() if storage not in weights)


def _batch(config: DraftConfig, lengths: tuple[int, ...], dtype: torch.dtype) -> DialogueBatch:
    total, hidden = sum(lengths), config.target_hidden_size
    return DialogueBatch(
        ids=torch.zeros(total, dtype=torch.long),
        lengths=lengths,
        answer=torch.ones(total, dtype=torch.bool),
        states=TargetStates(
            taps=torch.zeros(total, config.num_taps * hidden, dtype=dtype),
            last_hidden=torch.zeros(total, hidden, dtype=dtype),
        ),
        greedy=None,
        names=("",) * len(lengths),
    )


def _storage(tensor: Tensor) -> int:
    number: int = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return number


def target_bytes(folder: Path, dtype: torch.dtype, *, processes: int) -> int:
    """Weights of a model in a local folder, as one of `processes` that divide them will hold them.

    Only the files' headers are read. Of weights whose quantisation stays as it is the files' own size counts; others
    are unpacked.
    """
    files = weight_files(folder)
    quantised = unpacked(read_config(folder))
    if quantised is not None and not quantised.get("dequantize"):
        return sum(path.stat().st_size for path in files) // processes
    count = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the reader is no mapping
                tensor = file.get_slice(name)
                packed = 1 if quantised is None else _PACKED.get(tensor.get_dtype(), 1)
                count += packed * torch.Size(tensor.get_shape()).numel()
    return count * dtype.itemsize // processes


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU; of this machine, or of the container's limit, for a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # another kind of control group, or "max"
        return machine


def check(need: Need, *, tokens: int, available: int) -> None:
    """Refuses what cannot fit.

    Args:
        need: of the longest dialogues.
        tokens: of the longest of them, prompt and answer together.
        available: bytes of the device.

    Raises:
        StageError: INVALID_CONFIG, with about the length that would fit.
    """
    log.info("a process needs at least %s GiB of memory, and has %s", _gib(need.total), _gib(available))
    if need.total <= available:
        return
    room = available - need.target - need.drafter
    advice = (
        f"lower distillation.sequenceLength, to {tokens * room // need.unroll} or less"
        if room > 0
        else "use larger GPUs, more of them with job.zeroStage 3 and distillation.optimizer AdamW, or a "
        "distillation.teacher that is shared or captured"
    )
    raise StageError(
        FailureReason.INVALID_CONFIG,
        f"Distillation needs at least {_gib(need.total)} GiB of the {_gib(available)} that a process has: "
        f"{_gib(need.target)} the target, {_gib(need.drafter)} the drafter with gradient and optimizer, "
        f"{_gib(need.unroll)} the unroll over a dialogue of {tokens} tokens: {advice}.",
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
