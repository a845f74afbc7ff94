"""Where models and data come from: the three kinds of URI, taken apart."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from osprey_api.naming import CLAIM_MOUNT_ROOT

SOURCE_PATTERN = (
    r"^(hf://[^/?]+/[^/?]+(\?.*)?|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?|pvc://[a-z0-9][-a-z0-9.]*(/.*)?)$"
)
"""One pattern for the schema and for `parse`."""


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub: `hf://OWNER/NAME?name=CONFIG&split=SPLIT`."""

    repository: str
    options: dict[str, str]


@dataclass(frozen=True)
class S3Source:
    """A key or a prefix of a bucket: `s3://BUCKET/KEY`."""

    bucket: str
    key: str


@dataclass(frozen=True)
class ClaimSource:
    """A file or folder of a PersistentVolumeClaim of the namespace: `pvc://CLAIM/PATH`."""

    claim: str
    path: str

    @property
    def mounted_path(self) -> str:
        """The path of the source inside every container of ours."""
        return f"{CLAIM_MOUNT_ROOT}/{self.claim}/{self.path}".rstrip("/")


def parse(uri: str) -> HubSource | S3Source | ClaimSource:
    """Take a source's URI apart.

    Raises:
        ValueError: the URI is of no known kind, or a claim's path leaves the claim.
    """
    if not re.match(SOURCE_PATTERN, uri):
        raise ValueError(f"{uri!r} is no source: write hf://OWNER/NAME, s3://BUCKET/KEY or pvc://CLAIM/PATH")
    scheme, _, rest = uri.partition("://")
    if scheme == "hf":
        repository, _, query = rest.partition("?")
        return HubSource(repository, dict(parse_qsl(query)))
    first, _, path = rest.partition("/")
    if scheme == "s3":
        return S3Source(first, path)
    if ".." in path.split("/"):
        raise ValueError(f"{uri!r} leaves its claim: write a path without '..'")
    return ClaimSource(first, path)
