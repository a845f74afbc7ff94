"""The chunked loss against the readable one, and what it never allocates."""

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from osprey_trainer.losses import chunked, eager
from osprey_trainer.losses.divergence import Divergence, Kind
from osprey_trainer.teacher_head import TeacherHead

ROWS, HIDDEN, TEACHER, VOCAB = 37, 16, 12, 101
TEACHERS = 11
"""Of which some teach several rows, and some none."""


@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=g),
        "head": torch.randn(VOCAB, HIDDEN, generator=g),
        "teacher_hidden": torch.randn(TEACHERS, TEACHER, generator=g),
        "teachers": torch.randint(1, TEACHERS - 1, (ROWS,), generator=g),
        "teacher_head": TeacherHead(torch.randn(VOCAB, TEACHER, generator=g), scale=0.5, cap=2.0),
        "labels": torch.randint(VOCAB, (ROWS,), generator=g),
        "weight": torch.rand(ROWS, generator=g) / ROWS,
    }


def hard_cross_entropy(module, t, **chunk):
    return module.hard_cross_entropy(t["hidden"], t["head"], t["labels"], t["weight"], **chunk)


def soft_by(divergence):
    def loss(module, t, **chunk):
        return module.distillation(
            t["hidden"],
            t["head"],
            t["teacher_hidden"],
            t["teacher_head"],
            t["weight"],
            teachers=t["teachers"],
            divergence=divergence,
            **chunk,
        )

    return loss


soft = soft_by(Divergence())
EVERY_LOSS = [
    pytest.param(hard_cross_entropy, id="hard"),
    *(
        pytest.param(soft_by(Divergence(kind, lk_decay=2.0, hard=weight)), id=f"{kind}, {weight} hard")
        for kind in Kind
        for weight in (0.0, 0.3, 1.0)
    ),
]


def value_and_gradients(loss, module, tensors, **chunk):
    leaves = {name: tensors[name].clone().requires_grad_() for name in ("hidden", "head")}
    value, predicted = loss(module, tensors | leaves, **chunk)
    (value * 3).backward()  # as when a caller scales it
    return value.detach(), predicted, leaves["hidden"].grad, leaves["head"].grad


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("chunk", [1, 8, 37, 500])
def test_chunked_equals_eager(tensors, loss, chunk):
    expected = value_and_gradients(loss, eager, tensors)
    found = value_and_gradients(loss, chunked, tensors, chunk=chunk)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_soft_loss_by_hand():
    """Two draft tokens; the teacher gives odds 3:1, the drafter even odds."""
    hidden, head = torch.zeros(1, 1), torch.ones(2, 1)
    teacher_hidden, teacher_head = torch.ones(1, 1), TeacherHead(torch.tensor([[3.0], [1.0]]).log())
    tensors = {
        "hidden": hidden,
        "head": head,
        "teacher_hidden": teacher_hidden,
        "teachers": torch.tensor([0]),
        "teacher_head": teacher_head,
        "weight": torch.tensor([2.0]),
    }
    acceptance = 0.5 + 0.25
    mix = math.exp(-3 * acceptance)
    for divergence, expected in {
        Divergence(): math.log(2),
        Divergence(Kind.LK_ALPHA): -math.log(acceptance),
        Divergence(Kind.LK_LAMBDA): mix * math.log(2) + (1 - mix) * (1 - acceptance),
        Divergence(Kind.LK_ALPHA, hard=0.25): -0.75 * math.log(acceptance) + 0.25 * math.log(2),
    }.items():
        for module, chunk in ((eager, {}), (chunked, {"chunk": 4})):
            value, _ = soft_by(divergence)(module, tensors, **chunk)
            assert value.item() == pytest.approx(2 * expected)


@pytest.mark.parametrize("kind", list(Kind))
def test_equal_distributions_ask_for_nothing(kind):
    log_p = torch.randn(5, 11).log_softmax(-1)
    gradient = log_p.clone()
    losses = Divergence(kind).losses_and_gradients(log_p.exp(), gradient)
    assert gradient.abs().max() < 1e-6
    if kind is Kind.LK_ALPHA:
        assert losses.abs().max() < 1e-6


def test_distributions_that_share_nothing_have_a_finite_loss():
    """Kept apart by more than fp32 can tell."""
    log_q = torch.tensor([[0.0, -300.0]])
    losses = Divergence(Kind.LK_ALPHA).losses_and_gradients(torch.tensor([[0.0, 1.0]]), log_q)
    assert losses.isfinite().all()
    assert log_q.isfinite().all()


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_a_frozen_head_gets_no_gradient(tensors, loss):
    hidden = tensors["hidden"].clone().requires_grad_()
    value, _ = loss(chunked, tensors | {"hidden": hidden}, chunk=8)
    value.backward()
    assert hidden.grad is not None
    assert tensors["head"].grad is None


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_no_rows(tensors, loss):
    empty = {name: x if "head" in name else x[:0] for name, x in tensors.items()}
    value, predicted, to_hidden, to_head = value_and_gradients(loss, chunked, empty, chunk=8)
    assert value == 0
    assert len(predicted) == len(to_hidden) == 0
    assert not to_head.any()


def test_under_autocast_it_runs_in_bfloat16(tensors):
    with torch.autocast("cpu", torch.bfloat16):
        found = value_and_gradients(soft, chunked, tensors, chunk=8)
        expected = value_and_gradients(soft, eager, tensors)
    torch.testing.assert_close(found[0], expected[0], atol=0.02, rtol=0.02)
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.03, rtol=0.05)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_no_tensor_of_rows_times_vocabulary(loss):
    rows, vocab, chunk = 2048, 4096, 64
    t = {
        "hidden": torch.randn(rows, 8).requires_grad_(),
        "head": torch.randn(vocab, 8).requires_grad_(),
        "teacher_hidden": torch.randn(rows, 8),
        "teachers": torch.arange(rows),
        "teacher_head": TeacherHead(torch.randn(vocab, 8)),
        "labels": torch.randint(vocab, (rows,)),
        "weight": torch.ones(rows) / rows,
    }

    def largest(**options):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss(chunked if options else eager, t, **options)[0].backward()
        return max(event.self_cpu_memory_usage for event in profiler.events())

    assert largest() >= rows * vocab * 4
    assert largest(chunk=chunk) <= 2 * chunk * vocab * 4


def test_a_teacher_of_several_rows_is_computed_once(tensors, monkeypatch):
    """As in the unroll, where the rows of all steps share their teachers."""
    asked = []
    logits = TeacherHead.logits

    def counted(self, hidden):
        asked.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(TeacherHead, "logits", counted)
    shared = tensors | {"teachers": torch.arange(ROWS) % TEACHERS}
    soft(chunked, shared, chunk=ROWS)
    assert asked == [TEACHERS]
    asked.clear()
    soft(chunked, shared, chunk=8)
    assert sum(asked) <= TEACHERS + ROWS // 8  # one more where two chunks meet
