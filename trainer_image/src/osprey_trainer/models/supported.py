"""What can be run, told from a model's `config.json` alone, before anything large is downloaded."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer

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
    method = _quantisation(config).get("quant_method")
    if method is not None:
        raise _unsupported(
            f"The weights of {uri} are quantised ({method}); a backbone is trained on: name the same model in floating "
            "point."
        )
    Body.from_hf(config)


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
    _check_quantisation(uri, _quantisation(config))
    _check_layers(uri, architecture, config)


def _architecture(config: Mapping[str, Any]) -> str:
    return next(iter(config.get("architectures") or ()), "")


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the model, or of a multimodal one's language model."""
    text = config.get("text_config") or {}
    found: Mapping[str, Any] = config.get("quantization_config") or text.get("quantization_config") or {}
    return found


def _check_quantisation(uri: str, quantisation: Mapping[str, Any]) -> None:
    problem = _problem_with(dict(quantisation)) if quantisation else None
    if problem is not None:
        raise _unsupported(
            f"The weights of {uri} are quantised ({quantisation.get('quant_method')}), which this image cannot run: "
            f"{' '.join(problem.split())[:200]}. Name the same model in floating point, or use an image with what is "
            "missing."
        )


def _problem_with(quantisation: dict[str, Any]) -> str | None:
    """What transformers says against it, if anything."""
    try:
        if not AutoHfQuantizer.supports_quant_method(quantisation):
            return "transformers does not know it"
        AutoHfQuantizer.from_config(quantisation, pre_quantized=True).validate_environment(device_map=None)
    except RuntimeError:
        return None  # it wants a GPU, which the pod that runs the target may have
    except (ImportError, ValueError, TypeError) as error:
        return str(error)
    return None


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
