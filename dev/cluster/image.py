"""Container images from a few files: no registry, no engine.

The development image is an empty root. Its programs come through volumes, at the paths where this machine has them.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEV = "localhost/osprey-dev:1"
PAUSE = "localhost/pause:1"
USER = 1000
_LINKS = ("bin", "sbin", "lib", "lib64")
_FOLDERS = ("usr", "tmp", "proc", "sys", "dev", "etc", "run", "var", "home")
_ACCOUNTS = {
    "etc/passwd": f"root:x:0:0::/:/bin/sh\nosprey:x:{USER}:{USER}::/tmp:/bin/sh\n",
    "etc/group": f"root:x:0:\nosprey:x:{USER}:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


def dev_image() -> bytes:
    """Return the archive of the development image: links into /usr, empty folders, one user."""
    return _archive(DEV, _root(), {"User": f"{USER}:{USER}", "WorkingDir": "/tmp"})


def pause_image(program: Path) -> bytes:
    """Return the archive of the image for the process that holds a pod's namespaces."""
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    return _archive(PAUSE, layer, {"Entrypoint": ["/pause"]})


def _root() -> bytes:
    links = {name: f"usr/{name}" for name in _LINKS}
    return _tar({name: text.encode() for name, text in _ACCOUNTS.items()}, links, _FOLDERS)


def _tar(
    files: Mapping[str, bytes],
    links: Mapping[str, str] | None = None,
    folders: tuple[str, ...] = (),
    mode: int = 0o644,
) -> bytes:
    """Write a tar archive that is the same, byte for byte, for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _archive(name: str, layer: bytes, config: Mapping[str, Any]) -> bytes:
    """Return an OCI image archive with one layer."""
    oci = "application/vnd.oci.image"
    described = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    configuration = json.dumps(described).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": _descriptor(f"{oci}.config.v1+json", configuration),
            "layers": [_descriptor(f"{oci}.layer.v1.tar", layer)],
        }
    ).encode()
    entry = {
        **_descriptor(f"{oci}.manifest.v1+json", manifest),
        "platform": {"architecture": "amd64", "os": "linux"},
        "annotations": {"io.containerd.image.name": name},
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    blobs = {f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (layer, configuration, manifest)}
    return _tar({"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": index, **blobs})


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
