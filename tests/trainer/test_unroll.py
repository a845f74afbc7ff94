"""The unroll against the backbone's own language model, and against rows run one by one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from osprey_trainer import unroll as unrolled
from osprey_trainer.masks import supervise
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.unroll import unroll

STEPS = 4


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def source(make_model, tmp_path_factory, request):
    """The small language model that backbones are cut from, of each family."""
    folder = tmp_path_factory.mktemp("source")
    heads = {} if request.param != "qwen2" else {"head_dim": 8}  # it has none of its own
    return make_model(folder, family=request.param, layers=5, hidden=32, seed=2, tie_word_embeddings=True, **heads)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("rows", ["supervised", "all"])
def test_at_initialisation_every_step_is_the_backbone(osprey, source, dialogues, layers, rows):
    batch = dialogues((5, 12), (9, 6), (1, 17))
    drafter = osprey(layers, source)
    chosen = supervise(batch, drafter.t2d, STEPS).rows
    if rows == "all":
        chosen = torch.arange(batch.ids.shape[1] - 1).expand(len(batch.ids), -1)

    with torch.no_grad():
        outputs = unroll(drafter, batch.ids, batch.states.taps * 5, chosen, STEPS)
        expected = Backbone.prune(source, layers)(batch.ids[:, 1:])

    compared = 0
    for k, output in enumerate(outputs):
        for b, dialogue_rows in enumerate(chosen.tolist()):
            for r, i in enumerate(dialogue_rows):
                if i + 1 + k < batch.ids.shape[1]:
                    torch.testing.assert_close(output[b, r], expected[b, i + k], atol=2e-5, rtol=1e-5)
                    compared += 1
    assert compared > 100


def test_the_backbone_is_the_source_cut_short(source):
    hf = AutoModelForCausalLM.from_pretrained(source).eval()
    hf.model.layers = hf.model.layers[:2]
    ids = torch.randint(64, (2, 19), generator=torch.Generator().manual_seed(0))
    backbone = Backbone.prune(source, 2)
    with torch.no_grad():
        logits = backbone(ids) @ backbone.head_weight.T
        torch.testing.assert_close(logits, hf(ids, use_cache=False).logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("made", [("osprey", 1), ("osprey", 3), ("eagle3", 1)])
def test_every_row_equals_a_row_run_by_itself(trained, slow_drafter, source, dialogues, made):
    batch = dialogues((4, 7), (2, 9), (6, 3))
    drafter = trained(*made, source=source)
    supervision = supervise(batch, drafter.t2d, STEPS)
    with torch.no_grad():
        outputs = unroll(drafter, batch.ids, batch.states.taps, supervision.rows, STEPS)

    slow = slow_drafter(drafter)
    compared = [0] * STEPS
    for b in range(len(batch.ids)):
        for r, i in enumerate(supervision.rows[b].tolist()):
            if not supervision.asked[0, b, r]:
                continue
            steps = int(supervision.asked[:, b, r].sum())
            chain = slow.chain(
                batch.ids[b],
                batch.states.taps[b],
                i,
                steps,
                choose=lambda k, _normed, b=b, i=i: int(batch.ids[b, i + 2 + k]),
            )
            for k, expected in enumerate(chain):
                torch.testing.assert_close(outputs[k][b, r].double(), expected, atol=1e-4, rtol=1e-4)
                compared[k] += 1
    assert compared == [16, 13, 10, 8]


@pytest.mark.parametrize("arrangement", ["osprey", "eagle3"])
@pytest.mark.parametrize("bf16", [False, True])
def test_attention_in_blocks_is_the_same_and_keeps_no_scores(trained, dialogues, monkeypatch, arrangement, bf16):
    drafter = trained(arrangement)
    batch = dialogues((4, 60), (12, 43))
    rows = supervise(batch, drafter.t2d, STEPS).rows
    scores = len(rows) * drafter.config.body.num_heads * rows.shape[1] * (batch.ids.shape[1] - 1)

    def run() -> tuple[list[torch.Tensor], int]:
        """Outputs and gradients; elements of the largest tensor that was kept for the gradients."""
        kept = []

        def keep(tensor):
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = unroll(drafter, batch.ids, batch.states.taps, rows, STEPS)
            loss = sum(output.float().square().sum() for output in outputs)
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # the head is not part of it
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)], max(kept)

    expected, largest = run()
    assert largest > scores
    monkeypatch.setattr(unrolled, "MANY_SCORES", scores - 1)
    monkeypatch.setattr(unrolled, "_BLOCK_ROWS", 17)
    found, largest = run()
    assert largest < scores / 2
    for one, other in zip(found, expected, strict=True):
        tolerance = (5e-2 if bf16 else 1e-5) * float(other.detach().abs().max())
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


def test_padding_and_the_future_change_nothing(trained, dialogues):
    drafter = trained("osprey")
    rows = torch.tensor([[2, 3, 4, 5]])
    both = dialogues((4, 9), (3, 5))
    with torch.no_grad():
        alone = unroll(drafter, both.ids[1:, :8], both.states.taps[1:, :8], rows, 2)
        padded = unroll(drafter, both.ids, both.states.taps, rows.expand(2, -1), 2)
    for k in range(2):
        torch.testing.assert_close(alone[k][0, : 4 - k], padded[k][1, : 4 - k])
