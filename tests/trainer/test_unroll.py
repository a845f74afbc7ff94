"""The unroll against the backbone's own language model, and against rows run one by one."""

import copy
import dataclasses
from bisect import bisect_right

import pytest
import torch
from transformers import AutoModelForCausalLM

from osprey_trainer.batch import DialogueBatch
from osprey_trainer.masks import supervise
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.body import RMSNorm
from osprey_trainer.models.target import TargetStates
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
    chosen = supervise(batch, drafter.t2d, STEPS).rows.tolist()
    if rows == "all":
        chosen = (torch.arange(len(batch.ids)) < batch.lasts).nonzero().flatten().tolist()

    busy = TargetStates(batch.states.taps * 5, batch.states.last_hidden)
    with torch.no_grad():
        outputs = unroll(drafter, dataclasses.replace(batch, states=busy), chosen, STEPS)
        backbone = Backbone.prune(source, layers)
        expected = [backbone(ids[None, 1:])[0] for ids in batch.by_dialogue(batch.ids)]

    compared = 0
    for k, output in enumerate(outputs):
        for r, (dialogue, i) in enumerate(placed(batch, chosen)):
            if i + 1 + k < batch.lengths[dialogue]:
                torch.testing.assert_close(output[r], expected[dialogue][i + k], atol=2e-5, rtol=1e-5)
                compared += 1
    assert compared > 100


def placed(batch, rows):
    """Dialogue and position of each row."""
    starts = [sum(batch.lengths[:index]) for index in range(len(batch.lengths))]
    dialogues = [bisect_right(starts, row) - 1 for row in rows]
    return [(dialogue, row - starts[dialogue]) for dialogue, row in zip(dialogues, rows, strict=True)]


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
    rows = supervision.rows.tolist()
    with torch.no_grad():
        outputs = unroll(drafter, batch, rows, STEPS)

    slow = slow_drafter(drafter)
    compared = [0] * STEPS
    for r, (dialogue, i) in enumerate(placed(batch, rows)):
        ids, taps = batch.by_dialogue(batch.ids)[dialogue], batch.by_dialogue(batch.states.taps)[dialogue]
        steps = int(supervision.asked[:, r].sum())
        chain = slow.chain(ids, taps, i, steps, choose=lambda k, _normed, ids=ids, i=i: int(ids[i + 2 + k]))
        for k, expected in enumerate(chain):
            torch.testing.assert_close(outputs[k][r].double(), expected, atol=1e-4, rtol=1e-4)
            compared[k] += 1
    assert compared == [16, 13, 10, 8]


@pytest.mark.parametrize("made", [("osprey", 2), ("eagle3", 1)])
def test_nothing_leaks_between_packed_dialogues_at_any_step(trained, source, dialogues, made):
    """Neither values nor gradients: the neighbours' states and tokens are as good as not there."""
    drafter = trained(*made, source=source)
    batch = dialogues((4, 9), (3, 5), (6, 8))
    middle = slice(batch.lengths[0], batch.lengths[0] + batch.lengths[1])
    rows = list(range(middle.start, middle.stop - 1))

    ids, taps = batch.ids[middle], batch.states.taps[middle]
    states = TargetStates(taps, batch.states.last_hidden[middle])
    own = DialogueBatch.collate([ids], [batch.answer[middle]], [states], ["alone"])
    with torch.no_grad():
        alone = unroll(drafter, own, range(len(rows)), STEPS)

    others = batch.states.taps.clone().requires_grad_()
    packed = dataclasses.replace(batch, states=TargetStates(others, batch.states.last_hidden))
    outputs = unroll(drafter, packed, rows, STEPS)
    for k in range(STEPS):
        torch.testing.assert_close(outputs[k], alone[k], atol=1e-5, rtol=1e-5)
        (gradient,) = torch.autograd.grad(outputs[k].square().sum(), others, retain_graph=True)
        assert gradient[middle].abs().sum(1)[:-1].gt(0).all()
        gradient[middle] = 0
        assert not gradient.any()

    disturbed = batch.ids.clone()
    disturbed[: middle.start] = 1
    disturbed[middle.stop :] = 2
    with torch.no_grad():
        again = unroll(drafter, dataclasses.replace(packed, ids=disturbed), rows, STEPS)
    for k in range(STEPS):
        assert torch.equal(again[k], outputs[k])


def test_the_future_changes_nothing(trained, dialogues):
    drafter = trained("osprey")
    batch = dialogues((4, 9))
    cut = DialogueBatch.collate(
        [batch.ids[:8]], [batch.answer[:8]], [TargetStates(batch.states.taps[:8], batch.states.last_hidden[:8])], ["x"]
    )
    with torch.no_grad():
        shorter = unroll(drafter, cut, [2, 3, 4, 5], 2)
        longer = unroll(drafter, batch, [2, 3, 4, 5], 2)
    for k in range(2):
        torch.testing.assert_close(shorter[k], longer[k])


@pytest.mark.parametrize("arrangement", ["osprey", "eagle3"])
def test_nothing_of_rows_times_keys_is_kept(trained, dialogues, arrangement):
    drafter = trained(arrangement)

    def kept(length: int) -> int:
        """Elements of all tensors that are kept for the gradient."""
        batch = dialogues((4, length))
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = unroll(drafter, batch, supervise(batch, drafter.t2d, STEPS).rows.tolist(), STEPS)
        assert len(outputs) == STEPS
        return sum(storages.values())

    assert kept(800) - kept(400) == pytest.approx(kept(400) - kept(1), rel=0.05)


def test_a_norm_gives_the_dtype_that_it_was_given(monkeypatch):
    """On a GPU autocast has norms give fp32, and queries would no longer fit keys and values."""
    norm = torch.nn.functional.rms_norm
    monkeypatch.setattr("osprey_trainer.models.body.functional.rms_norm", lambda x, *more: norm(x, *more).float())
    assert RMSNorm(8, 1e-6)(torch.ones(3, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.gpu
def test_a_gpu_runs_the_same_unroll(trained, source, dialogues):
    """In half precision, as distillation has it."""
    drafter = trained("osprey", 2, source=source)
    batch = dialogues((4, 60), (12, 43))
    rows = supervise(batch, drafter.t2d, STEPS).rows.tolist()
    weights = []
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(drafter).to(device)
        with torch.autocast(device, torch.bfloat16):
            outputs = unroll(moved, batch.to(torch.device(device)), rows, STEPS)
        sum(output.float().square().sum() for output in outputs).backward()
        weights.append([*outputs, moved.fc.weight.grad, moved.layers[0].self_attn.k_proj.weight.grad])
    for one, other in zip(*weights, strict=True):
        assert torch.dist(one.float(), other.float().cpu()) < 0.05 * one.float().norm()
