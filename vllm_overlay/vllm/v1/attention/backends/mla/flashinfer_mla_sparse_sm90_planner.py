# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernel that writes the schedule of ``flashinfer_mla_sparse_sm90_plan``.

One launch, one program for 256 rows. A program sums the rows' cost over the whole batch
(the share ``T`` and its own place on the line), then the pieces of the rows before its
own (its first item, partial row and merge entry), then writes its own rows. Nothing is
exchanged between programs, so the result doesn't depend on their order.

A layer may select fewer slots than its lengths say: a draft step that reuses an earlier
selection, or a dummy forward. ``DevicePlanner.limit`` then shortens the layer's work
items to the counts of its slot conversion, so the kernel never leaves the valid slots.

Lengths come from ``query_start_loc``, ``seq_lens`` and the rows' requests on the
device: they are exact whatever the host knows, and one captured graph serves any.
"""

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    BLOCK_ROWS,
    MAX_TILES,
    MERGE_FIELDS,
    TILE_TOKENS,
    WORK_FIELDS,
    WorkspaceLayout,
)


@triton.jit
def _ceil_div(value, divisor):
    return (value + divisor - 1) // divisor


@triton.jit
def _row_lengths(
    rows,
    num_rows,
    live_rows,
    query_start_loc,
    seq_lens,
    req_id_per_token,
    TOPK: tl.constexpr,
    KPOOL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Valid slots of each row: 0 outside ``[0, min(num_rows, live_rows))``."""
    live = (rows >= 0) & (rows < num_rows) & (rows < live_rows)
    request = tl.load(req_id_per_token + rows, mask=live, other=0)
    query_end = tl.load(query_start_loc + request + 1, mask=live, other=0)
    context = tl.load(seq_lens + request, mask=live, other=0) - query_end + rows + 1
    context = tl.maximum(context, 0)
    length = tl.where(context <= TOPK, context, TOPK + context % KPOOL)
    return tl.where(live, tl.minimum(length, WIDTH), 0)


@triton.jit
def _merge_entries(pieces, HEADS: tl.constexpr, CLUSTER: tl.constexpr):
    """Merge entries of a row, and the heads of each."""
    blocks = tl.minimum(HEADS, CLUSTER * (pieces - 1))
    chunk = _ceil_div(HEADS, tl.maximum(blocks, 1))
    return tl.where(pieces > 1, _ceil_div(HEADS, chunk), 0), chunk


