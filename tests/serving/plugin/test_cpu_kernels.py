"""The stand-in kernels against plain loops; their files are loaded alone, so that no `sgl_kernel` is shadowed."""

import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3] / "dev" / "cpu_kernels" / "pythonpath" / "sgl_kernel"


def load(name):
    spec = importlib.util.spec_from_file_location(f"cpu_kernels_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attention, cache, speculation = (load(name) for name in ("attention", "cache", "speculation"))


@pytest.fixture
def paged():
    """A cache of 3 requests with 9, 4 and 12 tokens, 2 key heads; each position has a slot of its own."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(60, generator=generator).view(4, 15).int()
    keys, values = (torch.randn(60, 2, 8, generator=generator) for _ in range(2))
    return table, torch.tensor([3, 0, 2]), torch.tensor([9, 4, 12]), keys, values


def plain(query, slots_of, visible, keys, values):
    """Attention of one token of one head after another; `visible(i)`: positions that query i sees."""
    out = torch.zeros_like(query)
    for i in range(len(query)):
        slots = slots_of[torch.tensor(visible(i))].long()
        for head in range(query.shape[1]):
            weights = (keys[slots, head // 2] @ query[i, head] * 0.3).softmax(0)
            out[i, head] = weights @ values[slots, head // 2]
    return out


@pytest.mark.parametrize("window", [0, 5])
def test_decode_attention(paged, window):
    table, rows, lengths, keys, values = paged
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 16), torch.randn(3, 16)
    output, new = torch.empty(3, 4, 8), table[rows, lengths - 1].long()
    torch.ops.sgl_kernel.decode_attention_cpu(
        query, keys, values, 1.0, 1.0, output, key, value, new, torch.empty(0), table, rows, lengths,
        0.3, 0.0, False, window, None, None,
    )  # fmt: skip
    assert torch.equal(keys[new], key.view(3, 2, 8))
    assert torch.equal(values[new], value.view(3, 2, 8))
    for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        seen = list(range(max(0, length - window) if window else 0, length))
        expected = plain(query[i : i + 1], table[row], lambda _, seen=seen: seen, keys, values)
        torch.testing.assert_close(output[i : i + 1], expected)


def extend(paged, new, *, window=0, tree=None):
    table, rows, lengths, keys, values = paged
    query = torch.randn(sum(new), 4, 8)
    start = torch.tensor([0, *new[:-1]]).cumsum(0)
    output = torch.empty_like(query)
    torch.ops.sgl_kernel.extend_attention_cpu(
        query, None, None, output, keys, values, 1.0, 1.0, table, rows, lengths, torch.tensor(new), start,
        max(new), 0.3, 0.0, False, window, None, None, tree, True,
    )  # fmt: skip
    return query.split(new), output.split(new)


@pytest.mark.parametrize("new", [[3, 3, 3], [9, 1, 5], [2, 4, 2]])
@pytest.mark.parametrize("window", [0, 3])
def test_extend_attention_is_causal(paged, new, window):
    table, rows, lengths, keys, values = paged
    for query, output, row, length in zip(*extend(paged, new, window=window), rows, lengths.tolist(), strict=True):
        first = length - len(query)

        def visible(i, first=first):
            return list(range(max(0, first + i + 1 - window) if window else 0, first + i + 1))

        expected = plain(query, table[row], visible, keys, values)
        torch.testing.assert_close(output, expected)


def test_extend_attention_follows_a_tree(paged):
    table, rows, lengths, keys, values = paged
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 3).bool()  # the third is a sibling of the second
    for query, output, row, length in zip(
        *extend(paged, [3] * 3, tree=tree.view(-1)), rows, lengths.tolist(), strict=True
    ):
        prefix = list(range(length - 3))

        def visible(i, prefix=prefix, length=length):
            return prefix + [length - 3 + j for j in range(3) if tree[0, i, j]]

        expected = plain(query, table[row], visible, keys, values)
        torch.testing.assert_close(output, expected)


def test_what_attention_does_not_know_is_refused(paged):
    table, rows, lengths, keys, values = paged
    with pytest.raises(NotImplementedError, match="logit capping"):
        attention.extend_attention_cpu(
            torch.randn(3, 4, 8), None, None, torch.empty(3, 4, 8), keys, values, 1.0, 1.0, table, rows, lengths,
            torch.ones(3), torch.arange(3), 1, 0.3, 50.0, False, 0, None, None, None, True,
        )  # fmt: skip


def test_slots_are_written_and_read_by_request():
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    cache.assign_req_to_token_pool_cpu(rows, table, start, end, torch.arange(10, 15), 8)
    assert table[2].tolist() == [0, 10, 11, 12, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 13, 14, 0, 0]
    read = torch.empty(5, dtype=torch.int64)
    cache.assign_extend_cache_locs_cpu(rows, table, start, end, read, 8)
    assert read.tolist() == [10, 11, 12, 13, 14]
    read = torch.empty(4, dtype=torch.int64)
    cache.assign_draft_cache_locs_contiguous_cpu(rows, table, start, read, 8, 1, 2)
    assert read.tolist() == [10, 11, 13, 14]


@pytest.mark.parametrize("topk", [1, 2])
def test_each_chain_has_the_prefix_and_its_own_slots(topk):
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    rows, lengths = torch.tensor([1, 0]), torch.tensor([3, 2])
    built = cache.build_draft_decode_metadata_cpu(table, rows, lengths, topk, 2, 10)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for chain in range(topk):
            own = table[row, length + 2 * chain : length + 2 * chain + 2].tolist()
            assert built[i * topk + chain, : length + 2].tolist() == table[row, :length].tolist() + own


def test_cache_slots_are_moved_as_if_at_once():
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(6.0).view(6, 1)]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2]), torch.tensor([2, 3])
    for buffer in expected:
        buffer[target] = buffer[source]
    cache.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers]), torch.tensor([8, 4]), target, source
    )
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def build(parents, selected, topk, lengths):
    n = selected.shape[1] + 1
    batch = len(lengths)
    mask = torch.ones(batch * n * n, dtype=torch.bool)
    positions = torch.empty(batch * n, dtype=torch.int64)
    index, child, sibling = torch.full((3, batch, n), -1)
    speculation.build_tree_kernel_efficient_cpu(
        parents, selected, lengths, mask, positions, index, child, sibling, topk, 3, n, 1
    )
    return mask.view(batch, n, n), positions.view(batch, n), index, child, sibling


def test_a_chain_and_its_verification():
    lengths = torch.tensor([7, 3])
    mask, positions, index, child, sibling = build(
        torch.tensor([[-1, 0, 1]] * 2), torch.tensor([[0, 1, 2]] * 2), 1, lengths
    )
    assert torch.equal(mask, torch.ones(2, 4, 4, dtype=torch.bool).tril())
    assert positions.tolist() == [[7, 8, 9, 10], [3, 4, 5, 6]]
    assert child.tolist() == [[1, 2, 3, -1]] * 2
    drafted = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    target = torch.tensor([[6, 7, 0, 0], [9, 0, 0, 0]])  # two of three right, none right
    predicts, accepted, counts = torch.zeros(8, dtype=torch.int32), torch.full((2, 4), -1), torch.zeros(2)
    speculation.verify_tree_greedy_cpu(predicts, accepted, counts, drafted, index, child, sibling, target)
    assert counts.tolist() == [2, 0]
    assert accepted.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts.tolist() == [6, 7, 0, 0, 9, 0, 0, 0]
    bonus = torch.zeros(2, dtype=torch.int64)
    tokens = torch.where(accepted >= 0, predicts[accepted], -1)
    speculation.fill_bonus_tokens_cpu(tokens, counts.int() + 1, bonus, 4)
    assert bonus.tolist() == [0, 9]
    slots = torch.zeros(4, dtype=torch.int64)
    speculation.fill_accept_out_cache_loc_cpu(accepted.view(-1), torch.arange(100, 108), slots)
    assert slots.tolist() == [100, 101, 102, 104]


def test_a_tree_and_its_verification():
    # Two children of the root (candidates 0, 1); candidates 2, 3 hang on candidate 0, and 4, 5 on candidate 1.
    mask, positions, index, child, sibling = build(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 3, 4]]), 2, torch.tensor([10])
    )
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1],
    ]  # fmt: skip
    assert positions.tolist() == [[10, 11, 11, 12, 12]]
    assert child.tolist() == [[1, 3, 4, -1, -1]]
    assert sibling.tolist() == [[-1, 2, -1, -1, -1]]
    predicts, accepted, counts = torch.zeros(5, dtype=torch.int32), torch.full((1, 3), -1), torch.zeros(1)
    speculation.verify_tree_greedy_cpu(
        predicts, accepted, counts, torch.tensor([[1, 20, 21, 30, 31]]), index, child, sibling,
        torch.tensor([[21, 0, 31, 0, 40]]),
    )  # fmt: skip
    assert accepted.tolist() == [[0, 2, 4]]
    assert counts.tolist() == [2]
    assert predicts.tolist() == [21, 0, 31, 0, 40]


@pytest.mark.parametrize("select", [None, torch.tensor([1, 3])])
def test_ids_are_rotated(select):
    ids = torch.tensor([1, 2, 3, 4, 5])
    speculation.rotate_input_ids_cpu(ids, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[8], [9]]), select)
    assert ids.tolist() == ([2, 3, 8, 5, 9] if select is None else [2, 8, 3, 9, 5])
