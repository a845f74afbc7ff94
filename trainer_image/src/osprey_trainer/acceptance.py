"""Acceptance length without a server: greedy chain speculation replayed on answers that the target already gave.

A verify step proposes K tokens and keeps the longest prefix that the target would have produced, plus one token of
the target's own. Since the drafter's rows depend on verified tokens alone, the teacher-forced unroll holds every
chain that serving could start: no loop is needed. Counting follows SGLang: acceptance length = completion tokens /
verify steps, where the completion includes the token that the prefill already gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from osprey_trainer.batch import DialogueBatch
from osprey_trainer.masks import Supervision, supervise
from osprey_trainer.models.draft import Drafter
from osprey_trainer.unroll import unroll


@dataclass(frozen=True)
class RequestAcceptance:
    """One answer under speculation.

    Attributes:
        name: of the dialogue.
        completion_tokens: tokens of the answer, the prefill's included.
        verify_steps: zero if the prefill already gave the whole answer.
        drafted: by draft position, verify steps whose chain was right up to that position and whose answer went on
            there.
        accepted: by draft position, those of `drafted` whose token was right too.
    """

    name: str
    completion_tokens: int
    verify_steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class AcceptanceSummary:
    """Of many requests.

    Attributes:
        per_request: unweighted mean of tokens / steps over the requests with a verify step; None without any.
        corpus: all tokens / all steps of these requests; None without any.
        by_position: share accepted of those drafted, at each draft position; None where none was drafted.
    """

    requests: int
    completion_tokens: int
    verify_steps: int
    per_request: float | None
    corpus: float | None
    by_position: tuple[float | None, ...]


@torch.no_grad()
def simulate(
    drafter: Drafter,
    batch: DialogueBatch,
    *,
    steps: int,
    max_tokens: int | None = None,
    chunk: int = 256,
) -> list[RequestAcceptance]:
    """Replays speculation on every answer of a batch; a dialogue with several answers is as many requests.

    Args:
        drafter: the drafter.
        batch: dialogues with greedy answers.
        steps: K, tokens drafted by a verify step.
        max_tokens: cuts every answer there, as a server does.
        chunk: rows whose [chunk, Vd] logits exist at one time.
    """
    supervision = supervise(batch, drafter.t2d, steps)
    outputs = unroll(drafter, batch, supervision.rows.tolist(), steps)
    hits = torch.stack(
        [
            greedy_draft(drafter, output, chunk) == labels
            for output, labels in zip(outputs, supervision.labels, strict=True)
        ]
    )
    return replay(batch, supervision, hits, max_tokens=max_tokens)


def greedy_draft(drafter: Drafter, hidden: Tensor, chunk: int) -> Tensor:
    """hidden: [R, H] -> the drafter's token, as an id of the target, int64 [R]."""
    parts = [functional.linear(part, drafter.lm_head.weight).argmax(-1) for part in torch.split(hidden, chunk)]
    return drafter.draft_ids[torch.cat(parts)]


def replay(
    batch: DialogueBatch, supervision: Supervision, hits: Tensor, *, max_tokens: int | None = None
) -> list[RequestAcceptance]:
    """Walks through every answer of a batch from verify step to verify step.

    Args:
        batch: the dialogues.
        supervision: rows of the batch for K steps.
        hits: bool [K, R], whether the drafter's token at each step is the label.
        max_tokens: cuts every answer there.
    """
    by_row = (hits & supervision.asked).T.tolist()
    requests, first_row = [], 0
    for name, answer in zip(batch.names, batch.by_dialogue(batch.answer.cpu()), strict=True):
        for length in _answer_lengths(answer.tolist()):
            rows = slice(first_row, first_row + length - 1)
            first_row += length - 1
            tokens = length if max_tokens is None else min(length, max_tokens)
            requests.append(_walk(name, tokens, by_row[rows]))
    return requests


def _answer_lengths(answer: Sequence[bool]) -> list[int]:
    """Lengths of the runs of true. A run of n tokens has n - 1 rows, the prefill having given the first token."""
    lengths, current = [], 0
    for mark in [*answer, False]:
        if mark:
            current += 1
        elif current:
            lengths.append(current)
            current = 0
    return lengths


def _walk(name: str, tokens: int, hits: Sequence[Sequence[bool]]) -> RequestAcceptance:
    """hits: [rows][K], of the row whose input is the last verified token."""
    steps = len(hits[0]) if hits else 0
    drafted, accepted = [0] * steps, [0] * steps
    verified, verify_steps = 1, 0  # the prefill gave the first token
    while verified < tokens:
        verify_steps += 1
        chain = hits[verified - 1]
        length = 0
        while length < steps and verified + length < tokens:
            drafted[length] += 1
            if not chain[length]:
                break
            accepted[length] += 1
            length += 1
        verified += length + 1
    return RequestAcceptance(name, tokens, verify_steps, tuple(drafted), tuple(accepted))


def summarise(requests: Sequence[RequestAcceptance]) -> AcceptanceSummary:
    """Per-request mean and corpus ratio, with the acceptance by draft position."""
    verified = [request for request in requests if request.verify_steps]
    tokens = sum(request.completion_tokens for request in verified)
    verify_steps = sum(request.verify_steps for request in verified)
    ratios = [request.completion_tokens / request.verify_steps for request in verified]
    drafted = _columns([request.drafted for request in verified])
    accepted = _columns([request.accepted for request in verified])
    return AcceptanceSummary(
        requests=len(requests),
        completion_tokens=tokens,
        verify_steps=verify_steps,
        per_request=sum(ratios) / len(ratios) if ratios else None,
        corpus=tokens / verify_steps if verify_steps else None,
        by_position=tuple(a / d if d else None for a, d in zip(accepted, drafted, strict=True)),
    )


def _columns(counts: Sequence[Any]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]
