"""Judges one drafter in a process of its own: `python -m dev.results.judge`, a task on its input, counts on its output.

Verify steps are those of the trainer's simulation on answers that the target gave before: as SGLang counts them. For
greedy answers a draft counts as accepted where it is the target's own next token. For answers at temperature 1 it is
accepted where it is the token that was sampled; the chance of that is the target's probability of the draft, which is
with what chance a chain with one branch is accepted by a server that verifies by sampling.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from osprey_trainer.acceptance import simulate
from osprey_trainer.data.answers import Dialogue, read_dialogues
from osprey_trainer.data.teacher import OnlineTeacher, alike_in_length
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.target import Target


@torch.no_grad()
def judge(target: Path, drafter: Path, answers: Path, chains: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return for each length of the chain the answers in their order: domain, tokens, verify steps.

    Args:
        target: its folder.
        drafter: its folder.
        answers: folder of what regenerate made.
        chains: tokens drafted per verification.
    """
    # Greedy or not: what is asked is always the token that follows in the answer.
    teacher = OnlineTeacher(Target(target), greedy=True, device=torch.device("cpu"))
    model = Drafter.load(drafter).eval()
    dialogues: list[Dialogue] = list(read_dialogues(answers, vocab_size=model.config.vocab_size))
    found: dict[int, dict[str, dict[str, Any]]] = {chain: {} for chain in chains}
    domains = {dialogue.name: dialogue.domain for dialogue in dialogues}
    for members in alike_in_length(dialogues):
        batch = teacher.batch(members)
        for chain, counted in found.items():
            for request in simulate(model, batch, steps=chain):
                counted[request.name] = {
                    "domain": domains[request.name],
                    "tokens": request.completion_tokens,
                    "steps": request.verify_steps,
                }
    return {chain: [counted[dialogue.name] for dialogue in dialogues] for chain, counted in found.items()}


def main() -> None:
    """Read the task, write the counts."""
    task: Mapping[str, Any] = json.load(sys.stdin)
    counts = {
        name: judge(Path(task["target"]), Path(task["drafter"]), Path(wanted["folder"]), wanted["chains"])
        for name, wanted in task["answers"].items()
    }
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
