"""What the trainer learns from is what the server computes: tapped states, last states and logits of the same text."""

import httpx
import pytest
import torch

from osprey_trainer.models.target import Target

TAPPED_LAYERS = (1, 2, 3)
EXACT = {"atol": 2e-4, "rtol": 2e-4}
"""Both compute in fp32, with other kernels."""


def of_prompt(server, prompt):
    """The states of every prompt token, and the log-probabilities of the next tokens, by position."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_hidden_states": True,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 5,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    answer.raise_for_status()
    told = answer.json()["meta_info"]
    (states, *_) = told["hidden_states"]
    return torch.tensor(states), told["input_top_logprobs"]


@pytest.fixture(scope="module")
def target(tiny):
    return Target(tiny.folder, tapped_layers=TAPPED_LAYERS)


@pytest.fixture(scope="module")
def own(tiny, target):
    """The trainer's states of each prompt."""
    return [target.states(torch.tensor([prompt])) for prompt in tiny.prompts]


def test_last_states_and_logits_are_the_servers(tiny, target, own, sglang_server):
    with sglang_server(tiny.folder, extra_args=("--enable-return-hidden-states",)) as server:
        for prompt, states in zip(tiny.prompts, own, strict=True):
            theirs, likely = of_prompt(server, prompt)
            torch.testing.assert_close(states.last_hidden[0], theirs, **EXACT)
            log_probabilities = target.head.logits(states.last_hidden[0]).log_softmax(-1)
            for position, entries in enumerate(likely[1:]):  # of the first token nothing is said
                for log_probability, token, _ in entries:
                    assert log_probabilities[position, token].item() == pytest.approx(log_probability, abs=1e-3)


def test_tapped_states_are_the_servers(tiny, own, sglang_server):
    folder = tiny.drafters["osprey"].folder
    with sglang_server(tiny.folder, folder, extra_args=("--enable-return-hidden-states",)) as server:
        for prompt, states in zip(tiny.prompts, own, strict=True):
            theirs, _ = of_prompt(server, prompt)
            torch.testing.assert_close(states.taps[0], theirs, **EXACT)
