"""What a measured step begins with: dialogues of the demonstration, their target's states, and a drafter.

The dialogues are the demonstration's own prompts with its target's greedy answers, in the batches that distillation
makes of them. Answers and states are computed once, into `build/bench/`. A vocabulary larger than the target's gets
more rows in the target's head, of random numbers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dev import models
from dev.demo.prompts import prompts
from dev.files import put_whole, write_whole
from dev.settings import REPOSITORY
from osprey_api.fingerprint import sha256
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.data.answers import Dialogue, count_answer_tokens, fit
from osprey_trainer.data.dialogues import DialogueBatches
from osprey_trainer.data.split import Split
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.hf_names import read_config
from osprey_trainer.models.target import Target, TargetStates
from osprey_trainer.teacher_head import TeacherHead
from osprey_trainer.vocabulary import choose_draft_vocabulary

BUILD = REPOSITORY / "build" / "bench"
DOMAINS = ("maths", "code", "general")
PROMPTS = 16
"""Of each domain."""
MAX_TOKENS = 96
SEQUENCE_LENGTH = 256
"""These two as the demonstration has them."""
TOGETHER = 8
"""Dialogues of a batch: about 1024 tokens, two of the demonstration's batches."""
_SEED = 0
_BATCHES = 6


class Kind(StrEnum):
    """Of a batch: two of the demonstration's in one, or a single sequence whose every row is supervised."""

    DEMO = "demo"
    ALL = "all"


@dataclass(frozen=True)
class Case:
    """A step to measure.

    Attributes:
        vocabulary: V.
        draft_vocabulary: Vd; as much as V: all of them.
        batch: of what.
        tokens: T; of a batch of dialogues about so many.
        steps: K.
    """

    vocabulary: int
    draft_vocabulary: int
    batch: Kind
    tokens: int = 1024
    steps: int = 5


@dataclass(frozen=True)
class Sample:
    """A dialogue with all that is known of it.

    Attributes:
        ids: int64 [n].
        answer: bool [n], true on tokens of the answer.
        states: of the target, [n, ...].
        greedy: int64 [n], the target's most likely token after each position.
    """

    ids: Tensor
    answer: Tensor
    states: TargetStates
    greedy: Tensor


@dataclass(frozen=True)
class Inputs:
    """What every side begins with.

    Attributes:
        samples: of the batch.
        head: of the target, fp32 [V, H].
        drafter: an EAGLE-3 drafter with random weights, its draft vocabulary chosen.
    """

    samples: Sequence[Sample]
    head: TeacherHead
    drafter: Drafter

    @classmethod
    def load(cls, case: Case) -> Self:
        """Read what `prepare` made; the same for the same case in every process.

        A vocabulary smaller than the target's folds the ids over: what a step costs does not depend on which they are.
        """
        tensors = load_file(_states_file(case))
        head = _head(tensors["head"], case.vocabulary)
        drafter = Drafter.from_scratch(
            target_config={**read_config(models.folder()), "vocab_size": case.vocabulary},
            target_embedding=head.weight,
            tapped_layers=tuple(tensors["tapped_layers"].tolist()),
            seed=_SEED,
        )
        if case.draft_vocabulary < case.vocabulary:
            # Counted on other dialogues too, so that a few tokens of these are not among them.
            found = tensors["counts"]
            folded = torch.arange(len(found)) % case.vocabulary
            counts = torch.zeros(case.vocabulary, dtype=torch.long).index_add_(0, folded, found)
            size = case.draft_vocabulary
            drafter = drafter.with_draft_vocabulary(choose_draft_vocabulary(counts, size, num_tokens=case.vocabulary))
        samples = []
        for index in range(sum(name.startswith("ids.") for name in tensors)):
            last = tensors[f"last_hidden.{index}"]
            greedy = torch.cat([head.logits(rows).argmax(-1) for rows in last.split(256)])
            states = TargetStates(tensors[f"taps.{index}"], last)
            ids = tensors[f"ids.{index}"] % case.vocabulary
            samples.append(Sample(ids, tensors[f"answer.{index}"], states, greedy))
        return cls(samples, head, drafter)

    def batch(self) -> DialogueBatch:
        """Put the dialogues together as distillation does."""
        return DialogueBatch.collate(
            ids=[sample.ids for sample in self.samples],
            answer=[sample.answer for sample in self.samples],
            states=[sample.states for sample in self.samples],
            names=[str(index) for index in range(len(self.samples))],
            greedy=[sample.greedy for sample in self.samples],
        )


