"""Replacing the drafter of a running server: ``/update_weights_from_disk`` with ``draft:`` before the path.

SGLang's own endpoint would load the folder into the target as well, and end the server.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from osprey_serving.plugin import checkpoint

PREFIX = "draft:"


class SwapRefusedError(ValueError):
    """The new drafter cannot replace the running one; the message says what to do instead."""


def update_weights_from_disk(original: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Swap the drafter if the path asks for it; nothing is loaded before everything is checked."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput  # noqa: PLC0415  import cost

    success, message = False, ""
    try:
        if not request.model_path.startswith(PREFIX):
            _check_target_update(manager, Path(request.model_path))
            return original(manager, request)
        success, message = _swap(manager, request)
    except (SwapRefusedError, checkpoint.CheckpointError) as error:
        message = str(error)
    return UpdateWeightFromDiskReqOutput(success=success, message=message, num_paused_requests=0)


def _swap(manager: Any, request: Any) -> tuple[bool, str]:
    folder = Path(request.model_path.removeprefix(PREFIX))
    runners = [runner for _, runner in manager._select_runners("draft")]  # noqa: SLF001  no public way
    if not runners:
        raise SwapRefusedError("this server runs without a drafter; restart it with one")
    for runner in runners:
        _check_replaces(folder, runner.model)
    for runner in runners:
        # SGLang's EAGLE-3 drafter shares the target's embedding: loading the checkpoint's would change
        # the target.
        keep = None if _is_osprey(runner.model) else _is_not_embedding
        success, message = runner.weight_updater.update_weights_from_disk(
            str(folder), request.load_format, weight_name_filter=keep
        )
        if not success:
            return False, message
    manager.record_weight_version_after_update(request.weight_version)
    return manager.flush_cache_after_weight_update(  # type: ignore[no-any-return]  # SGLang has no types
        request, success=True, message="The drafter was replaced."
    )


def _check_replaces(folder: Path, model: Any) -> None:
    """Check that the folder holds a drafter of the running one's kind, shape and draft vocabulary."""
    config = checkpoint.read_config(folder)
    running = model.config.to_dict()
    # The body's other keys show in the shapes of its tensors, or are SGLang's defaults.
    for key in ("architectures", "swap_h_and_emb", "num_hidden_layers", "num_attention_heads", "eagle_config"):
        if config.get(key) != running.get(key):
            raise SwapRefusedError(
                f"the new drafter's config.json has {key}: {config.get(key)!r}, the running one's "
                f"{running.get(key)!r}; restart the server with the new drafter"
            )
    if _is_osprey(model):
        checkpoint.check(folder)
    ids = checkpoint.target_ids(folder)
    old = model.hot_token_id
    if (old is None) != (ids is None) or (ids is not None and ids != old.tolist()):
        raise SwapRefusedError(
            "the new drafter has another draft vocabulary (d2t), which SGLang copies once at start; "
            "restart the server with the new drafter"
        )


def _check_target_update(manager: Any, folder: Path) -> None:
    """Refuse what would end the server: one checkpoint loaded into the target and an Osprey drafter."""
    try:
        architecture = checkpoint.architecture(checkpoint.read_config(folder))
    except checkpoint.CheckpointError:
        architecture = ""  # a hub name, or SGLang's to refuse
    if architecture in checkpoint.ARCHITECTURES:
        raise SwapRefusedError(f"{folder} is a drafter; write {PREFIX}{folder} to replace the running one")
    if any(_is_osprey(runner.model) for _, runner in manager._select_runners("draft")):  # noqa: SLF001
        raise SwapRefusedError(
            "the target of a server with an Osprey drafter is not updated in place; restart the server"
        )


def _is_osprey(model: Any) -> bool:
    return checkpoint.is_osprey(model.config.to_dict())


def _is_not_embedding(name: str) -> bool:
    return not name.endswith("embed_tokens.weight")
