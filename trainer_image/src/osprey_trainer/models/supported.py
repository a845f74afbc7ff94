"""What can be run, told from a model's `config.json` alone, before anything large is downloaded.

Quantised weights are unpacked when they are loaded, wherever transformers can do so (FP8, MXFP4, compressed-tensors):
then any machine runs them, by the code that runs all other models, in the precision of the run. It takes the memory of
a model in floating point. The other methods (GPTQ, AWQ, bitsandbytes, …) run on kernels of packages of their own.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.body import Body

_BACKBONE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_backbone(uri: str, config: Mapping[str, Any]) -> None:
    """Checks that a backbone can be cut from a model: its body is computed here, on weights in floating point.

    Raises:
        StageError: UNSUPPORTED_MODEL by the name of its architecture, its quantisation or another trait.
    """
    architecture = _architecture(config)
    if architecture not in _BACKBONE_ARCHITECTURES:
        raise _unsupported(
            f"{uri} is a {architecture}; a backbone can be cut from a {', '.join(_BACKBONE_ARCHITECTURES)}: "
            "name another source."
        )
    quantisation = _quantisation(config)
    if quantisation:
        raise _unsupported(
            f"The weights of {uri} are quantised ({_method(quantisation)}); a backbone is trained on: name the same "
            "model in floating point."
        )
    Body.from_hf(config)


def unpacked(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantisation of a `config.json` as it is to be loaded; None for weights in floating point."""
    found = dict(_quantisation(config))
    if found and AutoHfQuantizer.supports_quant_method(found):
        with suppress(ImportError, TypeError, ValueError):  # told by `check_target`
            if hasattr(AutoQuantizationConfig.from_dict(dict(found)), "dequantize"):
                found["dequantize"] = True
    return found or None


def check_runs_here(name: str, config: Mapping[str, Any], device: torch.device) -> None:
    """Checks that this very machine can run a target's quantisation, before its weights are loaded.

    Raises:
        StageError: UNSUPPORTED_MODEL by the name of its quantisation.
    """
    _check_quantisation(name, config, device)


def check_target(uri: str, config: Mapping[str, Any]) -> None:
    """Checks that transformers runs a model on this machine, and that its layers can be tapped.

    Whether there is a GPU for it is another pod's to say.

    Raises:
        StageError: UNSUPPORTED_MODEL by the name of its architecture, or of its quantisation.
    """
    architecture = _architecture(config)
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or config.get("is_encoder_decoder"):
        own = " Its code of its own (auto_map) is not run." if config.get("auto_map") else ""
        raise _unsupported(
            f"{uri} is a {architecture or 'model without an architecture'}, which is no causal language model "
            f"that transformers knows: name another target.{own}"
        )
    _check_quantisation(uri, config, None)
    _check_layers(uri, architecture, config)


def _architecture(config: Mapping[str, Any]) -> str:
    return next(iter(config.get("architectures") or ()), "")


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the model, or of a multimodal one's language model."""
    text = config.get("text_config") or {}
    found: Mapping[str, Any] = config.get("quantization_config") or text.get("quantization_config") or {}
    return found


def _check_quantisation(uri: str, config: Mapping[str, Any], device: torch.device | None) -> None:
    """Of the machine that has the device; None: another one, which may have a GPU."""
    quantisation = unpacked(config)
    if quantisation is None:
        return
    where, instead = "this image", "use an image with what is missing"
    try:
        if not AutoHfQuantizer.supports_quant_method(quantisation):
            problem = "transformers does not know it"
        else:
            whole = None if device is None or device.type == "cpu" else {"": device}
            AutoHfQuantizer.from_config(quantisation, pre_quantized=True).validate_environment(device_map=whole)
            return
    except RuntimeError as error:  # it wants a GPU
        if device is None:
            return
        problem, where = str(error), "this machine"
        instead = "give the stage GPUs that can (job.gpusPerNode)"
    except (ImportError, ValueError, TypeError) as error:
        problem = str(error)
    raise _unsupported(
        f"The weights of {uri} are quantised ({_method(quantisation)}), which {where} cannot run: "
        f"{' '.join(problem.split())[:200]}. Name the same model in floating point, or {instead}."
    )


def _method(quantisation: Mapping[str, Any]) -> str:
    old = next((name for name in ("load_in_4bit", "load_in_8bit") if quantisation.get(name)), None)
    return str(quantisation.get("quant_method") or (old and f"bitsandbytes, {old}"))


def _check_layers(uri: str, architecture: str, config: Mapping[str, Any]) -> None:
    """Builds the model without weights: three of its decoder's `layers` are tapped, and its head makes the logits."""
    fields = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(fields))
        layers, head = model.get_decoder().layers, model.get_output_embeddings()
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise _unsupported(
            f"{uri} is a {architecture} whose layers cannot be tapped ({reason}): name another target."
        ) from error
    if head is None or getattr(head, "bias", None) is not None:
        raise _unsupported(f"{uri} is a {architecture} whose language-model head has a bias, or is none.")
    if len(layers) != model.config.get_text_config().num_hidden_layers:
        raise _unsupported(f"{uri} is a {architecture} with {len(layers)} layers, but its config.json says otherwise.")


def _unsupported(message: str) -> StageError:
    return StageError(FailureReason.UNSUPPORTED_MODEL, message)
