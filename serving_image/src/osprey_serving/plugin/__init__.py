"""Osprey's plugin for a stock SGLang: the drafter's class, a live swap of drafters, and checks before start.

SGLang calls `register` in each of its processes (entry point group ``sglang.srt.plugins``). This package is
all that a serving image gets of Osprey, so it imports nothing else of ours.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from osprey_serving.plugin import checkpoint
from osprey_serving.plugin.failure import stop

SGLANG_VERSIONS = ("0.5.23",)
"""Versions that this plugin was tried with; it reaches into SGLang, so others are refused."""

VERSION_KEY = "osprey_plugin"
"""Where `/server_info` tells this plugin's version: ``internal_states[i][VERSION_KEY]``, one a scheduler."""


def register() -> None:
    """Register the drafter's class and the hooks, or end the process with exit code 64."""
    found = "of an unknown version"
    try:
        found = version("sglang")
        if found not in SGLANG_VERSIONS:
            stop(f"SGLang is {found}; this plugin (osprey-serving {_version()}) knows {', '.join(SGLANG_VERSIONS)}")
        _register()
    except Exception as error:  # noqa: BLE001  SGLang would swallow it and serve without the plugin
        stop(f"cannot be set up in SGLang {found}: {type(error).__name__}: {error}")


def _register() -> None:
    # SGLang takes seconds to import, and nothing of it is needed before this is called.
    from pkgutil import resolve_name  # noqa: PLC0415

    from sglang.srt.models.registry import ModelRegistry, import_model_classes  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from osprey_serving.plugin import gemma3, prompt, swap  # noqa: PLC0415

    # Not ModelRegistry.register: it would import all of SGLang's models, also where that is put off.
    ModelRegistry.models.update(import_model_classes(f"{__name__}.models", strict=True))
    scheduler = "sglang.srt.managers.scheduler_components"
    for target, hook, kind in (
        (
            "sglang.srt.server_args.ServerArgs.resolve_once",
            _check_arguments,
            HookType.BEFORE,
        ),
        (
            f"{scheduler}.internal_state.SchedulerInternalStateController.get_internal_state",
            _add_version,
            HookType.AFTER,
        ),
        (
            f"{scheduler}.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
            swap.update_weights_from_disk,
            HookType.AROUND,
        ),
        (gemma3.TARGET, gemma3.capture_streams, HookType.AFTER),
        (prompt.TARGET, prompt.keep_ids, HookType.AROUND),
    ):
        resolve_name(target)  # raises here; SGLang would only log that the hook has no target
        HookRegistry.register(target, hook, kind)


def _check_arguments(arguments: Any) -> None:
    """Check the drafter before anything is loaded, in the process whose exit code the container has."""
    path = arguments.speculative_draft_model_path
    if path is None or not Path(path).is_dir():  # no drafter, or a hub name: its class checks it
        return
    folder = Path(path)
    try:
        config = checkpoint.read_config(folder)
        architecture = checkpoint.architecture(config)
        if checkpoint.is_osprey(config):
            _check_osprey(folder, architecture, arguments)
        elif architecture == checkpoint.ARCHITECTURES[1]:
            stop(f"{folder}: a drafter of architecture {architecture} needs swap_h_and_emb: true in config.json")
    except checkpoint.CheckpointError as error:
        stop(f"{folder}: {error}")


def _check_osprey(folder: Path, architecture: str, arguments: Any) -> None:
    if architecture not in checkpoint.ARCHITECTURES:
        stop(
            f"{folder}: config.json says swap_h_and_emb and architecture {architecture}; "
            f"an Osprey drafter is one of {', '.join(checkpoint.ARCHITECTURES)}"
        )
    if arguments.speculative_algorithm != "EAGLE3":
        stop(
            f"an Osprey drafter needs --speculative-algorithm EAGLE3, not {arguments.speculative_algorithm}: "
            "only then SGLang hands it the target's hidden states"
        )
    if arguments.enable_multi_layer_eagle:
        stop("--enable-multi-layer-eagle is for other drafters: it runs one layer a step; leave it out")
    checkpoint.check(folder)


def _add_version(output: Any, *_: Any) -> None:
    output.internal_state[VERSION_KEY] = _version()


def _version() -> str:
    return version("osprey-serving")
