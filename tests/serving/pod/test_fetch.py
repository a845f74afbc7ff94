"""A server's files on the disk of its pod: from S3, from a claim, verified, replaced as a whole."""

import json

import pytest

from osprey_api.conditions import ExitCode, FailureReason
from osprey_api.serving import ServerFiles
from osprey_api.stages import ArtifactRef, Outcome, Pinned, StorageLocation
from osprey_runtime.sources import content_digest
from osprey_serving import versions
from osprey_serving.__main__ import main


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """The paths of a pod, and `fetch` in it."""
    monkeypatch.setenv("OSPREY_TERMINATION_LOG", str(tmp_path / "termination-log"))
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path / "claims"))

    def fetch(wanted, *more):
        monkeypatch.setenv("OSPREY_WANTED", wanted.model_dump_json())
        paths = ("--model", str(tmp_path / "model"), "--drafter", str(tmp_path / "drafter"), "--cache", "/nowhere")
        return main(["fetch", *paths, *more])

    fetch.model, fetch.drafter = tmp_path / "model", tmp_path / "drafter"
    fetch.outcome = lambda: Outcome.model_validate_json((tmp_path / "termination-log").read_bytes())
    return fetch


@pytest.fixture
def claimed(tmp_path):
    """A target on a claim."""
    folder = tmp_path / "claims" / "models" / "target"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return Pinned(uri="pvc://models/target")


@pytest.fixture
def storage(s3, bucket, monkeypatch):
    """Real S3, with its keys in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    return StorageLocation(uri=f"s3://{bucket}/drafters", endpoint=s3.endpoint, region=s3.region)


def seen(folder):
    """What a server reads there; the lock of a download is hidden."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.read_text() for path in files}


def test_a_target_and_a_drafter_from_s3(pod, storage, s3, bucket, drafter_artifact):
    for name, text in {"config.json": "{}", "model.safetensors": "weights"}.items():
        s3.client().put_object(Bucket=bucket, Key=f"models/tiny/{name}", Body=text.encode())
    uri = f"s3://{bucket}/models/tiny"
    target = Pinned(uri=uri, digest=content_digest(uri, storage))
    first = drafter_artifact(storage, {"config.json": "one", "model.safetensors": "1", "only-in-one": ""})
    second = drafter_artifact(storage, {"config.json": "two", "model.safetensors": "2"})

    assert pod(ServerFiles(storage=storage, target=target, drafter=first)) == 0
    assert seen(pod.model) == {"config.json": "{}", "model.safetensors": "weights"}
    assert seen(pod.drafter) == {"config.json": "one", "model.safetensors": "1", "only-in-one": ""}
    assert versions.shown(pod.drafter) == first.digest.replace(":", "-")

    before = (pod.drafter / "config.json").stat().st_ino
    assert pod(ServerFiles(storage=storage, target=target, drafter=first)) == 0  # the container was restarted
    assert (pod.drafter / "config.json").stat().st_ino == before

    assert pod(ServerFiles(storage=storage, target=target, drafter=second)) == 0
    assert seen(pod.drafter) == {"config.json": "two", "model.safetensors": "2"}
    assert not (pod.drafter / first.digest.replace(":", "-")).exists()


def test_a_target_on_a_claim_is_left_there(pod, storage, claimed):
    assert pod(ServerFiles(storage=storage, target=claimed, drafter=None)) == 0
    assert not (pod.model / "config.json").exists()
    assert not pod.drafter.exists()


def test_a_claim_without_the_model_is_said_to_be(pod, storage):
    assert pod(ServerFiles(storage=storage, target=Pinned(uri="pvc://models/absent"), drafter=None)) == 64
    assert pod.outcome().failure is FailureReason.SOURCE_NOT_FOUND


def test_a_damaged_drafter_is_not_shown(pod, storage, s3, claimed, drafter_artifact):
    good = drafter_artifact(storage, {"config.json": "good"})
    assert pod(ServerFiles(storage=storage, target=claimed, drafter=good)) == 0
    bad = drafter_artifact(storage, {"config.json": "bad!"})
    bucket, _, prefix = bad.uri.removeprefix("s3://").partition("/")
    manifest = json.loads(s3.client().get_object(Bucket=bucket, Key=f"{prefix}/manifest.json")["Body"].read())
    key = f"{prefix}/attempts/a/{manifest['digest'].removeprefix('sha256:')[:16]}/config.json"
    s3.client().put_object(Bucket=bucket, Key=key, Body=b"evil")
    assert pod(ServerFiles(storage=storage, target=claimed, drafter=bad)) == ExitCode.TRY_AGAIN
    assert pod.outcome().failure is FailureReason.CORRUPT_ARTIFACT
    assert seen(pod.drafter) == {"config.json": "good"}


def test_another_digest_than_the_manifests_is_refused(pod, storage, claimed, drafter_artifact):
    artifact = drafter_artifact(storage, {"config.json": "{}"})
    other = ArtifactRef(uri=artifact.uri, digest="sha256:" + "0" * 64)
    assert pod(ServerFiles(storage=storage, target=claimed, drafter=other)) == ExitCode.TRY_AGAIN
    assert not (pod.drafter / "config.json").exists()


def test_nothing_wanted_is_a_mistake(pod, tmp_path, monkeypatch, storage, claimed):
    pod(ServerFiles(storage=storage, target=claimed, drafter=None))
    monkeypatch.delenv("OSPREY_WANTED")
    assert main(["fetch", "--wanted", str(tmp_path / "absent.json")]) == 64
    assert "OSPREY_WANTED" in pod.outcome().message
    monkeypatch.setenv("OSPREY_WANTED", "{}")
    assert main(["fetch"]) == 64
    assert pod.outcome().failure is FailureReason.INVALID_CONFIG


def test_a_reader_never_sees_parts_of_two_versions(tmp_path):
    root = tmp_path / "drafter"
    for name in ("one", "two"):
        (root / name).mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (root / name / file).write_text(name)
    versions.show(root, root / "one")
    config, weights = (root / name for name in ("config.json", "model.safetensors"))
    links = {path: path.readlink() for path in (config, weights)}
    versions.show(root, root / "two")
    # Both files went over with one link; their own links stayed.
    assert {path: path.readlink() for path in links} == links
    assert (config.read_text(), weights.read_text()) == ("two", "two")
    versions.remove_others(root, root / "two")
    assert sorted(path.name for path in root.iterdir()) == ["config.json", "current", "model.safetensors", "two"]
