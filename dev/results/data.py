"""Prompts and text as files that the stages read, and which answers are made of them.

Training prompts and held-out ones are told apart by their content, as the stages do it. The held-out ones are also
written as files of their own, so that their answers are made like all others: once, by a real server.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dev.demo.prompts import prompts
from dev.demo.text import documents
from dev.results.languages import LANGUAGES
from dev.results.recipe import Recipe
from dev.results.specs import DOMAINS, FOCUS, LETTERS, TARGETS, Target
from osprey_api.stages import DataToResolve, HeldOut, Pinned, PromptSource
from osprey_runtime.conversation import Conversation

TEXT = "text"
ROWS = {"maths": 240, "code": 204, "general": 240, LETTERS: 60}
"""Prompts of each domain; there are no more than 210 of code."""
HELD_OUT, SAMPLED, OTHER_LANGUAGES = "held-out", "sampled", "languages"
"""Sets of answers that judge drafters: greedy, the same prompts at temperature 1, greedy in other languages."""
DOMAIN_OF = {language.lower(): language for language in LANGUAGES}
PARTS = {f"{FOCUS}-half": 2, f"{FOCUS}-quarter": 4, f"{FOCUS}-eighth": 8}
"""Sets of fewer answers."""
NONE_HELD_OUT = HeldOut(samples=0, seed=0)


@dataclass(frozen=True)
class Answers:
    """A set of answers.

    Attributes:
        sources: names of files of prompts.
        trains: drafters learn from it.
        temperature: of the target.
        part: one of so many of the recipe's training prompts; the same ones, the fewer they are.
    """

    sources: tuple[str, ...]
    trains: bool
    temperature: float = 0.0
    part: int = 1

    def prompts_of(self, recipe: Recipe, target: Target) -> int:
        """Return how many prompts of each source are trained on."""
        return recipe.samples_of(target) // self.part


SETS = {
    **{domain: Answers((domain,), trains=True) for domain in DOMAINS},
    **{name: Answers((FOCUS,), trains=True, part=part) for name, part in PARTS.items()},
    HELD_OUT: Answers(tuple(f"held-out-{domain}" for domain in (*DOMAINS, LETTERS)), trains=False),
    SAMPLED: Answers(tuple(f"held-out-{domain}" for domain in (*DOMAINS, LETTERS)), trains=False, temperature=1.0),
    OTHER_LANGUAGES: Answers(tuple(DOMAIN_OF), trains=False),
}
"""By name: those that a drafter learns from have a domain's."""


def write(claims: Path, recipe: Recipe) -> None:
    """Write all files, those that are there already only if they changed."""
    for domain, count in ROWS.items():
        _write(claims / f"{domain}.jsonl", "prompt", prompts(domain, count))
    for name, language in DOMAIN_OF.items():
        _write(claims / f"{name}.jsonl", "prompt", LANGUAGES[language])
    _write(claims / f"{TEXT}.jsonl", "text", documents())
    for target in TARGETS:
        for domain, count in ROWS.items():
            chosen = held_out(prompts(domain, count), recipe.held_out_of(target))
            _write(claims / target.name / f"held-out-{domain}.jsonl", "prompt", chosen)


def held_out(texts: Iterable[str], rule: HeldOut) -> list[str]:
    """Return the prompts that the stages hold out."""

    def rank(text: str) -> bytes:
        return Conversation.of([{"role": "user", "content": text}]).rank(rule.seed)

    return sorted(texts, key=rank)[: rule.samples]


def _write(path: Path, key: str, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in texts)
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


def to_resolve(target_name: str) -> list[DataToResolve]:
    """Return all prompts of a target."""
    names = dict.fromkeys(source for answers in SETS.values() for source in answers.sources)
    return [
        DataToResolve(name=name, uri=f"pvc://data/{_file(name, target_name)}", kind="Prompts", field="prompt")
        for name in names
    ]


def _file(source: str, target_name: str) -> str:
    return f"{target_name}/{source}.jsonl" if source.startswith("held-out-") else f"{source}.jsonl"


def prompt_source(name: str, source: Pinned, *, samples: int | None) -> PromptSource:
    """Return a file of prompts as the stages are told of it; its domain is the name without `held-out-`."""
    return PromptSource(
        name=name.removeprefix("held-out-"),
        source=source,
        prompt_field="prompt",
        samples=samples,
        train=True,
        evaluate=True,
    )
