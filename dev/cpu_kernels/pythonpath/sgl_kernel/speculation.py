"""The token tree of speculative decoding: building it, and taking the branch that the target agrees with.

A tree has ``n`` nodes a request: node 0 is the last accepted token, the others are drafted. Arguments
and their order (and the spelling ``retrive``) are SGLang's, also where this code has no use for one.
"""

# ruff: noqa: PLR0917  the signatures are SGLang's

import torch
from torch import Tensor

QLEN_ONLY = 1  # SGLang's TreeMaskMode on CPU: an [n, n] mask a request, without the prefix


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Copy each request's last accepted token."""
    batch = accept_lens.numel()
    last = torch.arange(batch) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:batch] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the cache slots of accepted nodes to the front."""
    accepted = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's ids left by one and put its drafted token last (or at ``select_index``)."""
    drafted = topk_index.reshape(topk_index.shape[0], -1)[:, 0]
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if length > 0:
            end = start + length - 1
            input_ids[start:end] = input_ids[start + 1 : end + 1].clone()
            input_ids[end if select_index is None else int(select_index[i])] = drafted[i]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,  # noqa: ARG001
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of each request's tree.

    Args:
        parent_list: [batch, ...]; entry ``t`` is the candidate that the ``t``-th group of ``topk`` hangs on.
        selected_index: [batch, n - 1], the candidates that made it into the tree, ascending.
        verified_seq_len: [batch], tokens before node 0.
        tree_mask: flat [batch * n * n] bool: node i sees node j.
        positions: [batch * n], each node's position in its sequence.
        retrive_index: [batch, n], each node's row in the flattened batch.
        retrive_next_token: [batch, n], a node's first child, or -1.
        retrive_next_sibling: [batch, n], its next sibling, or -1.

    Raises:
        NotImplementedError: for another mask mode than the one SGLang uses on CPU.
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: the CPU stand-in knows only QLEN_ONLY")
    n = draft_token_num
    batch = verified_seq_len.numel()
    mask = torch.zeros(batch, n, n, dtype=torch.bool)
    node_depth = torch.zeros(batch, n, dtype=positions.dtype)
    child = torch.full((batch, n), -1)
    sibling = torch.full((batch, n), -1)
    if topk == 1:  # a chain, and by far the common case
        mask[:] = torch.ones(n, n, dtype=torch.bool).tril()
        node_depth[:] = torch.arange(n)
        child[:, :-1] = torch.arange(1, n)
    else:
        for b, (selected, parents) in enumerate(zip(selected_index.tolist(), parent_list.tolist(), strict=True)):
            node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
            mask[b, 0, 0] = True
            for node, candidate in enumerate(selected, start=1):
                group = candidate // topk
                parent = 0 if group == 0 else node_of[parents[group]]
                mask[b, node] = mask[b, parent]  # candidates ascend: the parent's row is complete
                mask[b, node, node] = True
                node_depth[b, node] = node_depth[b, parent] + 1
            for node in range(n - 1, 0, -1):  # backwards, so that the first child ends up linked first
                group = selected[node - 1] // topk
                parent = 0 if group == 0 else node_of[parents[group]]
                sibling[b, node] = child[b, parent]
                child[b, parent] = node
    tree_mask.view(-1)[: mask.numel()] = mask.view(-1)
    positions[: batch * n] = (verified_seq_len[:, None] + node_depth).view(-1)
    retrive_index.copy_(torch.arange(batch * n).view(batch, n))
    retrive_next_token.copy_(child)
    retrive_next_sibling.copy_(sibling)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down each tree as long as a child carries the token that the target predicts.

    Args:
        predicts: flat [batch * n]; the target's token is written at each accepted node.
        accept_index: [batch, depth + 1]; rows of the accepted nodes are written, in order.
        accept_token_num: [batch]; the number of accepted drafted tokens is written.
        candidates: [batch, n], the nodes' tokens.
        retrive_index: see `build_tree_kernel_efficient_cpu`.
        retrive_next_token: see there.
        retrive_next_sibling: see there.
        target_predict: [batch, n], the target's greedy token after each node.
    """
    wanted = target_predict.reshape(-1).tolist()
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    width = accept_index.shape[1]
    accepted_rows: list[int] = []
    path = accept_index.tolist()
    counts = []
    for b, (tokens, row, child, sibling) in enumerate(trees):
        node, count = 0, 0
        path[b][0] = row[0]
        while count < width - 1:
            following = child[node]
            while following != -1 and tokens[following] != wanted[row[node]]:
                following = sibling[following]
            if following == -1:
                break
            node = following
            count += 1
            path[b][count] = row[node]
        counts.append(count)
        accepted_rows += path[b][: count + 1]
    accept_index.copy_(torch.tensor(path))
    accept_token_num.copy_(torch.tensor(counts))
    predicts[accepted_rows] = target_predict.reshape(-1)[accepted_rows].to(predicts.dtype)
