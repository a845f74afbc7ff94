"""What a server's pod must have on its disk before SGLang starts, and while it runs."""

from osprey_api.base import ApiModel
from osprey_api.stages import ArtifactRef, Pinned, StorageLocation

WANTED_VARIABLE = "OSPREY_WANTED"
"""`ServerFiles` as JSON, for pods whose files never change; a Deployment mounts them at `naming.WANTED_PATH`."""
ADMIN_KEY_VARIABLE = "OSPREY_ADMIN_KEY"
"""SGLang's admin API key, from a Secret."""


class ServerFiles(ApiModel):
    """The target and the drafter of one server."""

    storage: StorageLocation
    target: Pinned
    """Fetched to `naming.MODEL_PATH` where it comes from S3; a hub model is downloaded there too, at its commit."""
    drafter: ArtifactRef | None
    """Fetched to `naming.DRAFTER_PATH`; None: the target is served alone."""
