"""A storage in each kind, and tasks to run in it."""

import hashlib
from pathlib import Path

import pytest

from osprey_api.stages import Pinned, PruneConfig, StageTask, StorageLocation
from osprey_runtime.store import Store, open_store


@pytest.fixture(autouse=True)
def quiet_aws(monkeypatch):
    """No setting of the machine's own, and few retries, so that what is away is away soon."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


@pytest.fixture(scope="session")
def shared_bucket(s3) -> str:
    """One bucket for all: SeaweedFS takes a second to make one and to write to it for the first time."""
    made: str = s3.make_bucket("runtime-tests")
    return made


@pytest.fixture
def s3_location(s3, shared_bucket, request, monkeypatch) -> StorageLocation:
    """An empty prefix of this test's own, with the keys in the environment."""
    prefix = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:10]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    return StorageLocation(uri=f"s3://{shared_bucket}/{prefix}/drafters", endpoint=s3.endpoint, region=s3.region)


@pytest.fixture
def local_location(tmp_path) -> StorageLocation:
    return StorageLocation(uri=f"file://{tmp_path}/storage")


@pytest.fixture(params=["local", "s3"])
def location(request) -> StorageLocation:
    """Either kind of storage."""
    found: StorageLocation = request.getfixturevalue(f"{request.param}_location")
    return found


@pytest.fixture
def store(location) -> Store:
    return open_store(location)


@pytest.fixture
def make_files(tmp_path):
    """Write files below a new folder: `make_files("name", {"a.txt": b"..."})`."""

    def make(name: str, files: dict[str, bytes]) -> Path:
        folder = tmp_path / name
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return folder

    return make


@pytest.fixture
def make_task(location):
    """A task of a small stage in the storage of the test; `fingerprint` tells one artifact from another."""

    def make(fingerprint: str = "f" * 64, **more) -> StageTask:
        return StageTask(
            fingerprint=fingerprint,
            namespace="team-a",
            resource="ospreybackbone/small",
            storage=location,
            config=PruneConfig(source=Pinned(uri="pvc://models/small"), layers=2),
            **more,
        )

    return make