def prepare(cases: Sequence[Case]) -> None:
    """Compute what is missing of the cases' answers and states."""
    missing = {_states_file(case): case for case in cases if not _states_file(case).exists()}
    if not missing:
        return
    folder = models.ensure()
    found = dialogues()
    target = Target(folder)
    vocab_size = len(target.head.weight)
    for path, case in missing.items():
        members = _whole(found, case.tokens) if case.batch is Kind.ALL else _batch(found, case.tokens)
        others = [dialogue for dialogue in found if dialogue not in members]
        tensors = {
            "head": target.head.weight.detach().clone(),
            "tapped_layers": torch.tensor(target.tapped_layers),
            "counts": count_answer_tokens(iter(others), vocab_size=vocab_size),
        }
        for index, dialogue in enumerate(members):
            states = target.states(dialogue.ids[None])
            tensors |= {
                f"ids.{index}": dialogue.ids,
                f"answer.{index}": dialogue.answer_mask,
                f"taps.{index}": states.taps[0].contiguous(),
                f"last_hidden.{index}": states.last_hidden[0].contiguous(),
            }
        put_whole(path, partial(save_file, tensors))


def _states_file(case: Case) -> Path:
    return BUILD / f"states-{case.batch}-{case.tokens}-{_digest()}.safetensors"


@cache
def _digest() -> str:
    """Of all that answers and states come from: other prompts, or another model, have files of their own."""
    asked: JsonValue = {
        "prompts": [prompt for domain in DOMAINS for prompt in prompts(domain, PROMPTS)],
        "model": read_config(models.ensure()) | {"name": models.folder().name},
        "sizes": [MAX_TOKENS, SEQUENCE_LENGTH, TOGETHER, _SEED, _BATCHES],
    }
    return sha256(asked)[:12]


def dialogues() -> list[Dialogue]:
    """Return the demonstration's prompts with their answers, which are computed once."""
    path = BUILD / f"dialogues-{_digest()}.json"
    if not path.exists():
        write_whole(path, json.dumps(_answered(models.ensure())) + "\n")
    found = (
        Dialogue(str(index), line["domain"], np.array(line["prompt"], np.int32), np.array(line["answer"], np.int32))
        for index, line in enumerate(json.loads(path.read_text()))
    )
    return fit(found, sequence_length=SEQUENCE_LENGTH)[0]


def _answered(folder: Path) -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    domains = [domain for domain in DOMAINS for _ in range(PROMPTS)]
    words = [[{"role": "user", "content": prompt}] for domain in DOMAINS for prompt in prompts(domain, PROMPTS)]
    asked = tokenizer.apply_chat_template(
        words, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        whole = model.generate(**asked, do_sample=False, max_new_tokens=MAX_TOKENS)
    length = asked["input_ids"].shape[1]
    lines = []
    for domain, ids, is_prompt in zip(domains, whole, asked["attention_mask"].bool(), strict=True):
        answer = ids[length:].tolist()
        end = tokenizer.eos_token_id
        stop = answer.index(end) + 1 if end in answer else len(answer)
        lines.append({"domain": domain, "prompt": ids[:length][is_prompt].tolist(), "answer": answer[:stop]})
    return lines


def _batch(dialogues: Sequence[Dialogue], tokens: int) -> list[Dialogue]:
    """Return the batch that comes closest to so many tokens, of those that distillation would train on first."""
    split = Split(TOGETHER, rank=0, world_size=1, accumulation=1)
    batches = DialogueBatches(dialogues, _NoTeacher(), split=split, seed=_SEED)
    drawn = [[dialogues[index] for index in batches.members(step)] for step in range(_BATCHES)]
    return min(drawn, key=lambda members: abs(sum(map(len, members)) - tokens))


class _NoTeacher:
    """Of batches whose members alone are asked for."""

    def prepare(self, dialogues: Sequence[Dialogue]) -> None:
        """Do nothing."""

    def batch(self, dialogues: Sequence[Dialogue]) -> DialogueBatch:
        """Refuse."""
        raise NotImplementedError(dialogues)


def _whole(dialogues: Sequence[Dialogue], tokens: int) -> list[Dialogue]:
    """Return all dialogues one after the other, again and again, as one answer to the first token."""
    ids = np.concatenate([np.concatenate([dialogue.prompt_ids, dialogue.answer_ids]) for dialogue in dialogues])
    ids = np.resize(ids, tokens)
    return [Dialogue("all", "all", ids[:1], ids[1:])]


def _head(weight: Tensor, vocabulary: int) -> TeacherHead:
    """Cut the target's head, or add rows of small random numbers, to this vocabulary.

    The target's most likely tokens must stay what they are: larger rows would win, most of them outside of the draft
    vocabulary, and we would be measured on a third of the rows.
    """
    more = max(0, vocabulary - len(weight))
    noise = torch.randn(more, weight.shape[1], generator=torch.Generator().manual_seed(_SEED)) * weight.std() / 10
    return TeacherHead(torch.cat([weight[:vocabulary], noise]))
