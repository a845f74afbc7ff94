"""Where development keeps what it downloads, builds and runs; overridden by environment variables."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements"

_environment = os.environ  # noqa: TID251 - this is the settings module


def cache_home() -> Path:
    """The folder outside the tree for what is slow to make: ``OSPREY_CACHE``, or one in the user's cache."""
    if own := _environment.get("OSPREY_CACHE"):
        return Path(own).resolve()
    user = _environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user).expanduser() / "osprey"


def state_home() -> Path:
    """The folder whose subfolders are running clusters and servers: ``OSPREY_STATE``, or one in the cache."""
    if own := _environment.get("OSPREY_STATE"):
        return Path(own).resolve()
    return cache_home() / "state"
