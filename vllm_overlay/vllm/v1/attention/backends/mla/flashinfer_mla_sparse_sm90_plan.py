# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The schedule of FlashInfer's FA3 MLA kernel, computed on the device.

FlashInfer plans on the host. Its kernel only follows what the plan left in the
integer workspace: work items sorted by cluster, and the split rows to merge. Any
assignment is right if it covers each row's tokens once, so this module writes its own
from device lengths with one Triton launch, and the host never sees a length.

Terms: a *row* is one query token with all heads. A *tile* is 64 KV tokens. A *cluster*
is one or two thread blocks that take 64 query heads each; ``C`` clusters run at once.
A *piece* is a run of a row's tiles that one work item does.

Lengths. Row ``j`` of a request has the context ``seq_len - query_end + j + 1``, where
``query_end`` is the request's end in ``query_start_loc``. The indexer keeps all of a
context up to ``topk``; of a longer one it keeps ``topk`` plus the trailing incomplete
pool: ``topk + context % kpool``. Rows past the last request have length 0.

Schedule. With ``t_r = ceil(len_r / 64)`` and a fixed cost per row of ``ov = 2 * 64 *
cluster_size``, row ``r`` starts on a line at ``U_r = sum_{q<r} (64 t_q + ov)``, and
``T = max(ceil(U_total / C), 64)`` is one cluster's share.

- Form A (rows <= C): pieces of ``i`` tiles, item ``k`` on cluster ``k``, with the
  smallest ``i`` for which ``sum_r max(ceil(t_r / i), 1) <= C``.
- Form B: tile ``j`` of row ``r`` belongs to cluster ``(U_r + ov + 64 j) // T``, an
  empty row to ``U_r // T``. Piece ``k > 0`` of a row starts at tile
  ``ceil(((first_r + k) T - U_r - ov) / 64)``.
- A is taken if ``64 i <= T + 64``.

A row of ``n > 1`` pieces writes partial results to ``n * heads`` consecutive rows. Up
to ``cluster_size * (n - 1)`` thread blocks merge them, a range of heads each.

Bounds: items <= rows + C; merge entries <= thread blocks; partial rows <=
``2 * C * 64 * cluster_size``, the size of FlashInfer's partial buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE_TOKENS = 64
CTA_HEADS = 64

# FlashInfer 0.7's MLAPlanInfo::ToVector (attention/scheduler.cuh), in its order: two
# grid sizes, byte offsets into the integer workspace, and two into the float one.
PLAN_INFO_FIELDS = (
    "num_blks_x",
    "num_blks_y",
    "q_indptr",
    "kv_indptr",
    "partial_indptr",
    "merge_packed_start",
    "merge_packed_end",
    "merge_partial_start",
    "merge_partial_end",
    "merge_stride",
    "q_len",
    "kv_len",
    "q_start",
    "kv_start",
    "kv_end",
    "work_indptr",
    "partial_o",
    "partial_lse",
)
WORK_FIELDS = (
    "q_indptr",
    "kv_indptr",
    "partial_indptr",
    "q_len",
    "kv_len",
    "q_start",
    "kv_start",
    "kv_end",
)
MERGE_FIELDS = PLAN_INFO_FIELDS[5:10]
# Rows that one program plans; also bounds clusters and thread blocks.
BLOCK_ROWS = 256
# A row has at most this many tiles; it bounds form A's search.
MAX_TILES = 1 << 12


@dataclass(frozen=True)
class Geometry:
    """What the schedule depends on besides the lengths.

    Attributes:
        heads: Query heads of a row, 1 to 128.
        cluster_size: Thread blocks that share a row: 1 up to 64 heads, else 2.
        thread_blocks: Thread blocks of the grid that merge: the device's SMs.
        width: Entries of a row in the slot table; also the longest length.

    """

    heads: int
    cluster_size: int
    thread_blocks: int
    width: int

    @property
    def clusters(self) -> int:
        return self.thread_blocks // self.cluster_size

    @property
    def row_cost(self) -> int:
        """Fixed cost of a row, in tokens."""
        return 2 * CTA_HEADS * self.cluster_size

    @property
    def partial_rows(self) -> int:
        """Rows ``[512]`` of FlashInfer's partial output."""
        return 2 * self.clusters * CTA_HEADS * self.cluster_size


