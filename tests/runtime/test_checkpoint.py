"""A checkpoint that is not whole is never resumed from, and an upload that failed is never silent."""

import subprocess
import sys
import textwrap
import time

import pytest

from osprey_api.conditions import FailureReason
from osprey_runtime import checkpoint
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.errors import StageError
from osprey_runtime.store import open_store
from osprey_runtime.store.local import LocalStore

PREFIX = "team-a/distil/ffff"
ROOT = f"{PREFIX}/checkpoints"


@pytest.fixture
def checkpoints(store):
    return Checkpoints(store, PREFIX, "attempt-one", keep=2)


@pytest.fixture
def save(make_files):
    def save(checkpoints: Checkpoints, step: int, files: dict[str, bytes] | None = None) -> None:
        checkpoints.save(make_files("state", files or {"rank-0.pt": b"%d" % step, "deep/rng": b"r"}), step)
        checkpoints.wait()

    return save


def folders(store) -> set[str]:
    return {entry.key.removeprefix(f"{ROOT}/").split("/")[0] for entry in store.list(ROOT)}


def test_nothing_saved_yet(checkpoints):
    assert checkpoints.latest() is None
    checkpoints.wait()


def test_what_is_saved_is_restored(checkpoints, save, tmp_path):
    save(checkpoints, 500)
    assert not (tmp_path / "state").exists()
    found = checkpoints.latest()
    assert found is not None
    assert (found.step, found.name) == (500, "step-00000500-attempt-")
    folder = checkpoints.restore(found, tmp_path / "restored")
    assert (folder / "rank-0.pt").read_bytes() == b"500"
    assert (folder / "deep" / "rng").read_bytes() == b"r"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "storage") == ["restored"]


def test_restoring_replaces_what_was_there(checkpoints, save, make_files):
    save(checkpoints, 1)
    folder = make_files("restored", {"left-over": b"x"})
    checkpoints.restore(checkpoints.latest(), folder)
    assert not (folder / "left-over").exists()


def test_steps_are_numbers(checkpoints, save):
    for step in (99_999_999, 100_000_000):
        save(checkpoints, step)
    assert checkpoints.latest().step == 100_000_000


def test_the_last_ones_are_kept(checkpoints, save, store):
    for step in (100, 200, 300):
        save(checkpoints, step)
    assert folders(store) == {"step-00000200-attempt-", "step-00000300-attempt-"}


@pytest.mark.parametrize("damage", ["no marker", "cut marker", "missing file", "cut file"])
def test_the_newest_complete_one_counts(checkpoints, save, store, damage):
    save(checkpoints, 100)
    save(checkpoints, 200)
    newest = f"{ROOT}/step-00000200-attempt-"
    match damage:
        case "no marker":
            store.delete([f"{newest}/complete.json"])
        case "cut marker":
            store.write(f"{newest}/complete.json", store.read(f"{newest}/complete.json")[:-10])
        case "missing file":
            store.delete([f"{newest}/deep/rng"])
        case "cut file":
            store.write(f"{newest}/rank-0.pt", b"2")
    assert checkpoints.latest().step == 100


def test_damage_that_only_the_digest_shows(checkpoints, save, store, tmp_path):
    save(checkpoints, 100)
    save(checkpoints, 200)
    store.write(f"{ROOT}/step-00000200-attempt-/rank-0.pt", b"201")
    with pytest.raises(StageError) as caught:
        checkpoints.restore(checkpoints.latest(), tmp_path / "restored")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT
    assert checkpoints.latest().step == 100


def test_file_that_is_deleted_while_it_is_restored(checkpoints, save, store, tmp_path):
    save(checkpoints, 100)
    found = checkpoints.latest()
    store.delete([f"{ROOT}/{found.name}/deep/rng"])
    with pytest.raises(StageError, match=r"deep/rng.*is damaged") as caught:
        checkpoints.restore(found, tmp_path / "restored")
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT


def test_what_killed_attempts_left_goes_once_it_is_of_no_use(checkpoints, save, store):
    store.write(f"{ROOT}/step-00000100-killed/rank-0.pt", b"half")
    store.write(f"{ROOT}/step-00000300-killed/rank-0.pt", b"half")
    save(checkpoints, 200)
    # The one of step 300 might be under way in another pod.
    assert folders(store) == {"step-00000200-attempt-", "step-00000300-killed"}
    save(checkpoints, 400)
    assert folders(store) == {"step-00000200-attempt-", "step-00000400-attempt-"}


def test_of_several_pods_the_last_completes_it(store, make_files, tmp_path):
    pods = [Checkpoints(store, PREFIX, "uid", keep=1, part=part, parts=2) for part in range(2)]
    for part in (1, 0):
        assert pods[0].latest() is None
        pods[part].save(make_files(f"state-{part}", {f"rank-{part}.pt": b"x"}), 10)
        pods[part].wait()
    folder = pods[1].restore(pods[1].latest(), tmp_path / "restored")
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.pt", "rank-1.pt"]


