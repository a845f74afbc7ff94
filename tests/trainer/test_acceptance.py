"""Simulated acceptance against real speculation: the drafter run again and again on its own predictions."""

import dataclasses

import pytest
import torch

from osprey_trainer.acceptance import RequestAcceptance, replay, simulate, summarise
from osprey_trainer.batch import DialogueBatch
from osprey_trainer.losses.divergence import Divergence
from osprey_trainer.masks import supervise
from osprey_trainer.models.target import TargetStates
from osprey_trainer.objectives import Distillation
from osprey_trainer.vocabulary import DraftVocabulary

STEPS = 3


def speculate(slow, ids, taps, prompt, steps):
    """A server's loop. The answer is known, so verifying is comparing. Returns the number of verify steps."""
    verified, verify_steps = prompt + 1, 0  # the prefill gave the first token
    while verified < len(ids):
        verify_steps += 1
        draft = []

        def choose(_k, normed, draft=draft):
            draft.append(slow.token(normed))
            return draft[-1]

        outputs = slow.chain(ids, taps, verified - 2, steps, choose)
        draft.append(slow.token(outputs[-1]))
        accepted = 0
        while accepted < steps and verified + accepted < len(ids) and draft[accepted] == ids[verified + accepted]:
            accepted += 1
        verified += accepted + 1
    return verify_steps


@pytest.fixture
def good_drafter(trained, target):
    """Fitted to the dialogues, so that chains of every length are accepted."""

    def make(arrangement, batch):
        drafter = trained(arrangement)
        keep = torch.arange(64) % 9 != 0
        drafter = drafter.with_draft_vocabulary(DraftVocabulary(keep.nonzero().flatten(), 64, 1.0))
        objective = Distillation(
            drafter,
            dataclasses.replace(target.head, scale=4.0),
            step_weights=[0.8**k for k in range(STEPS)],
            divergence=Divergence(),
        )
        optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            objective(batch, 1 / objective.rows(batch))[0].backward()
            optimizer.step()
        return drafter

    return make


@pytest.fixture
def greedy_dialogues(target, dialogues):
    """Dialogues whose answers the target really gives."""
    asked = dialogues((4, 1), (7, 1), (5, 1))
    prompts = asked.by_dialogue(asked.ids)
    lengths = [(4, 13), (7, 6), (5, 9)]
    ids, answers, states = [], [], []
    for prompt_ids, (prompt, answer) in zip(prompts, lengths, strict=True):
        x = prompt_ids[:prompt]
        for _ in range(answer):
            x = torch.cat([x, target.greedy_tokens(target.states(x[None]).last_hidden[0, -1:])])
        found = target.states(x[None])
        ids.append(x)
        answers.append(torch.arange(len(x)) >= prompt)
        states.append(TargetStates(found.taps[0], found.last_hidden[0]))
    return DialogueBatch.collate(ids, answers, states, ["a", "b", "c"]), lengths


@pytest.mark.parametrize("arrangement", ["osprey", "eagle3"])
def test_simulated_steps_equal_real_speculation(good_drafter, slow_drafter, greedy_dialogues, arrangement):
    batch, lengths = greedy_dialogues
    drafter = good_drafter(arrangement, batch)
    slow = slow_drafter(drafter)
    requests = simulate(drafter, batch, steps=STEPS, chunk=5)
    for b, (request, (prompt, answer)) in enumerate(zip(requests, lengths, strict=True)):
        ids, taps = batch.by_dialogue(batch.ids)[b], batch.by_dialogue(batch.states.taps)[b]
        assert request.verify_steps == speculate(slow, ids, taps, prompt, STEPS)
        assert request.completion_tokens == answer
    assert sum(sum(request.accepted) for request in requests) > 5
    assert any(request.verify_steps > 2 for request in requests)


def test_answers_cut_short_are_shorter_answers(good_drafter, greedy_dialogues, slow_drafter):
    batch, lengths = greedy_dialogues
    drafter = good_drafter("osprey", batch)
    slow = slow_drafter(drafter)
    for max_tokens in (1, 2, 5):
        for b, request in enumerate(simulate(drafter, batch, steps=STEPS, max_tokens=max_tokens)):
            prompt, answer = lengths[b]
            kept = min(answer, max_tokens)
            ids, taps = batch.by_dialogue(batch.ids)[b], batch.by_dialogue(batch.states.taps)[b]
            assert request.completion_tokens == kept
            assert request.verify_steps == speculate(slow, ids[: prompt + kept], taps, prompt, STEPS)


def toy(answer, names=("d",)):
    length = len(answer)
    states = TargetStates(torch.zeros(length, 3), torch.zeros(length, 1))
    answer = torch.tensor(answer, dtype=torch.bool)
    return DialogueBatch(torch.arange(length), (length,), answer, states, None, names)


def replayed(answer, hits, **options):
    """hits: by row, whether the drafter is right at each step."""
    batch = toy(answer)
    supervision = supervise(batch, torch.ones(99, dtype=torch.bool), len(hits[0]))
    return replay(batch, supervision, torch.tensor(hits, dtype=torch.bool).T, **options)


def test_counting_by_hand():
    """Answer of 6: the prefill gives a0; a1 a2 accepted and a3 free; a4 refused and free; a5 accepted."""
    hits = [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]]
    (request,) = replayed([0, 0, 1, 1, 1, 1, 1, 1], hits)
    assert request == RequestAcceptance("d", completion_tokens=6, verify_steps=3, drafted=(3, 1, 1), accepted=(2, 1, 0))


def test_each_answer_of_a_dialogue_is_a_request():
    first, second = replayed([0, 1, 1, 1, 0, 0, 1, 1], [[1], [0], [0]])
    assert (first.completion_tokens, first.verify_steps) == (3, 1)
    assert (second.completion_tokens, second.verify_steps) == (2, 1)


def test_a_request_without_verify_step_counts_for_nothing():
    none = RequestAcceptance("a", 1, 0, (), ())
    one = RequestAcceptance("b", 6, 2, (2, 1), (1, 0))
    two = RequestAcceptance("c", 4, 4, (4, 0), (0, 0))
    summary = summarise([none, one, two])
    assert summary.per_request == (3.0 + 1.0) / 2
    assert summary.corpus == 10 / 6
    assert summary.by_position == (1 / 6, 0.0)
    assert summary.requests == 3
    assert summarise([none]).corpus is None
