# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Work partition of the split-KV decode: layout, integer rules and CPU reference.

The KV of all requests is laid on one line, request after request, in units of
``UNIT_TOKENS`` tokens. ``groups`` workers (a group is the clusters that walk the same
KV for different rows) each take one contiguous stretch of that line, so a plan is
``groups + 1`` boundaries::

    boundary g = (request, unit)      group g covers [boundary g, boundary g + 1)

Normal form: a boundary at the end of request r is ``(r + 1, 0)``, boundary 0 is
``(0, 0)``, boundary ``groups`` is ``(requests, 0)``, and two boundaries inside the same
request differ. So every request, also one of length 0, is visited, and each of its
units by exactly one group.

A segment that does not cover its whole request is a partial. Group g owns two slots:
``2 g`` for a segment that starts inside a request, ``2 g + 1`` for one that starts at
unit 0 and ends inside a request. A request cut into the groups first..last has its
partials, in KV order, in ``2 first + 1, 2 (first + 1), .., 2 last``.

``work`` (int32, ``work_len(groups)`` entries)::

    [0, 2 (groups + 1))          boundaries, (request, unit) interleaved
    then 3 (groups - 1) entries  split requests (request, first, last), ascending
    unused and padding           -1

``counts`` (int32, 4 entries): split requests, requests, units of all requests
(each request saturates at ``MAX_REQUEST_UNITS``), chosen candidate.

Several candidates are made and the cheapest is taken: stretches of equal cost whose
boundaries snap to request ends within a tolerance (less balance, fewer partials), and
an equal number of pieces for each request (one piece: nothing is split). All arithmetic
is in integers, so that the device planner (``sm90/planner.py``) gives the same bits.
This module needs torch only.
"""

from bisect import bisect_right
from typing import NamedTuple

import torch

from .config import UNIT_TOKENS

# Cost model, in fixed point: COST_SCALE is one unit of KV. Every constant below is
# tunable; the reference and the device planner read the same ones.
COST_SCALE = 4
ITEM_COST = 14
"""Fixed cost of one segment (3.5 units): loading Q, filling the pipeline, epilogue.

From times on an H200, which give 3 to 3.5 units."""
EMPTY_COST = 4
"""Cost of a request of length 0 (1 unit): writing zeros."""
SPLIT_COST = 3
"""Extra cost of a segment that writes a partial (0.75 units)."""
MIN_PIECE_UNITS = 4
"""A request is cut into pieces of this length or longer."""
MIN_TIGHT_PIECE_UNITS = 2
"""The same for candidate 0, where the balance comes first."""
SCORE_PER_COST = 4
"""Score of one step of the makespan."""
SCORE_PER_PARTIAL = 1
"""Score of one partial: the time its combine takes (1/16 unit)."""
SCORE_ANY_SPLIT = 24
"""Score of having anything to combine (1.5 units)."""

SNAP_TOLERANCES = (0, 8, 16, 32, 64, 128)
"""Candidates 0..5: snap distance in 1/256 of a group's share of the line."""
SNAP_SCALE_BITS = 8
EVEN_CANDIDATE = len(SNAP_TOLERANCES)
"""Candidate 6: every request in the same number of pieces."""
WHOLE_CANDIDATE = EVEN_CANDIDATE + 1
"""Candidate 7: one request a group, nothing split."""
NUM_CANDIDATES = WHOLE_CANDIDATE + 1

MAX_REQUESTS = 4096
"""Most requests of one plan."""
MAX_GROUPS = 255
"""Most groups of one plan."""
MAX_REQUEST_UNITS = (1 << 17) - 8
"""Units of one request saturate here (16.7M tokens) in the cost model, so that the
line's length fits int32; the segment that ends such a request then does the rest."""
MAX_SCORED_COST = 1 << 25
"""The makespan saturates here in the score, so that score and candidate fit int32."""

COUNTS_LEN = 4
MIN_SHARE = MIN_PIECE_UNITS * COST_SCALE
"""Groups that would get less of the line than this stay idle."""


class Segment(NamedTuple):
    """One group's part of one request.

    Attributes:
        request: Index of the request.
        unit_begin: First unit of ``UNIT_TOKENS`` tokens.
        unit_end: One past the last unit.
        slot: Partial slot to write, or -1 when the segment is the whole request.

    """

    request: int
    unit_begin: int
    unit_end: int
    slot: int


