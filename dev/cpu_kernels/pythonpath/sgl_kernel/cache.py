"""Bookkeeping of the key-value cache: which slot holds which token of which request.

``req_to_token[row, position]`` is the cache slot of a request's token; a request is known by its row.
Arguments and their order are SGLang's, also where this code has no use for one.
"""

# ruff: noqa: PLR0917  the signatures are SGLang's

import ctypes

import torch
from torch import Tensor


def _cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each cell in ``[start[i], end[i])`` of row ``rows[i]``, in order."""
    lengths = end - start
    first = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.sum())) + (start - first).repeat_interleave(lengths)
    return rows.repeat_interleave(lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,  # noqa: ARG001
) -> None:
    """Write new slots into positions ``[start, end)`` of each request."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,  # noqa: ARG001
) -> None:
    """Read the slots of positions ``[start, end)`` of each request."""
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each sequence."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """Give each of a request's ``topk`` chains a row of its own: the prefix, then that chain's slots.

    Returns:
        [batch * topk, columns], with only as many columns as the longest row uses.
    """
    columns = min(int(seq_lens.max()) + topk * num_steps, pool_len)
    prefix = req_to_token[req_pool_indices, :columns]
    if topk == 1:
        return prefix
    rows = prefix.repeat_interleave(topk, 0)
    length = seq_lens.repeat_interleave(topk)[:, None]
    step = torch.arange(num_steps)[None]
    chain = torch.arange(topk).repeat(seq_lens.numel())[:, None]
    return rows.scatter(1, length + step, rows.gather(1, length + chain * num_steps + step))


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move slots ``src_loc`` to ``tgt_loc`` in the buffers at ``data_ptrs`` (``strides``: bytes a slot)."""
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        # All are read before any is written: source and target slots may overlap.
        slots = [ctypes.string_at(base + size * slot, size) for slot in src_loc.tolist()]
        for slot, content in zip(tgt_loc.tolist(), slots, strict=True):
            ctypes.memmove(base + size * slot, content, size)