@dataclass(frozen=True)
class WorkItem:
    """One piece of a row, as the kernel reads it."""

    cluster: int
    q_indptr: int
    kv_indptr: int
    partial_indptr: int
    q_len: int
    kv_len: int
    q_start: int
    kv_start: int
    kv_end: int


@dataclass(frozen=True)
class Merge:
    """The heads that one thread block merges. Ends are exclusive."""

    merge_packed_start: int
    merge_packed_end: int
    merge_partial_start: int
    merge_partial_end: int
    merge_stride: int


@dataclass(frozen=True)
class Schedule:
    """Work items in order, the items' bounds of each cluster, and the merges."""

    items: tuple[WorkItem, ...]
    work_indptr: tuple[int, ...]
    merges: tuple[Merge, ...]


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def row_kv_lengths(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    num_rows: int,
    index_topk: int,
    index_kpool: int,
    width: int,
) -> list[int]:
    """Valid slots of each row: the reference for what the kernel computes.

    Args:
        query_start_loc: First row of each request and the end, ``[requests + 1]``.
        seq_lens: Tokens of each request, drafts included, ``[requests]``.
        num_rows: Rows to plan; those past the last request get 0.
        index_topk: Tokens that the indexer keeps of a longer context.
        index_kpool: Tokens that it pools; 1 without pooling.
        width: Entries of a row in the slot table.

    """
    lengths = [0] * num_rows
    for request, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[request], query_start_loc[request + 1]
        for row in range(start, min(end, num_rows)):
            context = max(seq_len - end + row + 1, 0)
            if context > index_topk:
                context = index_topk + context % index_kpool
            lengths[row] = min(context, width)
    return lengths


