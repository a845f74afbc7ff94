"""The frozen target: its tapped hidden states and its last hidden state, never its logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.supported import check_runs_here, unpacked
from osprey_trainer.teacher_head import TeacherHead


def default_tapped_layers(num_layers: int) -> tuple[int, ...]:
    """The three layers whose *inputs* are tapped: [2, n//2, n-3], as SGLang and vLLM choose by default.

    Targets of 4 to 6 layers, too small for three distinct ones, get their last three.

    Raises:
        StageError: UNSUPPORTED_MODEL for fewer than three layers.
    """
    if num_layers < 3:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"The target has {num_layers} layers; three are tapped, so it needs at least three.",
        )
    layers = sorted({2, num_layers // 2, num_layers - 3})
    return tuple(layers) if len(layers) == 3 else tuple(range(num_layers - 3, num_layers))


def check_tapped_layers(tapped_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Three ascending layers in [0, num_layers).

    Raises:
        StageError: INVALID_CONFIG otherwise.
    """
    layers = tuple(tapped_layers)
    if len(layers) != 3 or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"Tapped layers {list(layers)} are not three ascending layers of a target with {num_layers} "
            f"layers; they name the layers whose input is tapped, for example "
            f"{list(default_tapped_layers(num_layers))}.",
        )
    return layers


def check_shares(folder: Path, tensor_parallel: int) -> None:
    """Whether a model's layers can be shared by so many processes; its config alone is read.

    Raises:
        StageError: UNSUPPORTED_MODEL if transformers has no plan for it; INVALID_CONFIG if its heads do not divide.
    """
    if tensor_parallel == 1:
        return
    config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    if not config.base_model_tp_plan:
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"transformers has no tensor-parallel plan for {config.model_type}: set "
            "distillation.teacher.tensorParallel to 1.",
        )
    heads = config.num_key_value_heads or config.num_attention_heads
    if heads % tensor_parallel or config.num_attention_heads % tensor_parallel:
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"The target's {config.num_attention_heads} heads and {heads} key-value heads cannot be shared by "
            f"{tensor_parallel} processes: set distillation.teacher.tensorParallel to a divisor of both.",
        )


@dataclass(frozen=True)
class TargetStates:
    """What the drafter learns from.

    Attributes:
        taps: [B, T, 3·Ht], inputs of the three tapped layers, shallowest first.
        last_hidden: [B, T, Ht], output of the final norm: what the head makes logits of.
    """

    taps: Tensor
    last_hidden: Tensor


class Target:
    """A causal language model in a local Hugging Face folder, frozen.

    Attributes:
        tapped_layers: "input to layer j" convention; ids in an exported `eagle_config` are these minus one.
        head: [V, Ht], the language-model head.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tapped_layers: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        tensor_parallel: int = 1,
    ) -> None:
        """Loads the model.

        Args:
            folder: its folder.
            tapped_layers: "input to layer j" convention; None: the default ones.
            dtype: of its weights.
            device: of this process.
            tensor_parallel: processes that share every layer, by transformers' plan for the model. Consecutive ranks
                of the process group share; where there are several such groups they divide the weights once more, so
                all processes must call `states` equally often.

        Raises:
            StageError: UNSUPPORTED_MODEL if its head has a bias, or this machine cannot run its quantisation;
                INVALID_CONFIG for impossible tapped layers.
        """
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = whole.get_text_config()  # of a multimodal model the language model's part
        num_layers = config.num_hidden_layers
        self.tapped_layers = (
            default_tapped_layers(num_layers)
            if tapped_layers is None
            else check_tapped_layers(tapped_layers, num_layers)
        )
        model = _load(folder, whole, dtype=dtype, device=torch.device(device), tensor_parallel=tensor_parallel)
        model.eval().requires_grad_(requires_grad=False)
        self.body: nn.Module = model.get_decoder()
        # Weights that several groups divide are put together by a hook of the whole model.
        self._whole = model if tensor_parallel > 1 else None
        output = model.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise StageError(
                FailureReason.UNSUPPORTED_MODEL,
                "The target's language-model head has a bias; none is supported.",
            )
        weight = output.weight.full_tensor() if isinstance(output.weight, DTensor) else output.weight
        self.head = TeacherHead.of(weight, config.to_dict())
        self._captured: dict[int, Tensor] = {}
        layers: Any = self.body.layers
        for layer in self.tapped_layers:
            layers[layer].register_forward_pre_hook(_capture(layer, self._captured), with_kwargs=True)

    @torch.no_grad()
    def states(self, ids: Tensor) -> TargetStates:
        """ids: int64 [B, T], padded on the right. States of the padding mean nothing.

        Attention is causal, so padding on the right changes no real position and needs no mask.
        """
        last_hidden = self._run(ids)
        taps = torch.cat([self._captured.pop(layer) for layer in self.tapped_layers], dim=-1)
        return TargetStates(taps=taps, last_hidden=last_hidden)

    def _run(self, ids: Tensor) -> Tensor:
        if self._whole is None:
            last_hidden: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
            return last_hidden
        found: list[Tensor] = []
        hook = self.body.register_forward_hook(lambda _body, _inputs, output: found.append(output.last_hidden_state))
        try:
            self._whole(input_ids=ids, use_cache=False, logits_to_keep=1)
        finally:
            hook.remove()
        return found[0]

    @torch.no_grad()
    def greedy_tokens(self, last_hidden: Tensor, *, chunk: int = 256) -> Tensor:
        """The target's most likely next token, logits formed `chunk` rows at a time.

        Needed only for answers that were sampled: in a greedy answer it is the next token.

        Args:
            last_hidden: [..., Ht].
            chunk: rows whose [chunk, V] logits exist at one time.

        Returns:
            int64 [...].
        """
        rows = torch.split(last_hidden.flatten(0, -2), chunk)
        return torch.cat([self.head.logits(x).argmax(-1) for x in rows]).view(last_hidden.shape[:-1])


def _load(folder: Path, config: Any, *, dtype: torch.dtype, device: torch.device, tensor_parallel: int) -> Any:
    """The model, its quantised weights unpacked where that can be."""
    raw = read_config(folder)
    quantised = unpacked(raw)
    if quantised is not None:
        check_runs_here(folder.name, raw, device)
        config.quantization_config = quantised
    options: dict[str, Any] = {"config": config, "dtype": dtype, "local_files_only": True}
    if tensor_parallel > 1:
        options["distributed_config"] = DistributedConfig(
            tp_size=tensor_parallel, fsdp_size=dist.get_world_size() // tensor_parallel
        )
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options).to(device)
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        if quantised is None or isinstance(error, torch.OutOfMemoryError):
            raise
        # What a method's packages need of a machine, they tell only when they are used.
        raise StageError(
            FailureReason.UNSUPPORTED_MODEL,
            f"The quantised weights of {folder.name} cannot be loaded on this machine ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}): name the same model in floating point.",
        ) from error
    if quantised is not None and dtype == torch.float32:
        for parameter in model.parameters():  # MXFP4 is always unpacked to BF16
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
    return model


def _capture(layer: int, captured: dict[int, Tensor]) -> Any:
    # A hook keeps three states; output_hidden_states would keep one per layer. It does not know the target: in a cycle
    # the weights would stay on the GPU after the last use of them.
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[layer] = args[0] if args else kwargs["hidden_states"]

    return hook