def units_of(kv_len: int) -> int:
    """Units of a request of ``kv_len`` tokens; a negative length counts as 0."""
    return -(-max(kv_len, 0) // UNIT_TOKENS)


def work_len(groups: int) -> int:
    """Length of ``work`` (int32 entries) for ``groups`` worker groups."""
    return (2 * (groups + 1) + 3 * (groups - 1) + 3) // 4 * 4


def split_list_offset(groups: int) -> int:
    """Index in ``work`` of the first (request, first, last) triple."""
    return 2 * (groups + 1)


def partial_slots(groups: int) -> int:
    """Partial outputs that ``groups`` worker groups may write."""
    return 2 * groups


def slots_of_split(first: int, last: int) -> list[int]:
    """Partial slots, in KV order, of a request cut into the groups first..last."""
    return [2 * first + 1] + [2 * group for group in range(first + 1, last + 1)]


def check_plan_shape(requests: int, groups: int) -> None:
    """Refuse sizes that the layout can't hold.

    Raises:
        ValueError: More requests than ``MAX_REQUESTS`` or groups outside
            1..``MAX_GROUPS``.

    """
    if not 0 <= requests <= MAX_REQUESTS:
        raise ValueError(
            f"A plan for {requests} requests was asked for; one plan holds 0 to "
            f"{MAX_REQUESTS}. Lower max_num_seqs."
        )
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(
            f"A plan for {groups} worker groups was asked for; allowed are 1 to "
            f"{MAX_GROUPS}."
        )


class _Line:
    """The requests of one plan on the cost line.

    Attributes:
        units: Units of each request, saturated.
        start: Cost before each request, and the total as last entry.
        live: One past the last request that has any KV.

    """

    def __init__(self, kv_lens: list[int], groups: int) -> None:
        self.units = [min(units_of(n), MAX_REQUEST_UNITS) for n in kv_lens]
        self.start = [0]
        for n in self.units:
            cost = n * COST_SCALE + ITEM_COST if n else EMPTY_COST
            self.start.append(self.start[-1] + cost)
        self.requests = len(kv_lens)
        self.live = max((r + 1 for r, n in enumerate(self.units) if n), default=0)
        self.groups = groups
        self.total = self.start[-1]
        self.busy_groups = max(1, min(groups, self.total // MIN_SHARE))

    def snapped(self, group: int, tolerance: int) -> tuple[int, int]:
        """Boundary ``group`` of equal stretches, snapped to a near request end.

        Stretches are ``MIN_SHARE`` or longer and ``unit`` moves one for one with the
        position, so two boundaries inside one request are ``MIN_PIECE_UNITS`` apart.
        """
        if group == 0:
            return 0, 0
        if group >= self.busy_groups:
            return self.requests, 0
        position = group * self.total // self.busy_groups
        request = bisect_right(self.start, position) - 1
        n = self.units[request]
        # Half of the segment's fixed cost lies before its KV, half behind.
        offset = position - self.start[request] - ITEM_COST // 2
        unit = min(max(offset + COST_SCALE // 2, 0) // COST_SCALE, n)
        share = self.total // self.busy_groups
        reach = (share * tolerance >> SNAP_SCALE_BITS) // COST_SCALE
        reach = max(reach, MIN_PIECE_UNITS if tolerance else MIN_TIGHT_PIECE_UNITS)
        if unit < reach and unit <= n - unit:
            return request, 0
        if n - unit < reach:
            return request + 1, 0
        return request, unit

    def even(self, group: int, pieces: int) -> tuple[int, int]:
        """Boundary ``group`` when each live request takes ``pieces`` groups.

        The groups that are left share the empty requests at the end of the batch.
        """
        used = self.live * pieces
        if group >= self.groups:
            return self.requests, 0
        if group >= used:
            left = (self.requests - self.live) * (group - used)
            return self.live + left // (self.groups - used), 0
        request, piece = divmod(group, pieces)
        n = self.units[request]
        cuts = min(pieces, max(n // MIN_PIECE_UNITS, 1))
        if piece >= cuts:
            return request + 1, 0
        return request, n * piece // cuts

    def candidate(self, index: int) -> list[tuple[int, int]] | None:
        """All boundaries of candidate ``index``; None when it does not apply."""
        if index < EVEN_CANDIDATE:
            tolerance = SNAP_TOLERANCES[index]
            return [self.snapped(g, tolerance) for g in range(self.groups + 1)]
        if not 0 < self.live <= self.groups:
            return None
        pieces = self.groups // self.live if index == EVEN_CANDIDATE else 1
        return [self.even(g, pieces) for g in range(self.groups + 1)]

    def group_cost(
        self, begin: tuple[int, int], end: tuple[int, int]
    ) -> tuple[int, int]:
        """Cost and number of partials of the group between two boundaries."""
        (request_a, unit_a), (request_b, unit_b) = begin, end
        cost = self.start[request_b] - self.start[request_a]
        partials = 0
        if unit_b > 0:
            cost += unit_b * COST_SCALE + ITEM_COST
            partials += 1
        if unit_a > 0:
            cost -= unit_a * COST_SCALE
            partials += 1
            if request_a == request_b and unit_b > 0:
                partials -= 1  # one segment: starts and ends inside the request
        return cost + partials * SPLIT_COST, partials

    def score(self, boundaries: list[tuple[int, int]]) -> int:
        """What a plan costs: its slowest group plus the combine of its partials."""
        pairs = zip(boundaries, boundaries[1:])
        costs = [self.group_cost(begin, end) for begin, end in pairs]
        makespan = min(max(cost for cost, _ in costs), MAX_SCORED_COST)
        partials = sum(count for _, count in costs)
        score = makespan * SCORE_PER_COST + partials * SCORE_PER_PARTIAL
        return score + (SCORE_ANY_SPLIT if partials else 0)


def _split_list(boundaries: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(request, first group, last group) of every request that is cut."""
    splits: list[tuple[int, int, int]] = []
    for group, (request, unit) in enumerate(boundaries):
        if unit == 0:
            continue
        if splits and splits[-1][0] == request:
            splits[-1] = (request, splits[-1][1], group)
        else:
            splits.append((request, group - 1, group))
    return splits


def plan_reference(
    seq_lens: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan on the CPU; bit for bit what the device planner writes.

    Args:
        seq_lens: KV length of each request in tokens, int32 ``[requests]``, CPU.
        groups: Number of worker groups.

    Returns:
        ``counts`` int32 ``[4]`` and ``work`` int32 ``[work_len(groups)]``; see the
        module's docstring.

    Raises:
        ValueError: Sizes that one plan can't hold.

    """
    check_plan_shape(seq_lens.numel(), groups)
    line = _Line(seq_lens.tolist(), groups)
    best_score, best_index, best = 0, -1, []
    for index in range(NUM_CANDIDATES):
        boundaries = line.candidate(index)
        if boundaries is None:
            continue
        score = line.score(boundaries)
        if best_index < 0 or score < best_score:
            best_score, best_index, best = score, index, boundaries
    splits = _split_list(best)
    work = torch.full((work_len(groups),), -1, dtype=torch.int32)
    flat = [value for boundary in best for value in boundary]
    flat += [value for split in splits for value in split]
    work[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    counts = [len(splits), line.requests, sum(line.units), best_index]
    return torch.tensor(counts, dtype=torch.int32), work


def segments(
    work: torch.Tensor, counts: torch.Tensor, seq_lens: torch.Tensor, groups: int
) -> list[list[Segment]]:
    """Read a plan as the decode kernel does.

    Args:
        work: int32 ``[work_len(groups)]``.
        counts: int32 ``[4]``.
        seq_lens: KV lengths in tokens, ``[requests]``.
        groups: Number of worker groups.

    Returns:
        For each group its segments in the order of the walk.

    """
    bounds = work[: 2 * (groups + 1)].tolist()
    kv_lens = seq_lens.tolist()
    if int(counts[1]) != len(kv_lens):
        raise ValueError(
            f"The plan is for {int(counts[1])} requests, seq_lens has {len(kv_lens)}. "
            "Plan again with these lengths."
        )
    result = []
    for group in range(groups):
        request_a, unit_a, request_b, unit_b = bounds[2 * group : 2 * group + 4]
        walk = []
        for request in range(request_a, request_b + (unit_b > 0)):
            begin = unit_a if request == request_a else 0
            cut = request == request_b
            end = unit_b if cut else units_of(kv_lens[request])
            slot = 2 * group if begin > 0 else 2 * group + 1 if cut else -1
            walk.append(Segment(request, begin, end, slot))
        result.append(walk)
    return result


def split_list(
    work: torch.Tensor, counts: torch.Tensor, groups: int
) -> list[tuple[int, int, int]]:
    """The plan's split requests as (request, first group, last group)."""
    offset = split_list_offset(groups)
    flat = work[offset : offset + 3 * int(counts[0])].tolist()
    return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
