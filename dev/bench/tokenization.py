"""One process of a measurement: the stage `tokenize` beside `encode_batch` of its tokenizer, on the same documents."""

import json
import tempfile
import time
from pathlib import Path

from dev import models
from dev.demo.sites import variables
from dev.demo.text import documents
from osprey_api.stages import Pinned, StageTask, StorageLocation, TextSource, TokenizeConfig, stage_fingerprint
from osprey_runtime.checkpoint import Checkpoints
from osprey_runtime.context import StageContext
from osprey_runtime.parts import Parts
from osprey_runtime.progress import Progress
from osprey_runtime.store import open_store
from osprey_trainer.data.shards import ShardIndex
from osprey_trainer.data.tokenizer import DocumentTokenizer
from osprey_trainer.stages import tokenize


def run() -> dict[str, float]:
    """Return tokens a second of both."""
    texts = list(documents())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        claims = folder / "claims"
        (claims / "data").mkdir(parents=True)
        (claims / "models").symlink_to(models.folder().parent)
        with (claims / "data" / "text.jsonl").open("w") as file:
            file.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
        with variables({"OSPREY_CLAIMS_ROOT": str(claims)}):
            return {"encode_batch": _plain(texts), "stage": _stage(folder)}


def _plain(texts: list[str]) -> float:
    tokenizer = DocumentTokenizer.load(models.folder()).tokenizer
    tokenizer.encode_batch(texts[:10])  # its threads begin
    began = time.monotonic()
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings) / (time.monotonic() - began)


def _stage(folder: Path) -> float:
    config = TokenizeConfig(
        tokenizer=Pinned(uri=f"pvc://models/{models.NAME}"),
        data=(TextSource(source=Pinned(uri="pvc://data/text.jsonl"), text_field="text"),),
    )
    storage = StorageLocation(uri=f"file://{folder / 'storage'}")
    task = StageTask(
        fingerprint=stage_fingerprint(config, {}),
        namespace="bench",
        resource="ospreybackbone/bench",
        storage=storage,
        config=config,
    )
    store = open_store(storage)
    output, scratch = folder / "output", folder / "scratch"
    output.mkdir()
    scratch.mkdir()
    with (folder / "progress").open("w") as out, Progress("tokenize", port=None, out=out) as progress:
        context = StageContext(
            task=task,
            attempt="bench",
            output=output,
            scratch=scratch,
            progress=progress,
            checkpoints=Checkpoints(store, "bench", "bench", keep=2),
            parts=Parts(store, "bench"),
        )
        began = time.monotonic()
        tokenize.run(context)
        seconds = time.monotonic() - began
    return ShardIndex.read(output).tokens / seconds


if __name__ == "__main__":
    print(json.dumps(run()))
