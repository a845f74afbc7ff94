"""Replay what a server did with a drafter in the trainer's own simulation, request by request.

A drafter that trains well and serves badly is the classic failure. In fp32 on a CPU the two agree in nearly every
request; where they do not, a near-tie of two logits fell the other way.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from osprey_trainer.acceptance import simulate
from osprey_trainer.data.answers import Dialogue
from osprey_trainer.data.teacher import OnlineTeacher, alike_in_length
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.target import Target


@torch.no_grad()
def verify_steps(target: Path, drafter: Path, requests: Sequence[Mapping[str, Any]], *, steps: int) -> list[int]:
    """Return the verify steps that the trainer's simulation counts for each request of an evaluation.

    Args:
        target: folder of the target.
        drafter: folder of the drafter, in the serving format.
        requests: lines of `requests.jsonl`: prompt_ids, output_ids.
        steps: tokens that the server drafted per verification.
    """
    teacher = OnlineTeacher(Target(target), greedy=True, device=torch.device("cpu"))
    model = Drafter.load(drafter).eval()
    dialogues = [
        Dialogue(
            name=str(index),
            domain=request["domain"],
            prompt_ids=np.array(request["prompt_ids"], dtype=np.int32),
            answer_ids=np.array(request["output_ids"], dtype=np.int32),
        )
        for index, request in enumerate(requests)
    ]
    counted = {
        int(replayed.name): replayed.verify_steps
        for batch in alike_in_length(dialogues)
        for replayed in simulate(model, teacher.batch(batch), steps=steps)
    }
    return [counted[index] for index in range(len(dialogues))]
