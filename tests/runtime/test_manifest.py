"""An artifact is whole or not there; whoever reads it knows each byte to be the published one."""

import hashlib
import http.server
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import ArtifactRef, PruneResult, StorageLocation
from osprey_runtime import manifest
from osprey_runtime.errors import StageError
from osprey_runtime.store import open_store

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 10_000, "deep/er/empty": b""}
RESULT = PruneResult(parameters=7)
PREFIX = f"team-a/prune/{'f' * 64}"


@pytest.fixture
def publish(store, make_task, make_files):
    def publish(attempt: str, files: dict[str, bytes]) -> manifest.Manifest:
        folder = make_files(f"made-by-{attempt}", files)
        return manifest.publish(
            store, PREFIX, attempt, folder, task=make_task(), result=RESULT, seconds=1.5, versions={"python": "3.11"}
        )

    return publish


@pytest.fixture
def ref(make_task):
    return lambda published: ArtifactRef(uri=make_task().prefix, digest=published.digest)


def reason_of(call, *arguments) -> FailureReason:
    with pytest.raises(StageError) as caught:
        call(*arguments)
    return caught.value.reason


def test_what_is_published_is_fetched(publish, ref, location, tmp_path):
    published = publish("one", FILES)
    folder = manifest.fetch(location, ref(published), tmp_path / "back")
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_digest_is_what_the_contract_says(publish):
    lines = sorted([path, len(data), hashlib.sha256(data).hexdigest()] for path, data in FILES.items())
    canonical = json.dumps(lines, separators=(",", ":")).encode()
    assert publish("one", FILES).digest == "sha256:" + hashlib.sha256(canonical).hexdigest()


def test_manifest_says_where_it_comes_from(publish, store):
    publish("one", FILES)
    found = manifest.find(store, PREFIX)
    assert found is not None
    assert found.attempt == "one"
    assert found.result_of() == RESULT
    assert found.config["layers"] == 2
    assert found.resource == "ospreybackbone/small"
    assert not manifest.damaged(store, PREFIX, found)
    assert manifest.find(store, "team-a/prune/other") is None


def test_fetching_replaces_what_was_there(publish, ref, location, make_files):
    folder = make_files("back", {"left-over": b"x"})
    manifest.fetch(location, ref(publish("one", {"a": b"1"})), folder)
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_of_two_attempts_the_slower_adopts_the_faster(publish, store):
    first = publish("first", {"a": b"1"})
    second = publish("second", {"a": b"2", "b": b"3"})
    assert second == first
    assert {entry.key for entry in store.list(PREFIX)} == {f"{PREFIX}/manifest.json", f"{PREFIX}/{first.folder}/a"}


def test_race_of_publishers_has_one_winner(publish, store, ref, location, tmp_path):
    start = threading.Barrier(4)

    def attempt(number: int) -> manifest.Manifest:
        start.wait()
        return publish(f"attempt-{number}", {"a": b"%d" % number})

    with ThreadPoolExecutor(4) as pool:
        published = list(pool.map(attempt, range(4)))
    assert len({found.digest for found in published}) == 1
    folder = manifest.fetch(location, ref(published[0]), tmp_path / "back")
    assert f"attempt-{(folder / 'a').read_text()}" == published[0].attempt
    assert len(list(store.list(f"{PREFIX}/attempts"))) == 1


def test_one_job_with_two_pods_keeps_what_its_manifest_names(publish, ref, location, tmp_path):
    """Both have the Job's UID as their attempt, and a timing in their files."""
    first = publish("uid", {"report.json": b"1 s"})
    assert publish("uid", {"report.json": b"2 s"}) == first
    manifest.fetch(location, ref(first), tmp_path / "back")
    assert (tmp_path / "back" / "report.json").read_bytes() == b"1 s"


def test_sweep_leaves_the_artifact_alone(publish, store):
    published = publish("one", FILES)
    store.write(f"{PREFIX}/attempts/killed/0123/model.safetensors", b"half")
    store.write(f"{PREFIX}/checkpoints/step-00000001-killed/complete.json", b"{}")
    manifest.sweep(store, PREFIX, published)
    assert {entry.key for entry in store.list(PREFIX)} == {
        f"{PREFIX}/manifest.json",
        *(f"{PREFIX}/{published.folder}/{path}" for path in FILES),
    }


@pytest.mark.parametrize("location", ["s3"], indirect=True)
@pytest.mark.parametrize("old", [False, True])
def test_sweep_aborts_what_killed_uploads_left(publish, location, s3, monkeypatch, old):
    """By their age, since another attempt may be uploading."""
    client = s3.client()
    bucket, _, base = location.uri.removeprefix("s3://").partition("/")
    ours, other = f"{base}/{PREFIX}/checkpoints/step/large", f"{base}/{PREFIX}-other/large"
    for key in (ours, other):
        begun = client.create_multipart_upload(Bucket=bucket, Key=key)
        client.upload_part(Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"half")
    if old:
        monkeypatch.setattr(manifest, "_UPLOAD_TIME", -timedelta(minutes=1))
    published = publish("one", FILES)
    manifest.sweep(open_store(location), PREFIX, published)
    found = client.list_multipart_uploads(Bucket=bucket, Prefix=f"{base}/").get("Uploads", ())
    assert {upload["Key"] for upload in found} == ({other} if old else {ours, other})


def test_an_empty_folder_is_not_published(publish, tmp_path):
    (tmp_path / "made-by-one").mkdir()
    with pytest.raises(ValueError, match="made no file"):
        publish("one", {})


