"""Copy the SGLang plugin, and only it, into a folder for PYTHONPATH of a stock SGLang image.

``python -m osprey_serving.plugin_install DEST`` is an init container's command. Standard library only.
"""

import argparse
import base64
import hashlib
import shutil
from importlib.metadata import distribution
from pathlib import Path

_NAME = "osprey-serving"
_GROUP = "sglang.srt.plugins"


def install(destination: Path) -> Path:
    """Write the package ``osprey_serving.plugin`` and the metadata by which SGLang finds it.

    What an earlier install left there is replaced, so that a restarted init container gives the same folder.

    Returns:
        The dist-info folder.
    """
    version = distribution(_NAME).version
    package = destination / "osprey_serving"
    info = destination / f"osprey_serving-{version}.dist-info"
    for old in (package, *destination.glob("osprey_serving-*.dist-info")):
        if old.exists():
            shutil.rmtree(old)
    source = Path(__file__).parent
    package.mkdir(parents=True)
    shutil.copyfile(source / "__init__.py", package / "__init__.py")
    shutil.copytree(source / "plugin", package / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    entries = distribution(_NAME).entry_points.select(group=_GROUP)
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {version}\n")
    lines = [f"[{_GROUP}]", *(f"{entry.name} = {entry.value}" for entry in entries)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    files = sorted(path for folder in (package, info) for path in folder.rglob("*") if path.is_file())
    record = [_record_line(path, destination) for path in files]
    record.append(f"{(info / 'RECORD').relative_to(destination).as_posix()},,")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return info


def _record_line(path: Path, root: Path) -> str:
    content = path.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path.relative_to(root).as_posix()},sha256={digest},{len(content)}"


def main() -> None:
    """Install into the folder named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m osprey_serving.plugin_install",
        description="Copy the SGLang plugin into a folder for PYTHONPATH of a stock SGLang image.",
    )
    parser.add_argument("destination", metavar="DEST", type=Path)
    install(parser.parse_args().destination)


if __name__ == "__main__":
    main()