@triton.jit
def _line_clusters(start, tiles, share, COST: tl.constexpr, TILE: tl.constexpr):
    """First and last cluster of each row on the line (form B)."""
    line = tl.where(tiles > 0, start + COST, start)
    first = line // share
    return first, tl.where(tiles > 0, (line + TILE * (tiles - 1)) // share, first)


@triton.jit(
    do_not_specialize=["num_rows", "num_reqs"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "req_id_per_token"],
)
def _plan_sparse_mla_kernel(
    workspace,  # int32, FlashInfer's integer workspace
    row_lengths,  # int32 [max rows]
    row_items,  # int32 [max rows + 1], first item of each row
    planned_ends,  # int32 [capacity], kv_end of each item
    query_start_loc,  # int32 [num_reqs + 1]
    seq_lens,  # int32 [num_reqs]
    req_id_per_token,  # int32 [num_rows]
    num_rows,
    num_reqs,
    SHAPE: tl.constexpr,  # tuples, as each constant costs the launch a microsecond
    WORK: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    TOPK: tl.constexpr = SHAPE[0]
    KPOOL: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    HEADS: tl.constexpr = SHAPE[3]
    CLUSTER: tl.constexpr = SHAPE[4]
    CLUSTERS: tl.constexpr = SHAPE[5]
    THREAD_BLOCKS: tl.constexpr = SHAPE[6]
    COST: tl.constexpr = SHAPE[7]
    TILE: tl.constexpr = SHAPE[8]
    SEARCH_STEPS: tl.constexpr = SHAPE[9]
    Q_INDPTR: tl.constexpr = WORK[0]
    KV_INDPTR: tl.constexpr = WORK[1]
    PARTIAL_INDPTR: tl.constexpr = WORK[2]
    Q_LEN: tl.constexpr = WORK[3]
    KV_LEN: tl.constexpr = WORK[4]
    Q_START: tl.constexpr = WORK[5]
    KV_START: tl.constexpr = WORK[6]
    KV_END: tl.constexpr = WORK[7]
    WORK_INDPTR: tl.constexpr = WORK[8]
    MERGE_PACKED_START: tl.constexpr = MERGE[0]
    MERGE_PACKED_END: tl.constexpr = MERGE[1]
    MERGE_PARTIAL_START: tl.constexpr = MERGE[2]
    MERGE_PARTIAL_END: tl.constexpr = MERGE[3]
    MERGE_STRIDE: tl.constexpr = MERGE[4]

    program = tl.program_id(0)
    blocks = tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    rows = program * BLOCK + lanes
    mine = rows < num_rows
    live_rows = tl.load(query_start_loc + num_reqs)

    # The line: its length, and where this program's rows start on it.
    total = 0
    base = 0
    for block in range(0, blocks):
        other = block * BLOCK + lanes
        length = _row_lengths(
            other,
            num_rows,
            live_rows,
            query_start_loc,
            seq_lens,
            req_id_per_token,
            TOPK,
            KPOOL,
            WIDTH,
        )
        cost = tl.where(other < num_rows, TILE * _ceil_div(length, TILE) + COST, 0)
        cost_sum = tl.sum(cost, 0)
        total += cost_sum
        base += tl.where(block < program, cost_sum, 0)
    share = tl.maximum(_ceil_div(total, CLUSTERS), TILE)

    # What the rows of earlier programs take. There are none in form A: it needs
    # num_rows <= CLUSTERS <= BLOCK.
    item_base = 0
    partial_base = 0
    merge_base = 0
    line = 0
    for block in range(0, program):
        other = block * BLOCK + lanes
        length = _row_lengths(
            other,
            num_rows,
            live_rows,
            query_start_loc,
            seq_lens,
            req_id_per_token,
            TOPK,
            KPOOL,
            WIDTH,
        )
        tiles = _ceil_div(length, TILE)
        cost = TILE * tiles + COST
        start = line + tl.cumsum(cost, 0) - cost
        first, last = _line_clusters(start, tiles, share, COST, TILE)
        pieces = last - first + 1
        entries, _ = _merge_entries(pieces, HEADS, CLUSTER)
        item_base += tl.sum(pieces, 0)
        partial_base += tl.sum(tl.where(pieces > 1, pieces, 0), 0)
        merge_base += tl.sum(entries, 0)
        line += tl.sum(cost, 0)

    # This program's rows.
    length = _row_lengths(
        rows,
        num_rows,
        live_rows,
        query_start_loc,
        seq_lens,
        req_id_per_token,
        TOPK,
        KPOOL,
        WIDTH,
    )
    tl.store(row_lengths + rows, length, mask=mine)
    tiles = _ceil_div(length, TILE)
    cost = tl.where(mine, TILE * tiles + COST, 0)
    start = base + tl.cumsum(cost, 0) - cost

    # Form A: the smallest span whose pieces fit into the clusters.
    low = 1
    high = 1 << SEARCH_STEPS
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        count = tl.sum(tl.where(mine, tl.maximum(_ceil_div(tiles, middle), 1), 0), 0)
        fits = count <= CLUSTERS
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, tl.minimum(middle + 1, high))
    span = high
    even = (num_rows <= CLUSTERS) & (TILE * span <= share + TILE)

    first, last = _line_clusters(start, tiles, share, COST, TILE)
    pieces = tl.where(even, tl.maximum(_ceil_div(tiles, span), 1), last - first + 1)
    pieces = tl.where(mine, pieces, 0)
    item = item_base + tl.cumsum(pieces, 0) - pieces
    split = tl.where(pieces > 1, pieces, 0)
    partial = (partial_base + tl.cumsum(split, 0) - split) * HEADS
    entries, chunk = _merge_entries(pieces, HEADS, CLUSTER)
    merge = merge_base + tl.cumsum(entries, 0) - entries
    tl.store(row_items + rows, item, mask=mine)

    # The last cluster of the row before, to fill work_indptr without gaps.
    length_before = _row_lengths(
        rows - 1,
        num_rows,
        live_rows,
        query_start_loc,
        seq_lens,
        req_id_per_token,
        TOPK,
        KPOOL,
        WIDTH,
    )
    cluster_before = tl.where(length_before > 0, start - TILE, start - COST) // share
    first = tl.where(even, item, first)
    last = first + pieces - 1
    cluster_before = tl.where(even, item - 1, cluster_before)
    cluster_before = tl.where(rows == 0, -1, cluster_before)
    last = tl.where(mine, last, -1)

    steps = tl.max(tl.where(mine, tl.maximum(pieces, last - cluster_before), 0), 0)
    origin = start + COST
    for k in range(0, steps):
        cut = _ceil_div((first + k) * share - origin, TILE)
        next_cut = _ceil_div((first + k + 1) * share - origin, TILE)
        from_tile = tl.where(even, k * span, tl.where(k == 0, 0, cut))
        to_tile = tl.where(even, (k + 1) * span, next_cut)
        to_tile = tl.where(k == pieces - 1, tiles, to_tile)
        at = workspace + item + k
        write = mine & (k < pieces)
        tl.store(at + Q_INDPTR, rows, mask=write)
        tl.store(at + KV_INDPTR, rows * WIDTH, mask=write)
        place = tl.where(pieces > 1, partial + k * HEADS, -1)
        tl.store(at + PARTIAL_INDPTR, place, mask=write)
        tl.store(at + Q_LEN, tl.full([BLOCK], 1, tl.int32), mask=write)
        tl.store(at + KV_LEN, length, mask=write)
        tl.store(at + Q_START, tl.zeros([BLOCK], tl.int32), mask=write)
        tl.store(at + KV_START, TILE * from_tile, mask=write)
        kv_end = tl.minimum(TILE * to_tile, length)
        tl.store(at + KV_END, kv_end, mask=write)
        tl.store(planned_ends + item + k, kv_end, mask=write)
        cluster = cluster_before + 1 + k
        tl.store(
            workspace + WORK_INDPTR + cluster,
            item + tl.maximum(cluster - first, 0),
            mask=mine & (cluster <= last),
        )

    for k in range(0, tl.max(entries, 0)):
        at = workspace + merge + k
        write = k < entries
        head = k * chunk
        packed = rows * HEADS
        tl.store(at + MERGE_PACKED_START, packed + head, mask=write)
        head_end = tl.minimum(head + chunk, HEADS)
        tl.store(at + MERGE_PACKED_END, packed + head_end, mask=write)
        tl.store(at + MERGE_PARTIAL_START, partial + head, mask=write)
        tl.store(at + MERGE_PARTIAL_END, partial + pieces * HEADS, mask=write)
        tl.store(at + MERGE_STRIDE, tl.full([BLOCK], HEADS, tl.int32), mask=write)

    if program == blocks - 1:
        item_total = item_base + tl.sum(pieces, 0)
        tl.store(row_items + num_rows, item_total)
        idle = tl.max(last, 0) + 1 + lanes
        tl.store(
            workspace + WORK_INDPTR + idle,
            tl.zeros([BLOCK], tl.int32) + item_total,
            mask=idle <= CLUSTERS,
        )
        unused = merge_base + tl.sum(entries, 0) + lanes
        nothing = tl.zeros([BLOCK], tl.int32)
        clear = unused < THREAD_BLOCKS
        tl.store(workspace + MERGE_PACKED_START + unused, nothing, mask=clear)
        tl.store(workspace + MERGE_PACKED_END + unused, nothing, mask=clear)
        tl.store(workspace + MERGE_PARTIAL_START + unused, nothing, mask=clear)
        tl.store(workspace + MERGE_PARTIAL_END + unused, nothing, mask=clear)


@triton.jit(do_not_specialize_on_alignment=["counts"])
def _limit_rows_kernel(
    workspace,  # int32, FlashInfer's integer workspace
    row_lengths,  # int32 [rows]
    row_items,  # int32 [rows + 1]
    planned_ends,  # int32 [capacity]
    counts,  # int32 [rows]
    KV_LEN: tl.constexpr,
    KV_START: tl.constexpr,
    KV_END: tl.constexpr,
    PIECES: tl.constexpr,
):
    # Always from the plan, as an earlier layer may have shortened the items. A piece
    # past the count gets kv_end = kv_start: the kernel gives 0 and LSE -inf for it.
    row = tl.program_id(0)
    length = tl.minimum(tl.load(row_lengths + row), tl.load(counts + row))
    items = tl.load(row_items + row) + tl.arange(0, PIECES)
    mine = items < tl.load(row_items + row + 1)
    end = tl.minimum(tl.load(planned_ends + items, mask=mine, other=0), length)
    start = tl.load(workspace + KV_START + items, mask=mine, other=0)
    tl.store(workspace + KV_LEN + items, length, mask=mine)
    tl.store(workspace + KV_END + items, tl.maximum(end, start), mask=mine)


class DevicePlanner:
    """Writes one step's schedule into FlashInfer's integer workspace.

    Args:
        layout: Where FlashInfer's kernel looks.
        workspace: FlashInfer's integer workspace, int32.
        max_rows: The most rows of a forward.
        index_topk: Tokens that the indexer keeps of a longer context.
        index_kpool: Tokens that it pools; 1 without pooling.

    Raises:
        ValueError: The device has more thread blocks than one program handles, or the
            rows are longer than the search for form A reaches.

    """

    def __init__(
        self,
        layout: WorkspaceLayout,
        workspace: torch.Tensor,
        max_rows: int,
        index_topk: int,
        index_kpool: int,
    ) -> None:
        geometry = layout.geometry
        tiles = triton.cdiv(geometry.width, TILE_TOKENS)
        if geometry.thread_blocks >= BLOCK_ROWS or tiles > MAX_TILES:
            raise ValueError(
                f"the planner takes fewer than {BLOCK_ROWS} thread blocks and at most "
                f"{MAX_TILES} tiles of {TILE_TOKENS} tokens a row, got "
                f"{geometry.thread_blocks} and {tiles}: select another backend"
            )
        self.workspace = workspace

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=workspace.device)

        self.row_lengths = buffer(max_rows)
        self.row_items = buffer(max_rows + 1)
        self.planned_ends = buffer(layout.capacity)
        self._offsets = {
            name.upper(): layout.offsets[name]
            for name in ("kv_len", "kv_start", "kv_end")
        }
        # The share is at least a tile, so a row has at most a piece a tile.
        self._max_pieces = triton.next_power_of_2(tiles)
        # In the order in which the kernel takes them apart.
        self._constants = dict(
            SHAPE=(
                index_topk,
                index_kpool,
                geometry.width,
                geometry.heads,
                geometry.cluster_size,
                geometry.clusters,
                geometry.thread_blocks,
                geometry.row_cost,
                TILE_TOKENS,
                # A span of all tiles always fits, so the search starts there.
                max(tiles - 1, 1).bit_length(),
            ),
            WORK=tuple(layout.offsets[n] for n in (*WORK_FIELDS, "work_indptr")),
            MERGE=tuple(layout.offsets[n] for n in MERGE_FIELDS),
            BLOCK=BLOCK_ROWS,
            num_warps=4,
        )

    def __call__(
        self,
        num_rows: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_reqs: int,
        req_id_per_token: torch.Tensor,
    ) -> None:
        """Plan rows ``[0, num_rows)``. One launch; reads nothing back.

        Args:
            num_rows: Rows of the forward, padded ones included.
            query_start_loc: First row of each request and the end, int32
                ``[num_reqs + 1]``, on the device.
            seq_lens: Tokens of each request, int32 ``[num_reqs]``, on the device.
            num_reqs: Requests, padded ones included.
            req_id_per_token: Request of each row, int32 ``[num_rows]``, on the device.

        """
        _plan_sparse_mla_kernel[(max(triton.cdiv(num_rows, BLOCK_ROWS), 1),)](
            self.workspace,
            self.row_lengths,
            self.row_items,
            self.planned_ends,
            query_start_loc,
            seq_lens,
            req_id_per_token,
            num_rows,
            num_reqs,
            **self._constants,
        )

    def limit(self, counts: torch.Tensor) -> None:
        """Shorten the planned rows to what a layer really selected. One launch.

        Args:
            counts: Valid entries of each row in the slot table, int32 ``[rows]``, on
                the device. More than planned changes nothing.

        """
        _limit_rows_kernel[(counts.shape[0],)](
            self.workspace,
            self.row_lengths,
            self.row_items,
            self.planned_ends,
            counts,
            PIECES=self._max_pieces,
            num_warps=1,
            **self._offsets,
        )
