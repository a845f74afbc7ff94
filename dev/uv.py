"""uv, which installs packages: the one on PATH, or the pinned release in the cache, where no PATH need find it."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from dev.settings import REQUIREMENTS, cache_home


def find_uv() -> Path:
    """Return uv's path, installing the pinned release into the cache if there is none."""
    if found := shutil.which("uv"):
        return Path(found)
    locked = REQUIREMENTS / "uv.lock"
    folder = cache_home() / f"uv-{hashlib.sha256(locked.read_bytes()).hexdigest()[:8]}"
    program = folder / "bin" / "uv"
    if not program.exists():
        print("installing uv", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        done = subprocess.run([*pip, "--require-hashes", "--requirement", str(locked)], check=False)
        if done.returncode:
            raise SystemExit("uv is missing and pip could not bring it: install python3-pip, or uv, and run again")
    return program