def test_failed_upload_is_told_by_the_next_call(s3_location, make_files, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "revoked")
    checkpoints = Checkpoints(open_store(s3_location), PREFIX, "a", keep=2)
    checkpoints.save(make_files("state", {"a": b"x"}), 1)
    with pytest.raises(StageError) as caught:
        checkpoints.save(make_files("state", {"a": b"x"}), 2)
    assert caught.value.reason is FailureReason.STORAGE_ACCESS_DENIED
    checkpoints.wait()  # told once
    assert (make_files("state", {}) / "a").exists()  # what was not taken over is still the caller's


class Flaky(LocalStore):
    """Is away, or full, for as many calls of a method as are left."""

    def __init__(self, root, reason=FailureReason.STORAGE_UNAVAILABLE, **left: int):
        super().__init__(root)
        self.reason = reason
        self.left = left

    def upload(self, path, key):
        self.call("upload")
        super().upload(path, key)

    def download(self, key, path):
        self.call("download")
        return super().download(key, path)

    def write(self, key, data, *, only_if_absent=False):
        self.call("write")
        return super().write(key, data, only_if_absent=only_if_absent)

    def delete(self, keys):
        self.call("delete")
        super().delete(keys)

    def call(self, name):
        if self.left.get(name, 0):
            self.left[name] -= 1
            raise StageError(self.reason, f"no {name} now")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(checkpoint, "_RETRIES_AFTER_S", (0.01, 0.01))


@pytest.mark.usefixtures("impatient")
def test_storage_that_comes_back_gets_the_checkpoint(tmp_path, save):
    checkpoints = Checkpoints(Flaky(tmp_path / "storage", upload=2), PREFIX, "a", keep=2)
    save(checkpoints, 1)
    assert checkpoints.latest().step == 1


@pytest.mark.usefixtures("impatient")
def test_storage_that_is_away_costs_a_checkpoint_and_not_the_run(tmp_path, save, make_files, caplog):
    checkpoints = Checkpoints(Flaky(tmp_path / "storage", upload=6), PREFIX, "a", keep=2)
    checkpoints.save(make_files("state", {"a": b"x"}), 1)
    checkpoints.save(make_files("state", {"a": b"x"}), 2)
    assert "the checkpoint of step 1 was not saved" in caplog.text
    with pytest.raises(StageError) as caught:  # of the last one, for a stage that is stopped
        checkpoints.wait()
    assert caught.value.reason is FailureReason.STORAGE_UNAVAILABLE
    save(checkpoints, 3)
    assert checkpoints.latest().step == 3


@pytest.mark.usefixtures("impatient")
def test_storage_that_has_no_room_ends_the_run_and_keeps_what_is_complete(tmp_path, save, make_files):
    store = Flaky(tmp_path / "storage", FailureReason.STORAGE_FULL)
    checkpoints = Checkpoints(store, PREFIX, "a", keep=2)
    save(checkpoints, 1)
    store.left["write"] = 3  # of markers: the files find room
    checkpoints.save(make_files("state", {"a": b"x"}), 2)
    with pytest.raises(StageError) as caught:
        checkpoints.save(make_files("state", {"a": b"x"}), 3)
    assert caught.value.reason is FailureReason.STORAGE_FULL
    assert folders(store) == {"step-00000001-a"}


def test_storage_that_is_away_while_a_checkpoint_is_restored_costs_the_file_at_hand(tmp_path, save):
    store = Flaky(tmp_path / "storage", download=2)
    checkpoints = Checkpoints(store, PREFIX, "a", keep=2)
    save(checkpoints, 1)
    waited = []

    def patiently(action):
        while True:
            try:
                return action()
            except StageError as error:
                waited.append(error)

    folder = checkpoints.restore(checkpoints.latest(), tmp_path / "restored", patiently)
    assert (folder / "rank-0.pt").read_bytes() == b"1"
    assert len(waited) == 2


def test_old_checkpoints_that_stay_are_no_failure(tmp_path, save, caplog):
    checkpoints = Checkpoints(Flaky(tmp_path / "storage", delete=1), PREFIX, "a", keep=1)
    for step in (1, 2):
        save(checkpoints, step)
    assert "old checkpoints were not deleted" in caplog.text
    assert checkpoints.latest().step == 2


def test_killed_in_the_middle_of_an_upload(s3_location, make_files, save):
    """SIGKILL while a large file is under way: the checkpoint before it is the latest."""
    checkpoints = Checkpoints(open_store(s3_location), PREFIX, "attempt-one", keep=2)
    save(checkpoints, 100)
    program = textwrap.dedent("""
        import pathlib, sys
        from osprey_api.stages import StorageLocation
        from osprey_runtime.checkpoint import Checkpoints
        from osprey_runtime.store import open_store
        location = StorageLocation.model_validate_json(sys.argv[1])
        checkpoints = Checkpoints(open_store(location), sys.argv[2], "attempt-two", keep=2)
        checkpoints.save(pathlib.Path(sys.argv[3]), 200)
        checkpoints.wait()
    """)
    folder = make_files("state", {"a-small": b"x"})
    with (folder / "large").open("wb") as file:
        file.truncate(500 << 20)
    process = subprocess.Popen(
        [sys.executable, "-c", program, s3_location.model_dump_json(), PREFIX, str(folder)],
    )
    begun = f"{ROOT}/step-00000200-attempt-/a-small"
    store = open_store(s3_location)
    while not store.exists(begun):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not store.exists(f"{ROOT}/step-00000200-attempt-/large")
    assert checkpoints.latest().step == 100
