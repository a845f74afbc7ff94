"""The target's folder, as the pod's stage container sees it."""

from pathlib import Path

from osprey_api.naming import MODEL_PATH
from osprey_api.sources import ClaimSource
from osprey_api.stages import Pinned
from osprey_runtime.context import StageContext
from osprey_runtime.settings import claims_root
from osprey_runtime.sources import parsed


def folder(context: StageContext, target: Pinned) -> Path:
    """Return the folder that the server of the pod serves, or else a copy of the model of one's own.

    Only its tokenizer is read: where the init container `fetch` has brought and verified the target, in a volume that
    this container mounts too, the weights are neither downloaded nor read again.
    """
    source = parsed(target.uri)
    fetched = claims_root() / source.claim / source.path if isinstance(source, ClaimSource) else Path(MODEL_PATH)
    return fetched if (fetched / "config.json").is_file() else context.model(target, weights=False)
