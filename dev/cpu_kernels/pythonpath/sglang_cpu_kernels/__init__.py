"""SGLang plugin that lets a CPU without AMX use SGLang's speculative-decoding attention backend."""

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Make the backend name ``torch_native`` build SGLang's ``intel_amx`` backend.

    Without AMX, SGLang replaces the attention backend by ``torch_native``, which knows no target
    verification. The ``intel_amx`` backend does, and all it needs from the CPU are the operators
    that ``sgl_kernel`` beside this package provides.
    """
    from sglang.srt.layers.attention import attention_registry  # noqa: PLC0415  SGLang takes seconds

    backends: dict[str, Callable[[Any], Any]] = attention_registry.ATTENTION_BACKENDS
    backends["torch_native"] = backends["intel_amx"]
