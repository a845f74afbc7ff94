"""Packed attention without a mask against one softmax over a masked matrix, in float64."""

import pytest
import torch

from osprey_trainer.attention import kernels, packed
from osprey_trainer.attention.kernels import Eager, FlashOnCpu, FlashOnGpu, kernel_for
from osprey_trainer.attention.packed import attend
from osprey_trainer.attention.runs import Run, runs

LENGTHS = (7, 1, 12, 40)
ROWS = [2, 3, 4, 8, 9, 10, 13, 14, 17, 20, 21, 22, 23, 58]
"""A run inside of a dialogue, one from the first token, several in one, neighbours across a border, a single one."""
HEADS, KV_HEADS, D = 6, 2, 8


def test_rows_are_cut_where_a_dialogue_ends_and_where_rows_are_left_out():
    assert runs([2, 3, 4, 7, 8, 11], (5, 7)) == (
        Run(slice(0, 3), slice(0, 2), slice(2, 5)),
        Run(slice(3, 5), slice(5, 7), slice(7, 9)),
        Run(slice(5, 6), slice(5, 11), slice(11, 12)),
    )
    assert runs([3, 4, 5, 6], (5, 7)) == (
        Run(slice(0, 2), slice(0, 3), slice(3, 5)),
        Run(slice(2, 4), slice(5, 5), slice(5, 7)),
    )
    assert runs([], (5, 7)) == ()


