"""Ask the hub at HF_ENDPOINT for what the arguments name, and print what comes: its libraries read it at import."""

import json
import sys
from pathlib import Path

from osprey_api.stages import Pinned, StorageLocation
from osprey_runtime.data import Ledger, TextRows, pin, rows
from osprey_runtime.errors import StageError
from osprey_runtime.models import local_model, resolve_model


def ask(what: str, uri: str, revision: str) -> object:
    storage = StorageLocation(uri="file:///nowhere")
    pinned = Pinned(uri=uri, revision=revision)
    match what:
        case "resolve_model":
            found, facts = resolve_model(uri, revision, storage)
            return [found.model_dump(mode="json"), facts.model_dump(mode="json")]
        case "local_model" | "local_tokenizer":
            folder = local_model(pinned, storage, cache=Path("cache"), weights=what == "local_model")
            return {path.name: path.read_text() for path in sorted(folder.iterdir())}
        case "pin":
            return pin(uri, storage, revision).model_dump(mode="json")
        case "rows":
            return [[row.line, row.value] for row in rows(pinned, storage, Ledger(uri, 1.0), text=TextRows.DOCUMENT)]
    raise ValueError(what)


answers: list[object] = []
for question in json.loads(sys.argv[1]):
    try:
        answers.append(ask(*question))
    except StageError as error:
        answers.append({"reason": error.reason, "message": error.message})
print(json.dumps(answers))  # noqa: T201 - the test reads it
