"""The hub's libraries against a small server of our own: there is no hub within reach of the tests."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from osprey_api.conditions import FailureReason

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 100}
FILES = {
    "team/model": {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": b"x" * 30,
        "consolidated.safetensors": b"Mistral's layout",
        "original/model.safetensors": b"Meta's layout",
        "pytorch_model.bin": b"the same once more",
        "tokenizer.json": b"{}",
    },
    "datasets/team/data": {
        "train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
        "test.jsonl": b'{"text": "three"}\n',
        "odd.jsonl": b'{"text": "four"}\n{\n{"text": ["five"]}\n',
    },
}
REFUSALS = {
    "team/gated": (403, "GatedRepo"),
    "team/private": (401, "RepoNotFound"),
    "team/branchless": (404, "RevisionNotFound"),
    "team/denied": (403, ""),
    "team/broken": (500, ""),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's API as its libraries ask for."""

    def answer(self):
        path = urlsplit(self.path).path.strip("/")
        api = path.startswith("api/")
        kind_free = path.removeprefix("api/").removeprefix("models/")
        for repository, (status, code) in REFUSALS.items():
            if kind_free.removeprefix("datasets/").startswith(repository):
                return self.say(status, b"{}", {"X-Error-Code": code} if code else {})
        for repository, files in FILES.items():
            if not kind_free.startswith(f"{repository}"):
                continue
            rest = kind_free.removeprefix(repository).strip("/").split("/")
            if rest[0] == "resolve" and rest[2] in files:
                data = files[rest[2]]
                return self.say(200, data, {"ETag": f'"{hash(data)}"', "X-Repo-Commit": COMMIT})
            if rest[0] == "tree":
                tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in files.items()]
                return self.say(200, json.dumps(tree).encode())
            if rest[0] == "paths-info":
                return self.say(200, b"[]")
            if api and rest[0] in {"", "revision"}:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                info = {"id": repository.removeprefix("datasets/"), "sha": COMMIT, "siblings": siblings}
                return self.say(200, json.dumps(info).encode())
            return self.say(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = do_POST = answer  # noqa: N815 - named by the base class

    def say(self, status, body, headers=()):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def ask(tmp_path):
    """Put questions to the hub from a process of their own: `ask([["pin", "hf://team/data", "main"]])`."""

    def ask(questions: list[list[str]]) -> list:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                answer = subprocess.run(
                    [sys.executable, Path(__file__).parent / "programs" / "hub_client.py", json.dumps(questions)],
                    env={
                        **os.environ,  # noqa: TID251 - a child inherits the environment
                        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                        "HF_HOME": str(tmp_path / "hub"),
                    },
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=120,
                )
            finally:
                server.shutdown()
                thread.join()
        found: list = json.loads(answer.stdout)
        return found

    return ask


def test_what_the_hub_has(ask):
    tokenizer, model, folder, data, train, other, odd = ask(
        [
            ["local_tokenizer", "hf://team/model", COMMIT],
            ["resolve_model", "hf://team/model", "main"],
            ["local_model", "hf://team/model", COMMIT],
            ["pin", "hf://team/data?split=test", "main"],
            ["rows", "hf://team/data", COMMIT],
            ["rows", "hf://team/data?split=test", COMMIT],
            ["rows", "hf://team/data?file=odd.jsonl", COMMIT],
        ]
    )
    assert model[0] == {"uri": "hf://team/model", "revision": COMMIT, "digest": None}
    assert model[1]["sizeBytes"] == 30
    assert model[1]["layers"] == 3
    assert set(tokenizer) == {"config.json", "tokenizer.json"}
    assert set(folder) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert data["revision"] == COMMIT
    assert train == [[1, {"text": "one"}], [2, {"text": "two"}]]
    assert other == [[1, {"text": "three"}]]
    assert odd == [[1, {"text": "four"}], [3, {"text": ["five"]}]]  # row by row: a broken one, and another type


def test_what_the_hub_refuses(ask):
    questions = {
        ("resolve_model", "hf://team/gated"): FailureReason.SOURCE_ACCESS_DENIED,
        ("resolve_model", "hf://team/private"): FailureReason.SOURCE_NOT_FOUND,
        ("resolve_model", "hf://team/branchless"): FailureReason.SOURCE_NOT_FOUND,
        ("resolve_model", "hf://team/denied"): FailureReason.SOURCE_ACCESS_DENIED,
        ("resolve_model", "hf://team/nothing"): FailureReason.SOURCE_NOT_FOUND,
        ("local_model", "hf://team/gated"): FailureReason.SOURCE_ACCESS_DENIED,
        ("pin", "hf://team/gated"): FailureReason.SOURCE_ACCESS_DENIED,
        ("pin", "hf://team/broken"): FailureReason.HUB_UNAVAILABLE,
        ("rows", "hf://team/gated"): FailureReason.SOURCE_ACCESS_DENIED,
        ("rows", "hf://team/nothing"): FailureReason.SOURCE_NOT_FOUND,
        ("rows", "hf://team/data?split=validation"): FailureReason.SOURCE_NOT_FOUND,
        ("rows", "hf://team/data?name=other"): FailureReason.SOURCE_NOT_FOUND,
        ("rows", "hf://team/data?revision=x"): FailureReason.INVALID_CONFIG,
    }
    answers = ask([[what, uri, COMMIT] for what, uri in questions])
    found = {question: answer.get("reason") for question, answer in zip(questions, answers, strict=True)}
    assert found == questions, answers
    for (_, uri), answer in zip(questions, answers, strict=True):
        assert uri in answer["message"]
