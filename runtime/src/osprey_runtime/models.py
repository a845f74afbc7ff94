"""Models in the Hugging Face layout: found, pinned, and had as a local folder."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from osprey_api.conditions import FailureReason
from osprey_api.fingerprint import sha256
from osprey_api.sources import ClaimSource, HubSource, S3Source
from osprey_api.stages import ModelFacts, Pinned, StorageLocation
from osprey_runtime import hub, sources
from osprey_runtime.errors import StageError
from osprey_runtime.sources import content_digest, locate, parsed
from osprey_runtime.store import DOWNLOAD_STREAMS, Content, Entry, digest_of, out_of_disk

_WEIGHTS = "*.safetensors"
HUB_FILES = ("*.json", _WEIGHTS, "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What is downloaded of a hub repository: not the same weights in other formats."""
_SAME_ONCE_MORE = ("consolidated*", "original/*")
"""The same weights in the layout of their makers, which nothing here reads."""


def local_model(pinned: Pinned, storage: StorageLocation, *, cache: Path, weights: bool = True) -> Path:
    """Return a local folder with exactly the model that `resolve` found.

    A claim's is where the claim is mounted; S3's is downloaded into `cache`; the hub's is in the hub's own cache
    (HF_HOME). Processes that ask at the same time wait for one of them to do it. Don't write to the folder.

    Args:
        pinned: the model.
        storage: whose endpoint and region are used for s3://.
        cache: folder for what is downloaded, and for notes of what was verified.
        weights: False where config and tokenizer are enough. The hub gives those alone; of the other sources, whose
            digest is that of all files, all are read.

    Raises:
        StageError: SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED, HUB_UNAVAILABLE, OUT_OF_DISK; INVALID_DATA, the content
            is not what was resolved.
    """
    cache.mkdir(parents=True, exist_ok=True)
    match parsed(pinned.uri):
        case HubSource(repository, _):
            from huggingface_hub import snapshot_download  # noqa: PLC0415 - heavy

            files = [pattern for pattern in HUB_FILES if weights or pattern != _WEIGHTS]
            with hub.errors(pinned.uri):
                return Path(
                    snapshot_download(
                        repository,
                        revision=pinned.revision,
                        allow_patterns=files,
                        ignore_patterns=list(_SAME_ONCE_MORE),
                    )
                )
        case ClaimSource():
            located = locate(pinned.uri, storage)
            folder = Path(located.store.uri.removeprefix("file://")) / located.key
            verified = cache / f"verified-{sha256([pinned.uri, pinned.digest])[:16]}"
            with _locked(verified):
                if pinned.digest is not None and not verified.exists():
                    if content_digest(pinned.uri, storage) != pinned.digest:
                        raise sources.changed(pinned.uri)
                    verified.touch()
            return folder
        case S3Source():
            folder = cache / sha256([pinned.uri, pinned.digest])[:16]
            with _locked(folder):
                if not folder.exists():
                    _download(pinned, storage, folder)
            return folder


def resolve_model(
    uri: str,
    revision: str | None,
    storage: StorageLocation,
    *,
    check: Callable[[str, Mapping[str, Any]], None] = lambda _uri, _config: None,
) -> tuple[Pinned, ModelFacts]:
    """Return a model as it is now, pinned, and what its config and weights say of it.

    Args:
        uri: of the model.
        revision: branch, tag or commit of a hub model; ignored for the other sources.
        storage: whose endpoint and region are used for s3://.
        check: given URI and config; raises what is wrong with it, before any weight is read.

    Raises:
        StageError: SOURCE_NOT_FOUND, SOURCE_ACCESS_DENIED, HUB_UNAVAILABLE; UNSUPPORTED_MODEL, no config.json or no
            safetensors, or the config lacks a size.
    """
    source = parsed(uri)
    if isinstance(source, HubSource):
        from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415 - heavy

        with hub.errors(uri):
            info = HfApi().model_info(source.repository, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
            _check_layout(uri, sizes)
            config = Path(hf_hub_download(source.repository, "config.json", revision=info.sha)).read_bytes()
        facts = _facts(uri, config, sizes)
        check(uri, json.loads(config))
        return Pinned(uri=uri, revision=info.sha), facts
    located = locate(uri, storage)
    sizes = {located.relative(entry): entry.size for entry in located.files()}
    _check_layout(uri, sizes)
    with sources.errors(uri):
        config = located.store.read(f"{located.key}/config.json".lstrip("/"))
    facts = _facts(uri, config, sizes)
    check(uri, json.loads(config))  # before the digest, which reads all of the weights
    return Pinned(uri=uri, digest=content_digest(uri, storage)), facts


def _check_layout(uri: str, sizes: Mapping[str, int]) -> None:
    if "config.json" not in sizes:
        raise _unsupported(uri, "has no config.json: name the folder of a model in the Hugging Face layout")
    if not any(map(_is_weights, sizes)):
        raise _unsupported(uri, "has no .safetensors file: convert its weights")


def _is_weights(name: str) -> bool:
    return fnmatchcase(name, _WEIGHTS) and not any(fnmatchcase(name, pattern) for pattern in _SAME_ONCE_MORE)


def _facts(uri: str, config: bytes, sizes: Mapping[str, int]) -> ModelFacts:
    try:
        whole: dict[str, Any] = json.loads(config)
        # Models of text and images keep the language model's numbers one level down.
        text = whole.get("text_config") or whole
        return ModelFacts(
            architecture=whole["architectures"][0],
            layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            vocab_size=text["vocab_size"],
            size_bytes=sum(size for name, size in sizes.items() if _is_weights(name)),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _unsupported(
            uri, f"has a config.json without what is needed ({type(error).__name__}: {error}): name a causal LM"
        ) from error


def _download(pinned: Pinned, storage: StorageLocation, folder: Path) -> None:
    located = locate(pinned.uri, storage)
    files = located.files()
    prefix = f".{folder.name}-"
    for left in folder.parent.glob(f"{prefix}*"):  # by a process that was killed: the lock is ours
        shutil.rmtree(left)
    if shutil.disk_usage(folder.parent).free < sum(entry.size for entry in files):
        raise out_of_disk(folder)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as unfinished:

        def download(entry: Entry) -> tuple[str, Content]:
            path = located.relative(entry)
            return path, located.store.download(entry.key, Path(unfinished, "files", path))

        with sources.errors(pinned.uri), ThreadPoolExecutor(DOWNLOAD_STREAMS) as pool:
            contents = dict(pool.map(download, files))
        if pinned.digest is not None and pinned.digest != digest_of(contents):
            raise sources.changed(pinned.uri)
        Path(unfinished, "files").rename(folder)


@contextmanager
def _locked(what: Path) -> Iterator[None]:
    """Let one process at a time in: the ranks of a pod share its disk."""
    with what.with_name(f".{what.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unsupported(uri: str, what: str) -> StageError:
    return StageError(FailureReason.UNSUPPORTED_MODEL, f"{uri} {what}")
