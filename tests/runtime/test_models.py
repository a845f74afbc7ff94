"""A model is pinned by its content, and what is read later is that content or nothing."""

import json
import subprocess
import sys
import textwrap

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.fingerprint import sha256
from osprey_api.stages import ModelFacts, Pinned
from osprey_runtime.context import StageContext
from osprey_runtime.errors import StageError
from osprey_runtime.models import local_model, resolve_model
from osprey_runtime.store import open_store

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 100}
FACTS = ModelFacts(architecture="LlamaForCausalLM", layers=3, hidden_size=8, vocab_size=100, size_bytes=30)


@pytest.fixture(params=["pvc", "s3"])
def model(request, tmp_path, monkeypatch):
    """Put a model where a source of each kind finds it: `model({...})` returns (URI, storage)."""
    location = request.getfixturevalue("s3_location" if request.param == "s3" else "local_location")
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path / "claims"))

    def put(files: dict[str, bytes]):
        for name, content in files.items():
            if request.param == "s3":
                open_store(location).write(f"small/{name}", content)
            else:
                path = tmp_path / "claims" / "models" / "small" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return (f"{location.uri}/small" if request.param == "s3" else "pvc://models/small"), location

    return put


def files(config=CONFIG) -> dict[str, bytes]:
    weights = {"model-1-of-2.safetensors": b"x" * 10, "model-2-of-2.safetensors": b"y" * 20}
    return {"config.json": json.dumps(config).encode(), "deep/tokenizer.json": b"{}", **weights}


def test_model_is_pinned_and_had(model, tmp_path):
    uri, storage = model(files())
    pinned, facts = resolve_model(uri, "main", storage)
    assert facts == FACTS
    assert (pinned.uri, pinned.revision) == (uri, None)
    folder = local_model(pinned, storage, cache=tmp_path / "cache")
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files()
    assert local_model(pinned, storage, cache=tmp_path / "cache") == folder


def test_language_model_of_a_model_of_text_and_images(model):
    inner = {key: CONFIG[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    uri, storage = model(files({"architectures": ["LlamaForCausalLM"], "text_config": inner}))
    assert resolve_model(uri, None, storage)[1] == FACTS


def test_changed_model_is_refused(model, tmp_path):
    uri, storage = model(files())
    pinned, _ = resolve_model(uri, None, storage)
    model({"model-1-of-2.safetensors": b"z" * 10})
    with pytest.raises(StageError, match="changed since it was resolved") as caught:
        local_model(pinned, storage, cache=tmp_path / "cache")
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_file_that_came_later_is_a_change(model, tmp_path):
    uri, storage = model(files())
    pinned, _ = resolve_model(uri, None, storage)
    model({"extra.safetensors": b""})
    with pytest.raises(StageError, match="changed since it was resolved"):
        local_model(pinned, storage, cache=tmp_path / "cache")


def test_model_that_is_not_there(model, tmp_path):
    uri, storage = model(files())
    for use in (
        lambda: resolve_model(uri + "er", None, storage),
        lambda: local_model(Pinned(uri=uri + "er", digest="sha256:" + "0" * 64), storage, cache=tmp_path / "cache"),
    ):
        with pytest.raises(StageError) as caught:
            use()
        assert caught.value.reason is FailureReason.SOURCE_NOT_FOUND


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model.safetensors": b"x"}, r"no config\.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"no \.safetensors"),
        ({"config.json": b"{", "model.safetensors": b"x"}, "JSONDecodeError"),
        ({"config.json": b"[]", "model.safetensors": b"x"}, "AttributeError"),
        (files({key: value for key, value in CONFIG.items() if key != "hidden_size"}), "hidden_size"),
        (files(CONFIG | {"architectures": []}), "IndexError"),
    ],
)
def test_what_is_no_model(model, wrong, words):
    uri, storage = model(wrong)
    with pytest.raises(StageError, match=words) as caught:
        resolve_model(uri, None, storage)
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL


def test_a_config_is_judged_before_the_weights_are_read(model, monkeypatch):
    uri, storage = model(files())
    judged = []

    def judge(*given):
        judged.append(given)
        raise StageError(FailureReason.UNSUPPORTED_MODEL, "no")

    monkeypatch.setattr("osprey_runtime.models.content_digest", lambda *_: pytest.fail("all of the weights were read"))
    with pytest.raises(StageError, match="no"):
        resolve_model(uri, None, storage, check=judge)
    assert judged == [(uri, CONFIG)]


def test_same_weights_in_another_layout_do_not_count(model):
    uri, storage = model(files() | {"consolidated.safetensors": b"x" * 30, "original/a.safetensors": b"x" * 30})
    assert resolve_model(uri, None, storage)[1] == FACTS


@pytest.mark.parametrize("killed", [False, True])
def test_model_from_s3_outlives_the_pod_in_the_cache(s3_location, tmp_path, monkeypatch, make_task, killed):
    """And a model of a claim is verified in every pod."""
    cache = tmp_path / "model-cache"
    monkeypatch.setenv("OSPREY_MODEL_CACHE", str(cache))
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path / "claims"))
    store = open_store(s3_location)
    for name, content in files().items():
        store.write(f"small/{name}", content)
        path = tmp_path / "claims" / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pinned, _ = resolve_model(f"{s3_location.uri}/small", None, s3_location)
    on_claim, _ = resolve_model("pvc://models", None, s3_location)

    def pod(name: str) -> StageContext:
        task = make_task().model_copy(update={"storage": s3_location})
        return StageContext(
            task=task,
            attempt=name,
            output=tmp_path,
            scratch=tmp_path / name,
            progress=None,
            checkpoints=None,
            parts=None,
        )

    assert tmp_path / "zero" in pod("zero").model(pinned).parents  # there is no cache
    cache.mkdir()
    if killed:
        half = cache / f".{sha256([pinned.uri, pinned.digest])[:16]}-killed"
        half.mkdir()
    folder = pod("one").model(pinned)
    assert (folder.parent, {path.name for path in cache.glob("[!.]*")}) == (cache, {folder.name})
    assert not list(cache.glob(".*-*"))
    store.delete(["small/config.json"])
    assert pod("two").model(pinned) == folder
    pod("two").model(on_claim)
    assert {path.name for path in cache.glob("[!.]*")} == {folder.name}


def test_processes_of_a_pod_download_once(s3_location, tmp_path):
    store = open_store(s3_location)
    for name, content in files().items():
        store.write(f"small/{name}", content)
    pinned, _ = resolve_model(f"{s3_location.uri}/small", None, s3_location)
    program = textwrap.dedent("""
        import pathlib, sys
        from osprey_api.stages import Pinned, StorageLocation
        from osprey_runtime import models
        download = models._download
        models._download = lambda *given: (print("downloaded"), download(*given))
        pinned, storage = (kind.model_validate_json(text) for kind, text in
                           zip((Pinned, StorageLocation), sys.argv[1:3], strict=True))
        assert (models.local_model(pinned, storage, cache=pathlib.Path(sys.argv[3])) / "config.json").exists()
    """)
    command = [sys.executable, "-c", program, pinned.model_dump_json(), s3_location.model_dump_json(), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert "".join(said) == "downloaded\n"
