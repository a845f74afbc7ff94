"""Judges one drafter in a process of its own: `python -m dev.results.judge`, a task on its input, counts on its output.

Verify steps are those of the trainer's simulation on answers that the target gave before, and on its states, captured
once: as SGLang counts them. For greedy answers a draft counts as accepted where it is the target's own next token. For
answers at temperature 1 it is accepted where it is the token that was sampled; the chance of that is the target's
probability of the draft, which is with what chance a chain with one branch is accepted by a server that verifies by
sampling.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from osprey_api.stages import ArtifactRef, StorageLocation
from osprey_runtime.manifest import RemoteArtifact
from osprey_trainer.acceptance import simulate
from osprey_trainer.data.answers import fit, read_dialogues
from osprey_trainer.data.states import StreamedTeacher
from osprey_trainer.data.teacher import alike_in_length
from osprey_trainer.models.draft import Drafter


@torch.no_grad()
def judge(
    drafter: Drafter, answers: Path, states: RemoteArtifact, chains: Sequence[int], *, sequence_length: int
) -> dict[int, list[dict[str, Any]]]:
    """Return for each length of the chain the answers in their order: domain, tokens, verify steps.

    Args:
        drafter: the drafter.
        answers: folder of what regenerate made.
        states: the target's, of these answers.
        chains: tokens drafted per verification.
        sequence_length: with which the states were captured.
    """
    dialogues, _ = fit(read_dialogues(answers, vocab_size=drafter.config.vocab_size), sequence_length=sequence_length)
    domains = {dialogue.name: dialogue.domain for dialogue in dialogues}
    found: dict[int, dict[str, dict[str, Any]]] = {chain: {} for chain in chains}
    with tempfile.TemporaryDirectory() as scratch:
        teacher = StreamedTeacher(states, dialogues, Path(scratch))
        for members in alike_in_length(dialogues):
            batch = teacher.batch(members)
            for chain, counted in found.items():
                for request in simulate(drafter, batch, steps=chain):
                    counted[request.name] = {
                        "domain": domains[request.name],
                        "tokens": request.completion_tokens,
                        "steps": request.verify_steps,
                    }
    return {chain: [counted[dialogue.name] for dialogue in dialogues] for chain, counted in found.items()}


def main() -> None:
    """Read the task, write the counts."""
    task: Mapping[str, Any] = json.load(sys.stdin)
    drafter = Drafter.load(Path(task["drafter"])).eval()
    storage = StorageLocation.model_validate(task["storage"])
    counts = judge(
        drafter,
        Path(task["answers"]),
        RemoteArtifact(storage, ArtifactRef.model_validate(task["states"])),
        task["chains"],
        sequence_length=task["sequence_length"],
    )
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
