# mypy: disable-error-code="import-not-found, untyped-decorator, no-untyped-def"
"""`best_first_tree` and the ancestors of its nodes in Triton, one launch each.

DDTree's own heap (arXiv 2604.12989) in one warp: a lane holds the best child that a node has not yet given, and the
least of all lanes is the next node. That is a chain of short steps, but without a barrier or a pass over memory among
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .draft_tree import DraftTree, check_table, clean

MAX_BUDGET = 511  # a warp's registers hold what it knows of each node
MAX_TABLE_WIDTH = 64  # a node's place in the order and among the candidates are one number of 31 bits


def best_first_tree_triton(
    token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int, by_parent: torch.Tensor | None = None
) -> DraftTree:
    """`draft_tree.best_first_tree` as a Triton kernel, equal to it bit for bit.

    With `by_parent` it equals `draft_tree.build_tree_by_rows` for a `Proposal` of these tensors.

    Raises:
        ValueError: `budget` is below 1 or above `MAX_BUDGET`, the shapes differ or are not 3-D, or `by_parent` is not
            `(B, D, K, K)` with K up to `MAX_TABLE_WIDTH`.
    """
    check_table(token_ids, log_probs)
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(f"budget must be from 1 to {MAX_BUDGET}, got {budget}")
    batch, depth, candidates = log_probs.shape
    columns = None
    if by_parent is not None:
        if by_parent.shape != (*log_probs.shape, candidates) or candidates > MAX_TABLE_WIDTH:
            raise ValueError(
                f"by_parent must be (batch, depth, candidates, candidates) with up to {MAX_TABLE_WIDTH} candidates, "
                f"got {tuple(by_parent.shape)} for {tuple(log_probs.shape)}"
            )
        behind_root = log_probs[:, :1, None].expand(-1, -1, candidates, -1)
        rows = clean(torch.cat([behind_root, by_parent[:, 1:]], dim=1))
        log_probs, columns = (field.contiguous() for field in rows.sort(dim=3, descending=True, stable=True))
    token_ids, log_probs = token_ids.contiguous(), log_probs.float().contiguous()
    # A node comes after its ancestors and its better siblings.
    depth, width = min(depth, budget), min(candidates, budget)
    nodes = min(budget, sum(width**level for level in range(1, depth + 1)))
    own = token_ids.new_empty(batch, nodes)
    tree = DraftTree(own, torch.empty_like(own), torch.empty_like(own), log_probs.new_empty(batch, nodes))
    if batch and nodes:
        block_width = max(32, triton.next_power_of_2(width))  # a whole warp's minimum is one instruction
        _tree_kernel[batch,](
            token_ids,
            log_probs,
            columns,
            *tree,
            token_ids[0].numel(),
            candidates,
            depth,
            width,
            budget,
            nodes,
            SLOTS=max(32, triton.next_power_of_2(nodes + 1)),
            BLOCK_WIDTH=block_width,
            BLOCK_DEPTH=max(1, min(triton.next_power_of_2(depth), 1024 // block_width)),
            HAS_TABLE=columns is not None,
            num_warps=1,
        )
    return tree


def ancestors_triton(parents: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draft_tree.ancestor_matrix` and, of what it gives, `draft_tree.node_depths`."""
    batch, nodes = parents.shape
    ancestors = parents.new_empty(batch, nodes + 1, nodes + 1, dtype=torch.bool)
    levels = parents.new_empty(batch, nodes + 1)
    if batch:
        columns = triton.next_power_of_2(nodes + 1)
        rows = max(1, min(16, 1024 // columns))
        _ancestors_kernel[batch, triton.cdiv(nodes + 1, rows)](
            parents.contiguous(), depths.contiguous(), ancestors, levels, nodes,
            ROWS=rows, COLUMNS=columns, num_warps=1,
        )  # fmt: skip
    return ancestors, levels


# Costs are paths' log-probs without the sign: the bits of such floats sort as the floats do.
_IMPOSSIBLE = tl.constexpr(0x7F800000)  # infinity
_NOTHING = tl.constexpr(0x7FFFFFFF)
# Among equal costs, nodes are in the order of depth, parent and rank: one number, the place, has ten bits for each.
# With a table a rank has six, and six more are for the column that the child had before its row was ranked.
_COLUMN, _COLUMNS = tl.constexpr(6), tl.constexpr(63)


@triton.jit
def _extend(cost, log_probs):
    """The cost of a path with one token more, as bits."""
    costs = cost + tl.maximum(-log_probs, 0.0, tl.PropagateNan.ALL)
    return tl.minimum(costs.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _IMPOSSIBLE)  # NaN is above


@triton.jit
def _rank_behind(row_ptr, prefix, last, last_rank, children, BLOCK_WIDTH: tl.constexpr):
    """The rank of the child that follows one of cost `last`, in a row that need not be sorted."""
    rank = tl.arange(0, BLOCK_WIDTH)
    costs = _extend(prefix, tl.load(row_ptr + rank, mask=rank < children, other=0.0))
    behind = (rank < children) & ((costs > last) | ((costs == last) & (rank > last_rank)))
    least = tl.min(tl.where(behind, costs, _NOTHING), 0)
    return tl.min(tl.where(behind & (costs == least), rank, BLOCK_WIDTH), 0)


@triton.jit
def _child_place(columns_ptr, row, rank, mask, HAS_TABLE: tl.constexpr):
    """The bits of a place that are the child's own."""
    if HAS_TABLE:
        return rank * (_COLUMNS + 1) + tl.load(columns_ptr + row + rank, mask=mask, other=0).to(tl.int32)
    return rank


@triton.jit(do_not_specialize=["stride_b", "stride_d", "depth", "width", "budget", "nodes"])
def _tree_kernel(
    token_ids_ptr,
    log_probs_ptr,
    columns_ptr,
    out_token_ids_ptr,
    out_parents_ptr,
    out_depths_ptr,
    out_log_probs_ptr,
    stride_b,
    stride_d,
    depth,
    width,
    budget,
    nodes,
    SLOTS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    PARENT: tl.constexpr = 12 if HAS_TABLE else 10
    DEPTH: tl.constexpr = PARENT + 10
    b = tl.program_id(0).to(tl.int64)
    token_ids_ptr += b * stride_b
    log_probs_ptr += b * stride_b * (stride_d if HAS_TABLE else 1)
    if HAS_TABLE:
        columns_ptr += b * stride_b * stride_d

    unsorted = 0
    if not HAS_TABLE:
        for start in range(0, depth, BLOCK_DEPTH):
            level, rank = start + tl.arange(0, BLOCK_DEPTH)[:, None], tl.arange(0, BLOCK_WIDTH)[None, :]
            mask = (level < depth) & (rank + 1 < width)
            pair_ptr = log_probs_ptr + level * stride_d + rank
            cost = _extend(0.0, tl.load(pair_ptr, mask=mask, other=0.0))
            next_cost = _extend(0.0, tl.load(pair_ptr + 1, mask=mask, other=0.0))
            unsorted = tl.maximum(unsorted, tl.max((cost > next_cost).to(tl.int32)))

    # The nodes, root first: costs, places in the order, and the same of the best child that is not yet a node.
    slot = tl.arange(0, SLOTS)
    costs = tl.zeros([SLOTS], tl.float32)
    places = tl.zeros([SLOTS], tl.int32)
    rank = 0
    if unsorted > 0:
        rank = _rank_behind(log_probs_ptr, 0.0, -1, -1, width, BLOCK_WIDTH)
    next_costs = tl.where(slot == 0, _extend(0.0, tl.load(log_probs_ptr + rank)), _NOTHING)
    next_places = (slot << PARENT) + _child_place(columns_ptr, 0, rank, True, HAS_TABLE)

    for node in range(1, nodes + 1):
        bits = tl.min(next_costs, 0)
        place = tl.min(tl.where(next_costs == bits, next_places, _NOTHING), 0)
        cost = bits.to(tl.float32, bitcast=True)
        level, parent, own = place >> DEPTH, (place >> PARENT) & 1023, place & ((1 << PARENT) - 1)
        rank = own >> _COLUMN if HAS_TABLE else own
        costs = tl.where(slot == node, cost, costs)
        places = tl.where(slot == node, place, places)

        # The node leaves its sibling to its parent, and brings its own first child.
        row_ptr = log_probs_ptr + level * stride_d
        child_row_ptr = row_ptr + stride_d
        row, child_row = 0, 0
        if HAS_TABLE:
            # Behind candidate u of a depth is row u of the next; behind the root, whose place is 0, row 0.
            parent_column = tl.sum(tl.where(slot == parent, places, 0), 0) & _COLUMNS
            row = (level * stride_d + parent_column) * stride_d
            child_row = ((level + 1) * stride_d + (place & _COLUMNS)) * stride_d
            row_ptr, child_row_ptr = log_probs_ptr + row, log_probs_ptr + child_row
        sibling_rank, child_rank = rank + 1, 0
        if unsorted > 0:
            # The pairs of `_search_steps`: in sorted rows no others become nodes anyway.
            levels, room = next_places >> DEPTH, budget - level
            parents_above = tl.sum(((levels == level) & (slot < parent)).to(tl.int32), 0)
            nodes_above = tl.sum(((levels == level + 1) & (slot < node)).to(tl.int32), 0)
            siblings = tl.minimum((room + 1) // (parents_above + 1) - 1, width)
            children = tl.where(level + 1 < depth, tl.minimum(room // (nodes_above + 1) - 1, width), 0)
            prefix = tl.sum(tl.where(slot == parent, costs, 0.0), 0)
            sibling_rank = _rank_behind(row_ptr, prefix, bits, rank, siblings, BLOCK_WIDTH)
            child_rank = _rank_behind(child_row_ptr, cost, -1, -1, children, BLOCK_WIDTH)
        has_sibling, has_child = sibling_rank < width, (level + 1 < depth) & (child_rank < width)
        # All loads are under way before one is waited for.
        sibling = tl.load(row_ptr + sibling_rank, mask=has_sibling, other=0.0)
        child = tl.load(child_row_ptr + child_rank, mask=has_child, other=0.0)
        sibling_own = _child_place(columns_ptr, row, sibling_rank, has_sibling, HAS_TABLE)
        child_own = _child_place(columns_ptr, child_row, child_rank, has_child, HAS_TABLE)
        sibling_cost = tl.where(has_sibling, _extend(costs, sibling), _NOTHING)
        child_cost = tl.where(has_child, _extend(cost, child), _NOTHING)
        child_place = ((level + 1) << DEPTH) + (node << PARENT) + child_own
        next_costs = tl.where(slot == parent, sibling_cost, tl.where(slot == node, child_cost, next_costs))
        next_places = tl.where(slot == parent, place - own + sibling_own, next_places)
        next_places = tl.where(slot == node, child_place, next_places)

    is_node = (slot > 0) & (slot <= nodes)
    level, parent = places >> DEPTH, (places >> PARENT) & 1023
    column = places & (_COLUMNS if HAS_TABLE else 1023)
    token_id = tl.load(token_ids_ptr + level * stride_d + column, mask=is_node)
    depths = level.to(tl.int64) + 1
    if HAS_TABLE:
        depths = tl.where(costs == float("inf"), 0, depths)  # padding nodes
    out = b * nodes + slot - 1
    tl.store(out_token_ids_ptr + out, token_id, mask=is_node)
    tl.store(out_parents_ptr + out, parent.to(tl.int64) - 1, mask=is_node)
    tl.store(out_depths_ptr + out, depths, mask=is_node)
    tl.store(out_log_probs_ptr + out, 0.0 - costs, mask=is_node)


@triton.jit(do_not_specialize=["nodes"])
def _ancestors_kernel(
    parents_ptr, depths_ptr, ancestors_ptr, levels_ptr, nodes, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    parents_ptr += b * nodes
    depths_ptr += b * nodes
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    itself = row[:, None] == column
    seen = itself
    level = tl.zeros([ROWS], tl.int64)
    at = tl.where(row <= nodes, row, 0)
    steps, walking = 0, 1
    while (walking > 0) & (steps <= nodes):  # a cycle would go on
        parent = tl.load(parents_ptr + at - 1, mask=at > 0, other=-1)
        depth = tl.load(depths_ptr + at - 1, mask=at > 0, other=0)
        linked = (depth > 0) & (parent >= -1) & (parent < nodes)
        at = tl.where(linked, parent.to(tl.int32) + 1, at)
        seen |= at[:, None] == column
        level += linked
        walking = tl.max(linked.to(tl.int32), 0)
        steps += 1
    rooted = at == 0
    mask = (row <= nodes)[:, None] & (column <= nodes)
    out = (b * (nodes + 1) + row) * (nodes + 1)
    tl.store(ancestors_ptr + out[:, None] + column, itself | (seen & rooted[:, None]), mask=mask)
    tl.store(levels_ptr + b * (nodes + 1) + row, tl.where(rooted, level, 0), mask=row <= nodes)
