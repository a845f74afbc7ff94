"""Where development keeps what it downloads, builds and runs; overridden by environment variables."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements"


def cache_home() -> Path:
    """The folder outside the tree for what is slow to make: ``OSPREY_CACHE``, or one in the user's cache."""
    environment = os.environ  # noqa: TID251 - this is the settings module
    if own := environment.get("OSPREY_CACHE"):
        return Path(own).resolve()
    user = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user).expanduser() / "osprey"