def reference(queries, keys, values, own):
    """The definition, row by row, and head by head."""
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    rows = []
    for r, place in enumerate(ROWS):
        start = max(x for x in starts if x <= place)
        heads = []
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            seen = torch.cat([keys[start : place + 1, of], *(k[r, of][None] for k, _ in own)])
            mixed = torch.cat([values[start : place + 1, of], *(v[r, of][None] for _, v in own)])
            heads.append((seen @ queries[r, head] / D**0.5).softmax(0) @ mixed)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def tensors(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(steps)

    def random(*shape):
        return (2 * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_()

    own = [(random(len(ROWS), KV_HEADS, D), random(len(ROWS), KV_HEADS, D)) for _ in range(steps)]
    return random(len(ROWS), HEADS, D), random(sum(LENGTHS), KV_HEADS, D), random(sum(LENGTHS), KV_HEADS, D), own


@pytest.mark.parametrize("kernel", [FlashOnCpu, Eager])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_definition(kernel, steps, dtype, monkeypatch):
    monkeypatch.setattr(packed, "kernel_for", lambda _queries: kernel())
    queries, keys, values, own = tensors(steps, dtype)
    leaves = [queries, keys, values, *(x for pair in own for x in pair)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(*exact[:3], list(zip(exact[3::2], exact[4::2], strict=True)))
    found = attend(queries, keys, values, runs(ROWS, LENGTHS), own)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad((found * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip([found, *gradients], [expected, *wanted], strict=True):
        assert one.dtype is dtype
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("kernel", [FlashOnCpu, Eager])
def test_autocast_makes_no_difference(kernel, monkeypatch):
    """As the unroll runs: tensors in half precision, and autocast on."""
    monkeypatch.setattr(packed, "kernel_for", lambda _queries: kernel())
    queries, keys, values, own = tensors(2, torch.bfloat16)
    queries.data *= 8
    plain = attend(queries, keys, values, runs(ROWS, LENGTHS), own)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attend(queries, keys, values, runs(ROWS, LENGTHS), own)
    assert torch.equal(plain, cast)


def test_the_eager_kernel_goes_over_blocks_of_rows(monkeypatch):
    queries, keys, values, own = tensors(1)
    whole = []
    for rows in (512, 2):
        monkeypatch.setattr(kernels, "_BLOCK_ROWS", rows)
        monkeypatch.setattr(packed, "kernel_for", lambda _queries: Eager())
        found = attend(queries, keys, values, runs(ROWS, LENGTHS), own)
        whole.append([found, *torch.autograd.grad(found.square().sum(), (queries, keys, values))])
    for one, other in zip(*whole, strict=True):
        torch.testing.assert_close(one, other)


def test_keys_of_many_runs_get_as_exact_a_gradient_as_those_of_one():
    """A dialogue of many answers: each of them adds to the gradient of what was said before."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(800, heads, 16, generator=generator) for heads in (2, 1, 1)]

    def errors(rows):
        """Relative, of the gradients of keys and values in half precision."""
        weight = torch.randn(len(rows), 2, 16, generator=torch.Generator().manual_seed(1))

        def gradients(dtype):
            leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in exact]
            mixed = attend(leaves[0][rows], *leaves[1:], runs(rows, (800,)))
            return torch.autograd.grad((mixed * weight.to(dtype)).sum(), leaves[1:])

        pairs = zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True)
        return [float(torch.dist(half.float(), full) / full.norm()) for half, full in pairs]

    together, apart = errors(list(range(200, 800))), errors([row for row in range(200, 800) if row % 4])
    assert max(apart) < 1.5 * max(together) < 0.02


def test_keys_that_no_row_sees_get_no_gradient():
    queries, keys, values, own = tensors(1)
    attend(queries, keys, values, runs(ROWS, LENGTHS), own).sum().backward()
    seen = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for run in runs(ROWS, LENGTHS):
        seen[run.before] = seen[run.own] = True
    assert not keys.grad[~seen].any()
    assert values.grad[seen].abs().sum((1, 2)).gt(0).all()


def test_many_rows_are_as_exact_as_few():
    """Longer than the kernel's blocks, where parts of several sizes are merged."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1500, 700)
    rows = [*range(900, 1499), *range(1501, 2100)]
    queries = torch.randn(len(rows), 4, 16, generator=generator, requires_grad=True)
    keys, values = (torch.randn(2200, 2, 16, generator=generator, requires_grad=True) for _ in range(2))
    found = attend(queries, keys, values, runs(rows, lengths))
    at = torch.tensor(rows)
    places = torch.arange(2200)
    seen = (places <= at[:, None]) & ((places >= 1500) == (at[:, None] >= 1500))
    exact = [x.detach().double().requires_grad_() for x in (queries, keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        exact[0].transpose(0, 1),
        *(x.repeat_interleave(2, 1).transpose(0, 1) for x in exact[1:]),
        attn_mask=seen,
    ).transpose(0, 1)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), (queries, keys, values)),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)


def test_a_cpu_has_a_fused_kernel():
    assert isinstance(kernel_for(torch.zeros(1)), FlashOnCpu)


def test_the_operators_of_a_gpu_take_what_they_are_given():
    """Their arguments and shapes alone: a device without data needs no GPU."""
    queries = torch.empty(2, 3, 10, 64, device="meta", dtype=torch.bfloat16)
    keys = torch.empty(2, 1, 10, 64, device="meta", dtype=torch.bfloat16).expand(queries.shape)
    mixed = FlashOnGpu().forward(queries, keys, keys, causal=True)
    assert (mixed.output.shape, mixed.log_sum_exp.shape) == (queries.shape, queries.shape[:-1])
    for gradient in FlashOnGpu().backward(queries, queries, keys, keys, mixed, causal=True):
        assert gradient.shape == queries.shape


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 4])
def test_a_gpu_gives_the_same(steps):
    queries, keys, values, own = tensors(steps, torch.bfloat16)
    leaves = [queries, keys, values, *(x for pair in own for x in pair)]
    moved = [x.detach().cuda().requires_grad_() for x in leaves]
    expected = attend(queries, keys, values, runs(ROWS, LENGTHS), own)
    found = attend(*moved[:3], runs(ROWS, LENGTHS), list(zip(moved[3::2], moved[4::2], strict=True)))
    for one, other in zip(
        [found, *torch.autograd.grad(found.sum(), moved)],
        [expected, *torch.autograd.grad(expected.sum(), leaves)],
        strict=True,
    ):
        torch.testing.assert_close(one.cpu(), other, atol=3e-2, rtol=3e-2)
