# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Device planner: fills ``counts`` and ``work`` from KV lengths on the device.

One block of 1024 threads, whatever the lengths; bit for bit ``plan.plan_reference``::

    thread t   lengths -> costs, block scan            -> sStart[request]   (2 barriers)
    warp w     candidate w % 8, every 4th set of 32    -> sRequest, sUnit   (1 barrier)
               boundaries: binary search on the line
    warp w     cost of those groups, warp reduction    -> sCost, sPartials  (1 barrier)
    each warp  scores of all candidates, minimum       -> chosen
    warps 0..  boundaries and split list of the chosen -> work, counts

Costs are fixed-point int32 (``plan.COST_SCALE`` a unit); products that could pass
31 bits are split, so no 64-bit arithmetic is needed.
"""

from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_ptr

from .. import plan
from ..config import UNIT_TOKENS
from .launcher import Launcher
from .warp import inclusive_scan

THREADS = 1024
WARPS = THREADS // 32
WARPS_PER_CANDIDATE = WARPS // plan.NUM_CANDIDATES
BOUNDARIES_PER_PASS = 32 * WARPS_PER_CANDIDATE
MAX_BOUNDARIES = plan.MAX_GROUPS + 1
COST_BITS = plan.COST_SCALE.bit_length() - 1
UNIT_BITS = UNIT_TOKENS.bit_length() - 1
CANDIDATE_BITS = plan.NUM_CANDIDATES.bit_length() - 1
NO_SCORE = 0x7FFFFFFF

assert plan.COST_SCALE == 1 << COST_BITS and UNIT_TOKENS == 1 << UNIT_BITS
assert plan.NUM_CANDIDATES == 1 << CANDIDATE_BITS and WARPS_PER_CANDIDATE == 4
assert plan.ITEM_COST + plan.COST_SCALE > plan.EMPTY_COST  # a cost tells its units
_MAX_SCORE = (
    plan.MAX_SCORED_COST * plan.SCORE_PER_COST
    + 2 * plan.MAX_GROUPS * plan.SCORE_PER_PARTIAL
    + plan.SCORE_ANY_SPLIT
)
assert (_MAX_SCORE + 1) << CANDIDATE_BITS < NO_SCORE


class PlannerKernel:
    """Planner for up to ``max_requests`` requests; groups are a run-time value."""

    def __init__(self, max_requests: int):
        per_thread = -(-max(max_requests, 1) // THREADS)
        self.per_thread = 1 << (per_thread - 1).bit_length()
        self.slots = THREADS * self.per_thread

    @cute.jit
    def __call__(
        self,
        seq_lens: cute.Pointer,  # int32 [requests]
        counts: cute.Pointer,  # int32 [4]
        work: cute.Pointer,  # int32 [plan.work_len(groups)]
        requests: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        boundaries = plan.NUM_CANDIDATES * MAX_BOUNDARIES

        @cute.struct
        class SharedStorage:
            start: cute.struct.MemRange[Int32, self.slots + 1]
            warp_cost: cute.struct.MemRange[Int32, WARPS]
            warp_live: cute.struct.MemRange[Int32, WARPS]
            warp_count: cute.struct.MemRange[Int32, WARPS]
            cost: cute.struct.MemRange[Int32, WARPS]
            partials: cute.struct.MemRange[Int32, WARPS]
            request: cute.struct.MemRange[Int32, boundaries]
            unit: cute.struct.MemRange[Int32, boundaries]

        self.shared_storage = SharedStorage
        self.kernel(seq_lens, counts, work, requests, groups).launch(
            grid=(1, 1, 1),
            block=(THREADS, 1, 1),
            smem=SharedStorage.size_in_bytes(),  # type: ignore[attr-defined]
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        lens: cute.Pointer,
        counts: cute.Pointer,
        work: cute.Pointer,
        requests: Int32,
        groups: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        candidate = warp % plan.NUM_CANDIDATES
        part = warp // plan.NUM_CANDIDATES

        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.shared_storage)
        sStart = storage.start.get_tensor(cute.make_layout(self.slots + 1))
        bounds = cute.make_layout(
            (MAX_BOUNDARIES, plan.NUM_CANDIDATES), stride=(1, MAX_BOUNDARIES)
        )
        sRequest = storage.request.get_tensor(bounds)
        sUnit = storage.unit.get_tensor(bounds)
        sCost = storage.cost.get_tensor(cute.make_layout(WARPS))
        sPartials = storage.partials.get_tensor(cute.make_layout(WARPS))
        mLens = cute.make_tensor(lens, cute.make_layout(self.slots))

        total, live, nonempty = self.scan(
            storage, mLens, sStart, requests, tid, lane, warp
        )
        cute.arch.sync_threads()

        busy = cutlass.max(cutlass.min(total // plan.MIN_SHARE, groups), Int32(1))
        own = part * 32 + lane
        for base in cutlass.range(0, groups + 1, BOUNDARIES_PER_PASS, unroll=1):
            group = base + own
            if group <= groups:
                request = Int32(0)
                unit = Int32(0)
                if candidate < plan.EVEN_CANDIDATE:
                    request, unit = self.snapped(
                        sStart, group, candidate, total, busy, requests
                    )
                else:
                    request, unit = self.even(
                        sStart, group, candidate, live, requests, groups
                    )
                sRequest[group, candidate] = request
                sUnit[group, candidate] = unit
        cute.arch.sync_threads()

        worst = Int32(0)
        partials = Int32(0)
        for base in cutlass.range(0, groups, BOUNDARIES_PER_PASS, unroll=1):
            group = base + own
            if group < groups:
                cost, count = self.group_cost(sStart, sRequest, sUnit, group, candidate)
                worst = cutlass.max(worst, cost)
                partials = partials + count
        worst = cute.arch.warp_redux_sync(worst, "max")
        partials = cute.arch.warp_redux_sync(partials, "add")
        if lane == 0:
            sCost[candidate * WARPS_PER_CANDIDATE + part] = worst
            sPartials[candidate * WARPS_PER_CANDIDATE + part] = partials
        cute.arch.sync_threads()

        if warp * 32 <= groups:
            mCounts = cute.make_tensor(counts, cute.make_layout(plan.COUNTS_LEN))
            mWork = cute.make_tensor(
                work, cute.make_layout(plan.work_len(plan.MAX_GROUPS))
            )
            chosen = self.choose(sCost, sPartials, live, groups, lane)
            splits = self.write_plan(mWork, sRequest, sUnit, chosen, groups, warp, lane)
            if tid == 0:
                fixed = nonempty * plan.ITEM_COST
                fixed = fixed + (requests - nonempty) * plan.EMPTY_COST
                mCounts[0] = splits
                mCounts[1] = requests
                mCounts[2] = (total - fixed) >> COST_BITS
                mCounts[3] = chosen

    @cute.jit
    def scan(self, storage, mLens, sStart, requests, tid, lane, warp):
        """Costs of all requests and their exclusive prefix sums in ``sStart``.

        Entries from ``requests`` on hold the total. The caller synchronises.

        Returns:
            Total cost, one past the last request with KV, number of requests with KV.

        """
        per_thread = self.per_thread
        tCost = cute.make_rmem_tensor((per_thread,), Int32)
        own = Int32(0)
        live = Int32(0)
        nonempty = Int32(0)
        for i in cutlass.range_constexpr(per_thread):
            index = tid * per_thread + i
            cost = Int32(0)
            if index < requests:
                length = cutlass.max(mLens[index], Int32(0))
                # Rounded up without length + 127, which may pass 31 bits.
                tail = ((length & (UNIT_TOKENS - 1)) + (UNIT_TOKENS - 1)) >> UNIT_BITS
                units = (length >> UNIT_BITS) + tail
                units = cutlass.min(units, Int32(plan.MAX_REQUEST_UNITS))
                cost = Int32(plan.EMPTY_COST)
                if units > 0:
                    cost = (units << COST_BITS) + plan.ITEM_COST
                    live = index + 1
                    nonempty = nonempty + 1
            tCost[i] = cost
            own = own + cost
        inclusive = inclusive_scan(own, lane)
        live = cute.arch.warp_redux_sync(live, "max")
        nonempty = cute.arch.warp_redux_sync(nonempty, "add")
        sWarpCost = storage.warp_cost.get_tensor(cute.make_layout(WARPS))
        sWarpLive = storage.warp_live.get_tensor(cute.make_layout(WARPS))
        sWarpCount = storage.warp_count.get_tensor(cute.make_layout(WARPS))
        if lane == 31:
            sWarpCost[warp] = inclusive
            sWarpLive[warp] = live
            sWarpCount[warp] = nonempty
        cute.arch.sync_threads()
        warp_total = sWarpCost[lane]
        warp_inclusive = inclusive_scan(warp_total, lane)
        live = cute.arch.warp_redux_sync(sWarpLive[lane], "max")
        nonempty = cute.arch.warp_redux_sync(sWarpCount[lane], "add")
        base = cute.arch.shuffle_sync(warp_inclusive - warp_total, warp)
        total = cute.arch.shuffle_sync(warp_inclusive, 31)
        base = base + inclusive - own
        for i in cutlass.range_constexpr(per_thread):
            sStart[tid * per_thread + i] = base
            base = base + tCost[i]
        if tid == THREADS - 1:
            sStart[self.slots] = base
        return total, live, nonempty

    @cute.jit
    def units_at(self, sStart, request):
        """Units of a request, from its cost on the line."""
        cost = sStart[request + 1] - sStart[request]
        units = Int32(0)
        if cost > plan.EMPTY_COST:
            units = (cost - plan.ITEM_COST) >> COST_BITS
        return units

    @cute.jit
    def snapped(self, sStart, group, candidate, total, busy, requests):
        """``plan._Line.snapped`` with the tolerance of ``candidate``."""
        tolerance = Int32(0)
        for i in cutlass.range_constexpr(len(plan.SNAP_TOLERANCES)):
            if candidate == i:
                tolerance = Int32(plan.SNAP_TOLERANCES[i])
        request = requests
        unit = Int32(0)
        if group == 0:
            request = Int32(0)
        elif group < busy:
            share = total // busy
            rest = total - share * busy
            # floor(group * total / busy) in 32 bits.
            position = group * share + (group * rest) // busy
            request = Int32(0)
            step = self.slots // 2
            while const_expr(step > 0):
                if sStart[request + step] <= position:
                    request = request + step
                step = step // 2
            n = self.units_at(sStart, request)
            offset = position - sStart[request] - plan.ITEM_COST // 2
            unit = cutlass.max(offset + plan.COST_SCALE // 2, Int32(0)) >> COST_BITS
            unit = cutlass.min(unit, n)
            low = (share & ((1 << plan.SNAP_SCALE_BITS) - 1)) * tolerance
            reach = (share >> plan.SNAP_SCALE_BITS) * tolerance
            reach = (reach + (low >> plan.SNAP_SCALE_BITS)) >> COST_BITS
            least = Int32(plan.MIN_PIECE_UNITS)
            if tolerance == 0:
                least = Int32(plan.MIN_TIGHT_PIECE_UNITS)
            reach = cutlass.max(reach, least)
            if (unit < reach) & (unit <= n - unit):
                unit = Int32(0)
            elif n - unit < reach:
                request = request + 1
                unit = Int32(0)
        return request, unit

    @cute.jit
    def even(self, sStart, group, candidate, live, requests, groups):
        """``plan._Line.even``; harmless values where the candidate does not apply."""
        pieces = Int32(1)
        if candidate == plan.EVEN_CANDIDATE:
            pieces = cutlass.max(groups // cutlass.max(live, Int32(1)), Int32(1))
        used = live * pieces
        request = requests
        unit = Int32(0)
        if group < groups:
            if group >= used:
                left = (requests - live) * (group - used)
                request = live + left // (groups - used)
            else:
                request = group // pieces
                piece = group - request * pieces
                n = self.units_at(sStart, request)
                cuts = cutlass.max(n // plan.MIN_PIECE_UNITS, Int32(1))
                cuts = cutlass.min(cuts, pieces)
                if piece >= cuts:
                    request = request + 1
                else:
                    unit = (n * piece) // cuts
        return request, unit

    @cute.jit
    def group_cost(self, sStart, sRequest, sUnit, group, candidate):
        """``plan._Line.group_cost`` of ``group``."""
        request_a = sRequest[group, candidate]
        request_b = sRequest[group + 1, candidate]
        unit_a = sUnit[group, candidate]
        unit_b = sUnit[group + 1, candidate]
        cost = sStart[request_b] - sStart[request_a]
        partials = Int32(0)
        if unit_b > 0:
            cost = cost + (unit_b << COST_BITS) + plan.ITEM_COST
            partials = partials + 1
        if unit_a > 0:
            cost = cost - (unit_a << COST_BITS)
            if (request_a != request_b) | (unit_b == 0):
                partials = partials + 1
        return cost + partials * plan.SPLIT_COST, partials

    @cute.jit
    def choose(self, sCost, sPartials, live, groups, lane):
        """Candidate with the least score; ties go to the lower index."""
        worst = sCost[lane]
        partials = sPartials[lane]
        for i in cutlass.range_constexpr(2):
            worst = cutlass.max(worst, cute.arch.shuffle_sync_bfly(worst, 1 << i))
            partials = partials + cute.arch.shuffle_sync_bfly(partials, 1 << i)
        candidate = lane // WARPS_PER_CANDIDATE
        score = cutlass.min(worst, Int32(plan.MAX_SCORED_COST)) * plan.SCORE_PER_COST
        score = score + partials * plan.SCORE_PER_PARTIAL
        if partials > 0:
            score = score + plan.SCORE_ANY_SPLIT
        key = (score << CANDIDATE_BITS) + candidate
        fits = (live > 0) & (live <= groups)
        if (candidate >= plan.EVEN_CANDIDATE) & ~fits:
            key = Int32(NO_SCORE)
        best = cute.arch.warp_redux_sync(key, "min")
        return best & (plan.NUM_CANDIDATES - 1)

    @cute.jit
    def write_plan(self, mWork, sRequest, sUnit, chosen, groups, warp, lane):
        """Write boundaries and split list; returns the number of split requests.

        Warp w owns boundaries and list entries 32 w .. 32 w + 31; it counts the first
        cuts of all requests itself, which saves a barrier.
        """
        before = Int32(0)
        splits = Int32(0)
        for first in cutlass.range(0, groups + 1, 32, unroll=1):
            is_first, _ = self.cut_flags(sRequest, sUnit, chosen, groups, first + lane)
            found = cute.arch.popc(cute.arch.vote_ballot_sync(is_first))
            splits = splits + found
            if first < warp * 32:
                before = before + found
        group = warp * 32 + lane
        is_first, is_last = self.cut_flags(sRequest, sUnit, chosen, groups, group)
        firsts = cute.arch.vote_ballot_sync(is_first)
        upto = (Uint32(2) << Uint32(lane)) - Uint32(1)
        # Index of the last request whose first cut is at or before this boundary.
        entry = before + cute.arch.popc(firsts & Int32(upto)) - 1
        base = 2 * (groups + 1)
        if group <= groups:
            mWork[2 * group] = sRequest[group, chosen]
            mWork[2 * group + 1] = sUnit[group, chosen]
            if is_first:
                mWork[base + 3 * entry] = sRequest[group, chosen]
                mWork[base + 3 * entry + 1] = group - 1
            if is_last:
                mWork[base + 3 * entry + 2] = group
        if (group >= splits) & (group < groups - 1):
            for i in cutlass.range_constexpr(3):
                mWork[base + 3 * group + i] = Int32(-1)
        # Padding up to plan.work_len, a multiple of 4.
        end = base + 3 * (groups - 1)
        if end + group < ((end + 3) & ~3):
            mWork[end + group] = Int32(-1)
        return splits

    @cute.jit
    def cut_flags(self, sRequest, sUnit, chosen, groups, group):
        """Is boundary ``group`` the first and is it the last cut of a request."""
        is_first = cutlass.Boolean(False)
        is_last = cutlass.Boolean(False)
        unit = Int32(0)
        if (group > 0) & (group < groups):
            unit = sUnit[group, chosen]
        if unit > 0:
            request = sRequest[group, chosen]
            before = sRequest[group - 1, chosen] != request
            after = sRequest[group + 1, chosen] != request
            is_first = before | (sUnit[group - 1, chosen] == 0)
            is_last = after | (sUnit[group + 1, chosen] == 0)
        return is_first, is_last


@cache
def _compile(max_requests: int):
    """The compiled function; it serves every number of worker groups."""
    int32 = make_ptr(Int32, 16, cute.AddressSpace.gmem, assumed_align=4)
    return cute.compile(
        PlannerKernel(max_requests),
        int32,
        int32,
        int32,
        Int32(1),
        Int32(1),
        make_fake_stream(),
    )


@cache
def compile_plan_kernel(groups: int, max_requests: int) -> "CompiledPlanner":
    """The planner of a shape; all numbers of groups share one compilation.

    Args:
        groups: Worker groups, 1 to ``plan.MAX_GROUPS``.
        max_requests: Most requests of a plan, up to ``plan.MAX_REQUESTS``.

    Raises:
        ValueError: Sizes that one plan can't hold.

    """
    return CompiledPlanner(groups, max_requests)


class CompiledPlanner:
    """A compiled planner for a number of groups; see ``compile_plan_kernel``.

    Attributes:
        groups: Worker groups of the plans.
        max_requests: Most requests of one plan.

    """

    def __init__(self, groups: int, max_requests: int):
        plan.check_plan_shape(max_requests, groups)
        self.groups = groups
        self.max_requests = max_requests
        self.compiled = _compile(max_requests)
        self._launch = Launcher(self.compiled, "pppiip")

    def __call__(
        self,
        seq_lens_ptr: int,
        counts_ptr: int,
        work_ptr: int,
        requests: int,
        stream: int,
    ) -> None:
        """Launch on raw device addresses and a stream handle; nothing is checked."""
        self._launch(seq_lens_ptr, counts_ptr, work_ptr, requests, self.groups, stream)

    def launch(
        self,
        seq_lens: torch.Tensor,
        counts: torch.Tensor,
        work: torch.Tensor,
        stream: int,
    ) -> None:
        """Plan from a device tensor of lengths.

        Args:
            seq_lens: KV lengths in tokens, int32 ``[requests]``, contiguous.
            counts: int32 ``[4]``, written.
            work: int32, at least ``plan.work_len(groups)`` entries, written.
            stream: Handle of the CUDA stream to launch on.

        """
        requests = seq_lens.shape[0]
        assert requests <= self.max_requests, (requests, self.max_requests)
        assert seq_lens.dtype == torch.int32 and seq_lens.is_contiguous(), seq_lens
        assert work.shape[0] >= plan.work_len(self.groups), (work.shape, self.groups)
        self._launch(
            seq_lens.data_ptr(), counts.data_ptr(), work.data_ptr(), requests,
            self.groups, stream,
        )  # fmt: skip