def test_no_artifact(location, tmp_path):
    nothing = ArtifactRef(uri=f"{location.uri}/nothing", digest="sha256:" + "0" * 64)
    assert reason_of(manifest.fetch, location, nothing, tmp_path / "back") is FailureReason.SOURCE_NOT_FOUND
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_damaged_file(publish, ref, store, location, tmp_path, damage):  # noqa: PLR0917 - fixtures
    published = publish("one", FILES)
    key, data = f"{PREFIX}/{published.folder}/model.safetensors", bytearray(FILES["model.safetensors"])
    data[1000] ^= 1
    if damage == "missing":
        store.delete([key])
    else:
        store.write(key, bytes(data) if damage == "flipped" else bytes(data[:-1]))
    assert reason_of(manifest.fetch, location, ref(published), tmp_path / "back") is FailureReason.CORRUPT_ARTIFACT
    assert not (tmp_path / "back").exists()
    assert manifest.damaged(store, PREFIX, published)


def test_a_doubt_without_a_reason_is_removed(publish, store):
    published = publish("one", FILES)
    store.write(f"{PREFIX}/{manifest.DOUBT}", b"")
    assert not manifest.damaged(store, PREFIX, published)
    assert not store.exists(f"{PREFIX}/{manifest.DOUBT}")


def test_manifest_of_another_artifact(publish, make_task, location, tmp_path):
    publish("one", FILES)
    other = ArtifactRef(uri=make_task().prefix, digest="sha256:" + "0" * 64)
    with pytest.raises(StageError, match="correct the digest") as caught:
        manifest.fetch(location, other, tmp_path / "back")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT
    assert "delete" not in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"].pop(),
        lambda manifest: manifest.update(digest="sha256:" + "0" * 64),
        lambda manifest: manifest["files"][0].update(path="../../etc/passwd"),
        lambda manifest: manifest["files"][0].update(path="/etc/passwd"),
        lambda manifest: manifest.update(attempt="../../other"),
        lambda manifest: manifest.update(version=2),
        lambda manifest: manifest.update(files=[]),
        lambda manifest: manifest.pop("files"),
    ],
)
def test_manifest_that_cannot_be_right(publish, store, change):
    publish("one", FILES)
    changed = json.loads(store.read(f"{PREFIX}/manifest.json"))
    change(changed)
    store.write(f"{PREFIX}/manifest.json", json.dumps(changed).encode())
    assert reason_of(manifest.find, store, PREFIX) is FailureReason.CORRUPT_ARTIFACT


def test_manifest_of_a_later_version_with_more_fields(publish, store):
    published = publish("one", FILES)
    more = json.loads(store.read(f"{PREFIX}/manifest.json")) | {"signature": "later"}
    store.write(f"{PREFIX}/manifest.json", json.dumps(more).encode())
    assert manifest.find(store, PREFIX) == published


def test_set_aside_makes_room_for_another_attempt(publish, store):
    publish("one", {"a": b"1"})
    manifest.set_aside(store, PREFIX, "two")
    assert store.exists(f"{PREFIX}/manifest.corrupt-two.json")
    assert publish("two", {"a": b"2"}).attempt == "two"


def test_a_published_model_without_a_manifest_is_had_by_its_digest(store, location, tmp_path):
    """As one imports the released backbone: nobody of ours made the folder."""
    for path, content in FILES.items():
        store.write(f"released/{path}", content)
    uri = f"{location.uri}/released"
    with pytest.raises(StageError, match=r"correct the digest in spec\.import") as caught:
        manifest.fetch(location, ArtifactRef(uri=uri, digest="sha256:" + "0" * 64), tmp_path / "back")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT
    assert not list(tmp_path.glob("*back*"))

    lines = sorted([path, len(data), hashlib.sha256(data).hexdigest()] for path, data in FILES.items())
    digest = "sha256:" + hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()
    assert f"has digest {digest} and not" in caught.value.message
    folder = manifest.fetch(location, ArtifactRef(uri=uri, digest=digest), tmp_path / "back")
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES


def test_a_key_that_leaves_its_folder_is_not_written(tmp_path, monkeypatch):
    """The store of the other tests has no such keys; S3 itself takes any."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    victim = tmp_path / "victim"

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            contents = f"<Contents><Key>released/{victim}</Key><Size>2</Size></Contents>"
            body = f"<ListBucketResult>{contents}</ListBucketResult>" if "list-type=2" in self.path else "{}"
            self.send_response(404 if self.path.endswith(manifest.NAME) else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body.encode())

        do_GET = do_HEAD = answer  # noqa: N815 - named by the base class

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            location = StorageLocation(uri="s3://bucket", endpoint=f"http://127.0.0.1:{server.server_port}")
            ref = ArtifactRef(uri="s3://bucket/released", digest="sha256:" + "0" * 64)
            with pytest.raises(StageError) as caught:
                manifest.fetch(location, ref, tmp_path / "back")
        finally:
            server.shutdown()
            thread.join()
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT
    assert f"key '{victim}'" in caught.value.message
    assert not victim.exists()


def test_a_folder_with_neither_manifest_nor_config_is_nothing_to_import(store, location, tmp_path):
    store.write("released/model.safetensors", b"")
    with pytest.raises(StageError, match="name the folder that holds") as caught:
        manifest.fetch(
            location, ArtifactRef(uri=f"{location.uri}/released", digest="sha256:" + "0" * 64), tmp_path / "back"
        )
    assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND
