"""English text for Stage 2, from Debian packages that are installed, never committed: documents one by one."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

PYTHON_DOCUMENTATION = Path("/usr/share/doc/python3.11/html/_sources")
DICTIONARY = Path("/usr/share/dictd/foldoc.dict.dz")
PACKAGES = {"python3.11-doc": PYTHON_DOCUMENTATION, "dict-foldoc": DICTIONARY}


def documents() -> Iterator[str]:
    """Yield the pages of the Python documentation and the entries of the dictionary of computing.

    Raises:
        FileNotFoundError: a package is not installed; the message names it.
    """
    for package, path in PACKAGES.items():
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: install the Debian package {package} (make setup does)")
    for page in sorted(PYTHON_DOCUMENTATION.rglob("*.rst.txt")):
        yield page.read_text(encoding="utf-8", errors="replace")
    entries = gzip.decompress(DICTIONARY.read_bytes()).decode("utf-8", errors="replace")
    for entry in re.split(r"\n(?=\S)", entries):
        flowing = re.sub(r"\n\s+", " ", entry).strip()
        if flowing:
            yield flowing
