"""The states of a Gemma 3 target, whole.

SGLang 0.5.23 keeps the residual stream of Gemma 3 beside the output of a layer's last norm, and hands only the latter
to a drafter (sgl-project/sglang#39286 is open). Outputs stay right, and acceptance falls: so the stream is added here.
"""

from functools import partial
from typing import Any

TARGET = "sglang.srt.models.gemma3_causal.Gemma3ForCausalLM.set_eagle3_layers_to_capture"
"""Also called for the language model of a Gemma 3 that sees."""


def capture_streams(_result: None, causal: Any, *_: Any, **__: Any) -> None:
    """Have the model give the whole stream before each layer that was just chosen."""
    model = causal.model
    streams: dict[int, Any] = {}
    for index in model.layers_to_capture:
        # The stream after the last layer is what the final norm gets.
        module = model.layers[index] if index < len(model.layers) else model.norm
        module.register_forward_pre_hook(partial(_keep, streams, index), with_kwargs=True)
    model.register_forward_hook(partial(_give, streams))


def _keep(streams: dict[int, Any], index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, residual = args or (kwargs["hidden_states"], kwargs["residual"])
    # A copy, also before the first layer: the kernels of later norms write into what they are given.
    streams[index] = hidden.clone() if residual is None else hidden + residual


def _give(streams: dict[int, Any], _model: Any, _args: Any, output: tuple[Any, Any]) -> tuple[Any, list[Any]]:
    hidden, parts = output
    if len(parts) != len(streams):
        raise RuntimeError(f"SGLang captured {len(parts)} states of Gemma 3, and {len(streams)} were chosen")
    return hidden, [streams.pop(index) for index in sorted(streams)]
