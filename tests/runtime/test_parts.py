"""Files that are uploaded while a stage still runs: found again, named by the manifest, read in pieces, swept."""

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import ArtifactRef, PruneResult
from osprey_runtime import manifest
from osprey_runtime.errors import StageError
from osprey_runtime.manifest import RemoteArtifact
from osprey_runtime.parts import Parts

PREFIX = f"team-a/prune/{'f' * 64}"
SHARD = bytes(range(256)) * 40


@pytest.fixture
def parts(store, make_files):
    made = Parts(store, PREFIX)
    folder = make_files("shards", {"one.bin": SHARD, "two.bin": SHARD[::-1]})
    for name in ("one.bin", "two.bin"):
        made.add(folder / name, f"deep/{name}")
    return made


@pytest.fixture
def publish(store, make_task, make_files):
    def publish(parts: Parts, attempt: str = "one") -> manifest.Manifest:
        return manifest.publish(
            store,
            PREFIX,
            attempt,
            make_files("rest", {"index.json": b"{}"}),
            task=make_task(),
            result=PruneResult(parameters=7),
            parts=parts.found().values(),
        )

    return publish


@pytest.fixture
def ref(make_task):
    return lambda published: ArtifactRef(uri=make_task().prefix, digest=published.digest)


def test_an_artifact_of_parts_is_like_any_other(parts, publish, ref, store, location, tmp_path):  # noqa: PLR0917 - fixtures
    published = publish(parts)
    assert manifest.find(store, PREFIX) == published
    assert not manifest.damaged(store, PREFIX, published)
    folder = manifest.fetch(location, ref(published), tmp_path / "back")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == {"deep/one.bin": SHARD, "deep/two.bin": SHARD[::-1], "index.json": b"{}"}


def test_the_digest_does_not_tell_parts_from_other_files(parts, publish, store, make_task, make_files):
    published = publish(parts)
    folder = make_files("all", {"deep/one.bin": SHARD, "deep/two.bin": SHARD[::-1], "index.json": b"{}"})
    whole = manifest.publish(store, "team-a/b", "one", folder, task=make_task(), result=PruneResult(parameters=7))
    assert published.digest == whole.digest


def test_another_attempt_finds_them(parts, store):
    assert Parts(store, PREFIX).found() == parts.found()
    assert set(parts.found()) == {"deep/one.bin", "deep/two.bin"}
    assert Parts(store, "team-a/other").found() == {}


def test_a_part_without_its_content_does_not_count(parts, store):
    store.delete([f"{PREFIX}/{manifest.part_key(parts.found()['deep/one.bin'])}"])
    assert set(parts.found()) == {"deep/two.bin"}


def test_a_later_part_of_the_same_name_counts(parts, publish, store, make_files):
    parts.add(make_files("again", {"one.bin": b"other"}) / "one.bin", "deep/one.bin")
    published = publish(parts)
    manifest.sweep(store, PREFIX, published)
    sizes = sorted(entry.size for entry in store.list(f"{PREFIX}/parts"))
    assert sizes == [len(b"other"), len(SHARD)]  # neither the earlier one nor a record
    assert not manifest.damaged(store, PREFIX, published)


def test_what_is_damaged_is_not_found_again(parts, publish, store):
    publish(parts)
    manifest.set_aside(store, PREFIX, "two")
    assert parts.found() == {}


def test_parts_that_are_none_the_worse_are_found_again(parts, publish, store):
    published = publish(parts)
    before = parts.found()
    manifest.sweep(store, PREFIX, published)
    good, bad = (file for file in published.files if file.part)
    store.write(f"{PREFIX}/{published.key_of(bad)}", SHARD[:-1])
    assert manifest.damaged(store, PREFIX, published) == (bad,)
    manifest.set_aside(store, PREFIX, "two", kept=[good])
    assert parts.found() == {good.path: before[good.path]}
    assert {entry.size for entry in store.list(f"{PREFIX}/parts")} > {len(SHARD)}
    assert not store.exists(f"{PREFIX}/{published.key_of(bad)}")


def test_a_file_is_read_where_it_lies(parts, publish, ref, location, tmp_path):
    remote = RemoteArtifact(location, ref(publish(parts)))
    assert remote.read(remote.file("deep/two.bin"), 100, 50) == SHARD[::-1][100:150]
    remote.download(remote.file("index.json"), tmp_path / "index.json")
    assert (tmp_path / "index.json").read_bytes() == b"{}"
    with pytest.raises(StageError, match=r"no file three\.bin") as caught:
        remote.file("three.bin")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT


def test_a_doubted_part_is_read_and_found_out(parts, publish, ref, store, location):
    published = publish(parts)
    remote = RemoteArtifact(location, ref(published))
    file = remote.file("deep/one.bin")
    store.write(f"{PREFIX}/{published.key_of(file)}", SHARD[:-1] + b"x")
    assert not manifest.damaged(store, PREFIX, published)  # by its size
    assert remote.doubted(file).reason is FailureReason.CORRUPT_ARTIFACT
    assert manifest.damaged(store, PREFIX, published)
