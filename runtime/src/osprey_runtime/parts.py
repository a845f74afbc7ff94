"""Files of an artifact that are uploaded one by one while its stage still runs.

Some artifacts are larger than a pod's disk, and dearer than to be begun anew when the pod is lost. A part is stored by
its content, and counts once its record is written:

<prefix>/parts/<SHA-256>            the file
<prefix>/parts/records/<path>       its path within the artifact, size and SHA-256

The manifest names the parts beside the other files. A stage that begins again finds the records, and makes the rest. Of
a finished artifact that is damaged the good parts get their records back.
"""

from pathlib import Path

from pydantic import ValidationError

from osprey_runtime.manifest import PARTS, File, part_key, record_key
from osprey_runtime.store import Store, content_of, join


class Parts:
    """The parts of one artifact; any number of processes may add different ones at the same time."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def add(self, path: Path, name: str) -> None:
        """Upload a file as a part, and return when it counts.

        Args:
            path: the file; it may be deleted afterwards.
            name: its path within the artifact.

        Raises:
            StageError: the store can't be used.
        """
        content = content_of(path)
        file = File(path=name, size=content.size, sha256=content.sha256, part=True)
        self._store.upload(path, join(self._prefix, part_key(file)))
        self._store.write(join(self._prefix, record_key(name)), file.model_dump_json().encode())

    def found(self) -> dict[str, File]:
        """Return the parts that count, by their path within the artifact."""
        stored = {entry.key: entry.size for entry in self._store.list(join(self._prefix, PARTS))}
        found: dict[str, File] = {}
        records = f"{join(self._prefix, record_key(''))}/"
        for key in stored:
            if not key.startswith(records):
                continue
            try:
                file = File.model_validate_json(self._store.read(key))
            except (ValidationError, FileNotFoundError):
                continue  # written by another version, or deleted meanwhile: it is made anew
            if stored.get(join(self._prefix, part_key(file))) == file.size:
                found[file.path] = file
        return found

    def read(self, file: File) -> bytes:
        """Return the content of a small part.

        Raises:
            StageError: the store can't be used.
            FileNotFoundError: it was deleted meanwhile.
        """
        return self._store.read(join(self._prefix, part_key(file)))
