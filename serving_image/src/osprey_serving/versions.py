"""A folder whose content is replaced as a whole, under a reader that knows only the folder's path.

    <root>/<name>/…           one folder a version
    <root>/current            a link to the one that is shown: replacing it replaces everything at once
    <root>/config.json …      links into `current`

The root itself can be a mounted volume, which no link could replace.
"""

import shutil
from pathlib import Path

CURRENT = "current"


def show(root: Path, folder: Path) -> None:
    """Make the files of `folder` those of `root`; a folder inside the root is linked to relatively."""
    root.mkdir(parents=True, exist_ok=True)
    _link(root / CURRENT, folder.relative_to(root) if folder.is_relative_to(root) else folder)
    names = {path.name for path in folder.iterdir()}
    for path in root.iterdir():
        if path.is_symlink() and path.name != CURRENT and path.name not in names:
            path.unlink()
    for name in names:
        _link(root / name, Path(CURRENT, name))


def shown(root: Path) -> str | None:
    """Return the name of the version that is shown, or None where there is none."""
    current = root / CURRENT
    return current.readlink().name if current.is_symlink() else None


def remove_others(root: Path, keep: Path) -> None:
    """Delete all versions but one."""
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink() and path != keep:
            shutil.rmtree(path)


def _link(link: Path, to: Path) -> None:
    """Make or replace a link in one step: a reader sees the old one or the new one."""
    if link.is_symlink() and link.readlink() == to:
        return
    unfinished = link.with_name(f".{link.name}.new")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(to)
    unfinished.replace(link)