def _pieces(lengths: Sequence[int], geometry: Geometry) -> list[tuple[int, list[int]]]:
    """First cluster and tile bounds ``[pieces + 1]`` of each row."""
    clusters, cost = geometry.clusters, geometry.row_cost
    tiles = [ceil_div(length, TILE_TOKENS) for length in lengths]
    starts, total = [], 0
    for count in tiles:
        starts.append(total)
        total += TILE_TOKENS * count + cost
    share = max(ceil_div(total, clusters), TILE_TOKENS)

    if tiles and len(tiles) <= clusters:
        span = 1
        while sum(max(ceil_div(t, span), 1) for t in tiles) > clusters:
            span += 1
        if TILE_TOKENS * span <= share + TILE_TOKENS:
            rows: list[tuple[int, list[int]]] = []
            item = 0
            for count in tiles:
                n = max(ceil_div(count, span), 1)
                rows.append((item, [min(k * span, count) for k in range(n + 1)]))
                item += n
            return rows

    rows = []
    for count, start in zip(tiles, starts):
        if not count:
            rows.append((start // share, [0, 0]))
            continue
        line = start + cost
        first = line // share
        last = (line + TILE_TOKENS * (count - 1)) // share
        cuts = [
            ceil_div((first + k) * share - line, TILE_TOKENS)
            for k in range(1, last - first + 1)
        ]
        rows.append((first, [0, *cuts, count]))
    return rows


def reference_schedule(lengths: Sequence[int], geometry: Geometry) -> Schedule:
    """The schedule that the kernel writes for rows of these lengths."""
    heads = geometry.heads
    items: list[WorkItem] = []
    merges: list[Merge] = []
    partial = 0
    for row, (first, bounds) in enumerate(_pieces(lengths, geometry)):
        n = len(bounds) - 1
        for k in range(n):
            items.append(
                WorkItem(
                    cluster=first + k,
                    q_indptr=row,
                    kv_indptr=row * geometry.width,
                    partial_indptr=partial + k * heads if n > 1 else -1,
                    q_len=1,
                    kv_len=lengths[row],
                    q_start=0,
                    kv_start=TILE_TOKENS * bounds[k],
                    kv_end=min(TILE_TOKENS * bounds[k + 1], lengths[row]),
                )
            )
        if n > 1:
            chunk = ceil_div(heads, min(heads, geometry.cluster_size * (n - 1)))
            for head in range(0, heads, chunk):
                merges.append(
                    Merge(
                        merge_packed_start=row * heads + head,
                        merge_packed_end=row * heads + min(head + chunk, heads),
                        merge_partial_start=partial + head,
                        merge_partial_end=partial + n * heads,
                        merge_stride=heads,
                    )
                )
            partial += n * heads
    work_indptr = tuple(
        sum(item.cluster < c for item in items) for c in range(geometry.clusters + 1)
    )
    return Schedule(tuple(items), work_indptr, tuple(merges))


def check_schedule(
    schedule: Schedule,
    lengths: Sequence[int],
    kv_indptr: Sequence[int],
    geometry: Geometry,
) -> None:
    """Check that a schedule, ours or FlashInfer's, does each row exactly once.

    Args:
        schedule: What to check.
        lengths: KV tokens of each row.
        kv_indptr: First entry of each row in the slot table.
        geometry: Heads and grid.

    Raises:
        ValueError: A token is left out or done twice, an item or a merge lies outside
            its bounds, or an item isn't where its cluster looks.

    """

    def need(good: bool, what: str, *values: object) -> None:
        if not good:
            raise ValueError(f"{what}: {', '.join(map(str, values))}")

    heads, items = geometry.heads, schedule.items
    bounds = schedule.work_indptr
    need(
        len(bounds) == geometry.clusters + 1
        and bounds[0] == 0
        and bounds[-1] == len(items)
        and all(a <= b for a, b in zip(bounds, bounds[1:])),
        "work_indptr doesn't cut the items into one range a cluster",
        bounds,
    )
    pieces: dict[int, list[WorkItem]] = {}
    for item in items:
        row = item.q_indptr
        need(0 <= row < len(lengths), "an item of a row that isn't there", item)
        need(
            (item.kv_indptr, item.q_len, item.kv_len, item.q_start)
            == (kv_indptr[row], 1, lengths[row], 0),
            "an item doesn't describe its row",
            item,
        )
        need(
            item.kv_start % TILE_TOKENS == 0
            or item.kv_end - item.kv_start <= TILE_TOKENS,
            "an item starts inside a tile",
            item,
        )
        pieces.setdefault(row, []).append(item)

    used: set[int] = set()
    written: dict[int, tuple[int, int]] = {}
    for row, length in enumerate(lengths):
        ours = sorted(pieces.get(row, ()), key=lambda item: item.kv_start)
        ends = [0, *(item.kv_end for item in ours)]
        need(
            bool(ours)
            and [item.kv_start for item in ours] == ends[:-1]
            and ends[-1] == length
            and all(item.kv_end > item.kv_start for item in ours[1:]),
            "a row isn't covered exactly once",
            row,
            length,
            ours,
        )
        if len(ours) == 1:
            need(ours[0].partial_indptr == -1, "an unsplit row is partial", ours)
            continue
        base = ours[0].partial_indptr
        written[row] = (base, base + len(ours) * heads)
        for k, item in enumerate(ours):
            span = range(item.partial_indptr, item.partial_indptr + heads)
            need(item.partial_indptr == base + k * heads, "partials not in order", ours)
            need(
                span[0] >= 0 and span[-1] < geometry.partial_rows,
                "partial rows outside FlashInfer's buffer",
                item,
            )
            need(used.isdisjoint(span), "two pieces share partial rows", item)
            used.update(span)

    merged: set[int] = set()
    need(len(schedule.merges) <= geometry.thread_blocks, "too many merge entries")
    for merge in schedule.merges:
        row, head = divmod(merge.merge_packed_start, heads)
        span = range(merge.merge_packed_start, merge.merge_packed_end)
        need(
            row in written
            and len(span) > 0
            and span[-1] // heads == row
            and merge.merge_partial_start == written[row][0] + head
            and merge.merge_partial_end == written[row][1]
            and merge.merge_stride == heads,
            "a merge doesn't match its row's partials",
            merge,
        )
        need(merged.isdisjoint(span), "a head is merged twice", merge)
        merged.update(span)
    need(
        len(merged) == heads * len(written), "a split row isn't merged", sorted(written)
    )


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where FlashInfer's kernel looks in the integer workspace.

    Attributes:
        offsets: First int32 element of each array, by its name in
            ``PLAN_INFO_FIELDS``.
        capacity: Elements of a work array.
        geometry: Heads and grid that the plan is for.

    """

    offsets: dict[str, int]
    capacity: int
    geometry: Geometry

    @classmethod
    def from_plan(
        cls,
        plan_info: Sequence[int],
        workspace_bytes: int,
        geometry: Geometry,
    ) -> "WorkspaceLayout":
        """Read the layout that a FlashInfer plan reports.

        Args:
            plan_info: The wrapper's ``_plan_info``.
            workspace_bytes: Size of the integer workspace.
            geometry: Heads and grid that the plan should have.

        Raises:
            ValueError: It isn't the layout that this module knows.

        """
        if len(plan_info) != len(PLAN_INFO_FIELDS):
            raise ValueError(
                f"the plan has {len(plan_info)} fields, not {len(PLAN_INFO_FIELDS)}"
            )
        named = dict(zip(PLAN_INFO_FIELDS, (int(value) for value in plan_info)))
        grid = (named["num_blks_x"], named["num_blks_y"])
        wanted = (geometry.cluster_size, geometry.clusters)
        if grid != wanted:
            raise ValueError(f"the plan's grid is {grid}, not {wanted}")
        capacity = (named["kv_indptr"] - named["q_indptr"]) // 4
        sizes = {name: capacity for name in WORK_FIELDS}
        sizes |= {name: geometry.thread_blocks for name in MERGE_FIELDS}
        sizes["work_indptr"] = geometry.clusters + 1
        end = 0
        for name, size in sorted(sizes.items(), key=lambda pair: named[pair[0]]):
            begin = named[name]
            if begin % 4 or begin < end or size <= 0:
                raise ValueError(
                    f"{name} is at byte {begin}; expected an aligned offset from {end}"
                )
            end = begin + 4 * size
        if end > workspace_bytes:
            raise ValueError(
                f"the arrays end at byte {end} of a {workspace_bytes} byte workspace"
            )
        return cls({name: named[name] // 4 for name in sizes}, capacity, geometry)

    @property
    def max_rows(self) -> int:
        """Rows whose items always fit: items <= rows + clusters."""
        return self.capacity - self.geometry.clusters

    def read(self, workspace: torch.Tensor) -> Schedule:
        """Copy the schedule out of an int32 workspace. Waits for the device."""
        values = workspace.view(torch.int32).cpu()

        def array(name: str, size: int) -> list[int]:
            begin = self.offsets[name]
            return values[begin : begin + size].tolist()

        clusters = self.geometry.clusters
        work_indptr = array("work_indptr", clusters + 1)
        count = work_indptr[-1]
        if not 0 <= count <= self.capacity:
            raise ValueError(f"{count} items of at most {self.capacity}")
        columns = {name: array(name, count) for name in WORK_FIELDS}
        owner = [0] * count
        for cluster in range(clusters):
            for item in range(work_indptr[cluster], work_indptr[cluster + 1]):
                owner[item] = cluster
        items = tuple(
            WorkItem(owner[i], **{name: columns[name][i] for name in WORK_FIELDS})
            for i in range(count)
        )
        merge_columns = [
            array(name, self.geometry.thread_blocks) for name in MERGE_FIELDS
        ]
        merges = (Merge(*values) for values in zip(*merge_columns))
        used = (m for m in merges if m.merge_packed_start != m.merge_packed_end)
        return Schedule(items, tuple(work_indptr), tuple(used))
