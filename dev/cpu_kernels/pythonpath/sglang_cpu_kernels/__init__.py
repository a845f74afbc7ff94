"""SGLang plugin that lets a CPU without AMX use SGLang's speculative-decoding attention backend."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Set SGLang up for the stand-in kernels; SGLang calls this in its main process.

    * The backend name ``torch_native`` builds SGLang's ``intel_amx`` backend. Without AMX, SGLang replaces
      the attention backend by ``torch_native``, which knows no target verification. ``intel_amx`` does, and
      all it needs from the CPU are the operators that ``sgl_kernel`` beside this package provides.
    * Its scheduler and detokenizer are forked, not spawned: each of them would otherwise import SGLang
      again, 15 to 25 s of a core. Spawning is for CUDA, which does not survive a fork.
    """
    # SGLang takes seconds to import, and nothing of it is needed before this is called.
    from sglang.srt.layers.attention import attention_registry  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    backends: dict[str, Callable[[Any], Any]] = attention_registry.ATTENTION_BACKENDS
    backends["torch_native"] = backends["intel_amx"]
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _fork(*_: Any) -> None:
    multiprocessing.set_start_method("fork", force=True)
