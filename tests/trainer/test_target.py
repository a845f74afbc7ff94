"""The target's states against Hugging Face's own."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from osprey_api.conditions import FailureReason
from osprey_trainer.errors import TrainerError
from osprey_trainer.models.target import Target, default_tapped_layers


def test_taps_are_inputs_of_the_layers_and_the_last_state_is_normed(target_folder):
    target = Target(target_folder, tapped_layers=(1, 4, 6))
    ids = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(0))
    states = target.states(ids)
    hf = LlamaForCausalLM.from_pretrained(target_folder).eval()
    with torch.no_grad():
        output = hf(ids, output_hidden_states=True, use_cache=False)
    expected = torch.cat([output.hidden_states[layer] for layer in (1, 4, 6)], dim=-1)
    torch.testing.assert_close(states.taps, expected)
    torch.testing.assert_close(states.last_hidden @ target.head.T, output.logits, atol=1e-4, rtol=1e-5)
    assert torch.equal(target.greedy_tokens(states.last_hidden, chunk=3), output.logits.argmax(-1))


def test_padding_on_the_right_changes_no_real_state(target):
    ids = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    alone = target.states(ids)
    padded = target.states(torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], dim=1))
    torch.testing.assert_close(padded.taps[:, :9], alone.taps, atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(padded.last_hidden[:, :9], alone.last_hidden, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(30, (2, 15, 27)), (36, (2, 18, 33)), (62, (2, 31, 59)), (7, (2, 3, 4)), (4, (1, 2, 3)), (3, (0, 1, 2))],
)
def test_default_taps(layers, expected):
    assert default_tapped_layers(layers) == expected


def test_two_layers_are_too_few():
    with pytest.raises(TrainerError, match="at least three"):
        default_tapped_layers(2)


@pytest.mark.parametrize("layers", [(2, 2, 3), (3, 2, 4), (1, 2), (0, 3, 7), (-1, 2, 3)])
def test_impossible_taps(target_folder, layers):
    with pytest.raises(TrainerError, match=r"for example \[2, 3, 4\]") as error:
        Target(target_folder, tapped_layers=layers)
    assert error.value.reason is FailureReason.INVALID_CONFIG


def test_a_target_that_bends_its_logits_is_refused(make_llama, tmp_path):
    make_llama(tmp_path, layers=3, hidden=24, seed=1)
    config = json.loads((tmp_path / "config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainerError, match="final_logit_softcapping"):
        Target(tmp_path)
