# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Split-KV combine: merges the partial outputs of every split request.

For the partials i of one row, in KV order (LSE in log2)::

    w_i = exp2(lse_i - max)     out = sum(w_i O_i) / sum(w_i) * output_scale
                                lse = log2(sum(w_i)) + max

The partials are fp16, times ``PARTIAL_SCALE``: their rounding, 2 ** -11 at most, is
an eighth of that of the result to bf16. An empty partial has LSE -inf and O = 0; if all
are empty, out is 0 and the LSE -inf.
Rows of requests that the plan did not split are not touched: the decode kernel has
written them.

The grid is constant. Each block reads the plan's split list and loops over units of
work. Launched programmatically it reads the plan before it waits for the decode: every
block of that one has waited for all kernels before, hence for the planner, when it lets
this one start. This one lets the next start at once, so that one must wait before it
reads or writes global memory, as the next layer's decode does. Every block waits, even
without splits: whoever waits for this kernel has then waited for the decode too. A unit
is, by the request's number of partials:

- up to ``FEW_PARTIALS``: 4 rows; each of the 8 warps owns 256 columns of a row.
- more: 128 columns of one row; the 8 warps share the partials (warp w takes w, w + 8,
  ..), then meet in shared memory.

A warp keeps a running maximum over batches of partials and has all loads of a batch in
flight. The order of every sum is fixed, so the same plan gives the same bits.
"""

from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_ptr

from .. import plan
from ..config import LATENT, PARTIAL_BYTES, PARTIAL_SCALE
from .launcher import Launcher
from .ptx import exp2_approx, fma, pack_x2
from .warp import inclusive_scan

WARPS = 8
THREADS = 32 * WARPS
BLOCKS_PER_SM = 4
SHARED_MEMORY_PERCENT = 20
"""Of an SM's memory, enough for ``BLOCKS_PER_SM`` blocks; given here because the DSL
would otherwise ask the driver at compile time."""
FEW_PARTIALS = 8
VECTOR = 4
"""Columns of one load of one lane."""
BAND = 32 * VECTOR
"""Columns of one load of a warp."""
FEW_BANDS = 2
MANY_BANDS = 1
FEW_BATCH = 4
MANY_BATCH = 8
ROWS_PER_FEW_UNIT = WARPS * FEW_BANDS * BAND // LATENT
UNITS_PER_ROW = LATENT // BAND

assert plan.MAX_GROUPS <= THREADS  # one thread reads one entry of the split list


@cute.jit
def load_vector(address: Int64, valid: Int32):
    """Four consecutive partial outputs as fp32, zeros when ``valid`` is 0.

    Predicated rather than branched, so that the loads of a batch stay together. They
    are read once and not kept in L1.
    """
    low, high = cute.arch.inline_ptx(
        "{ .reg .pred take; setp.ne.s32 take, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "@take ld.global.L1::no_allocate.v2.b32 {{$w0}, {$w1}}, [{$r0}]; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[address, valid],
    )
    return cute.arch.inline_ptx(
        "{ .reg .b16 h0, h1, h2, h3; "
        "mov.b32 {h0, h1}, {$r0}; mov.b32 {h2, h3}, {$r1}; "
        "cvt.f32.f16 {$w0}, h0; cvt.f32.f16 {$w1}, h1; "
        "cvt.f32.f16 {$w2}, h2; cvt.f32.f16 {$w3}, h3; }",
        write_only_types=[Float32] * 4,
        read_only_args=[low, high],
    )


@cute.jit
def load_lse(address: Int64, valid: Int32):
    """An LSE, -inf when ``valid`` is 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred take; setp.ne.s32 take, {$r1}, 0; mov.f32 {$w0}, 0fFF800000; "
        "@take ld.global.f32 {$w0}, [{$r0}]; }",
        write_only_types=[Float32],
        read_only_args=[address, valid],
    )


@cute.jit
def store_words(address: Int64, low: Uint32, high: Uint32):
    """Store two words; ``address`` is a multiple of 8."""
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[address, low, high],
    )


@cute.jit
def finite(reference: Float32):
    """``reference``, or 0 for -inf: -inf minus it is then -inf and never NaN."""
    if reference == -Float32.inf:
        reference = Float32(0.0)
    return reference


class CombineKernel:
    """Combine on a grid of ``blocks``; rows and worker groups are run-time values."""

    def __init__(self, blocks: int, use_pdl: bool = False):
        if blocks < 1:
            raise ValueError(f"blocks is {blocks}; the grid needs at least 1.")
        self.blocks = blocks
        self.use_pdl = use_pdl

    @cute.jit
    def __call__(
        self,
        partials: cute.Pointer,  # fp16 [2 groups, rows, 512], normalised, scaled
        partial_lse: cute.Pointer,  # fp32 [2 groups, rows], log2
        counts: cute.Pointer,  # int32 [4]
        work: cute.Pointer,  # int32 [plan.work_len(groups)]
        out: cute.Pointer,  # words of two bf16 [requests * rows, 256]
        lse: cute.Pointer,  # fp32 [requests * rows], log2
        groups: Int32,
        rows: Int32,
        has_lse: Int32,
        output_scale: Float32,
        stream: cuda.CUstream,
    ):
        @cute.struct
        class SharedStorage:
            # First unit, request, first group and partials of each split request.
            unit: cute.struct.MemRange[Int32, THREADS]
            request: cute.struct.MemRange[Int32, THREADS]
            first: cute.struct.MemRange[Int32, THREADS]
            count: cute.struct.MemRange[Int32, THREADS]
            warp_units: cute.struct.MemRange[Int32, WARPS]
            # What the warps of a block bring together.
            maximum: cute.struct.MemRange[Float32, WARPS]
            total: cute.struct.MemRange[Float32, WARPS]
            output: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * BAND], 16]

        self.shared_storage = SharedStorage
        self.kernel(
            partials, partial_lse, counts, work, out, lse, groups, rows, has_lse,
            output_scale,
        ).launch(
            grid=(self.blocks, 1, 1),
            block=(THREADS, 1, 1),
            smem=SharedStorage.size_in_bytes(),  # type: ignore[attr-defined]
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=SHARED_MEMORY_PERCENT,
            use_pdl=self.use_pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mPart: cute.Pointer,
        mPartLse: cute.Pointer,
        counts: cute.Pointer,
        work: cute.Pointer,
        mOut: cute.Pointer,
        mLse: cute.Pointer,
        groups: Int32,
        rows: Int32,
        has_lse: Int32,
        output_scale: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.shared_storage)
        per_split = cute.make_layout(THREADS)
        sUnit = storage.unit.get_tensor(per_split)
        sRequest = storage.request.get_tensor(per_split)
        sFirst = storage.first.get_tensor(per_split)
        sCount = storage.count.get_tensor(per_split)
        mCounts = cute.make_tensor(counts, cute.make_layout(plan.COUNTS_LEN))
        if const_expr(self.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()

        splits = mCounts[0]
        if splits > 0:
            mSplit = cute.make_tensor(
                work + 2 * (groups + 1), cute.make_layout((3, THREADS))
            )
            self.read_splits(
                storage, mSplit, sUnit, sRequest, sFirst, sCount, splits, rows, tid,
                lane, warp,
            )  # fmt: skip
            self.wait_for_decode()
            unit = block
            # The last entry is the total: fewer requests are split than threads.
            while unit < sUnit[THREADS - 1]:
                index = Int32(0)
                step = THREADS // 2
                while const_expr(step > 0):
                    if sUnit[index + step] <= unit:
                        index = index + step
                    step = step // 2
                inner = unit - sUnit[index]
                split = (sRequest[index], sFirst[index], sCount[index], rows)
                outputs = (mOut, mLse, has_lse, output_scale)
                if split[2] <= FEW_PARTIALS:
                    self.few(mPart, mPartLse, outputs, split, inner, warp, lane)
                else:
                    self.many(
                        storage, mPart, mPartLse, outputs, split, inner, warp, lane
                    )
                unit = unit + self.blocks
        else:
            # Nor end before the decode: who waits for this kernel relies on both.
            self.wait_for_decode()

    @cute.jit
    def wait_for_decode(self):
        """With programmatic launch: wait until the decode has written everything."""
        if const_expr(self.use_pdl):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def read_splits(
        self, storage, mSplit, sUnit, sRequest, sFirst, sCount, splits, rows, tid,
        lane, warp,
    ):  # fmt: skip
        """Bring the split list to shared memory, with each request's first unit."""
        sWarpUnits = storage.warp_units.get_tensor(cute.make_layout(WARPS))
        units = Int32(0)
        if tid < splits:
            first = mSplit[1, tid]
            count = mSplit[2, tid] - first + 1
            units = (rows + (ROWS_PER_FEW_UNIT - 1)) // ROWS_PER_FEW_UNIT
            if count > FEW_PARTIALS:
                units = rows * UNITS_PER_ROW
            sRequest[tid] = mSplit[0, tid]
            sFirst[tid] = first
            sCount[tid] = count
        inclusive = inclusive_scan(units, lane)
        if lane == 31:
            sWarpUnits[warp] = inclusive
        cute.arch.sync_threads()
        before = Int32(0)
        for i in cutlass.range_constexpr(WARPS):
            if i < warp:
                before = before + sWarpUnits[i]
        # Threads without a split hold the total, which no unit reaches.
        sUnit[tid] = before + inclusive - units
        cute.arch.sync_threads()

    @cute.jit
    def gather(
        self, mPart, mPartLse, split, row, column, begin, step: cutlass.Constexpr,
        bands: cutlass.Constexpr, batch: cutlass.Constexpr,
    ):  # fmt: skip
        """Weighted sum of the partials begin, begin + step, .. of a row.

        A lane owns ``VECTOR`` columns from ``column`` in each of ``bands`` bands that
        are ``BAND`` columns apart; ``batch`` partials are loaded together.

        Returns:
            Largest LSE, sum of the weights relative to it, and the weighted sum of the
            outputs (fp32 registers, ``VECTOR * bands``).

        """
        _, first, count, rows = split
        tAcc = cute.make_rmem_tensor((VECTOR * bands,), Float32)
        tAcc.fill(0.0)
        maximum = -Float32.inf
        total = Float32(0.0)
        # Lines of partials fit 32 bits: 2 x groups x rows is bounded by the device.
        line = 2 * first * rows + row
        stride = 2 * rows  # lines from one group's slots to the next group's
        outputs = mPart.toint() + PARTIAL_BYTES * column
        lses = mPartLse.toint()
        for base in cutlass.range(begin, count, step * batch, unroll=1):
            tLoad = cute.make_rmem_tensor((VECTOR * bands * batch,), Float32)
            tLse = cute.make_rmem_tensor((batch,), Float32)
            for i in cutlass.range_constexpr(batch):
                index = base + i * step
                valid = Int32(index < count)
                source = line + index * stride
                if index == 0:
                    source = line + rows
                tLse[i] = load_lse(lses + 4 * Int64(source), valid)
                address = outputs + Int64(source) * (PARTIAL_BYTES * LATENT)
                for b in cutlass.range_constexpr(bands):
                    values = load_vector(address + b * BAND * PARTIAL_BYTES, valid)
                    for v in cutlass.range_constexpr(VECTOR):
                        tLoad[VECTOR * (bands * i + b) + v] = values[v]
            newer = maximum
            for i in cutlass.range_constexpr(batch):
                newer = cutlass.max(newer, tLse[i])
            reference = finite(newer)
            factor = exp2_approx(maximum - reference)
            maximum = newer
            total = total * factor
            for j in cutlass.range_constexpr(VECTOR * bands):
                tAcc[j] = tAcc[j] * factor
            for i in cutlass.range_constexpr(batch):
                weight = exp2_approx(tLse[i] - reference)
                total = total + weight
                for j in cutlass.range_constexpr(VECTOR * bands):
                    tAcc[j] = fma(weight, tLoad[VECTOR * bands * i + j], tAcc[j])
        return maximum, total, tAcc

    @cute.jit
    def finish(self, maximum, total, output_scale):
        """LSE (log2) of a row and the factor of its weighted sum of partials."""
        lse = -Float32.inf
        factor = Float32(0.0)
        if total > 0.0:
            lse = cute.math.log2(total, fastmath=True) + maximum
            factor = output_scale * (1 / PARTIAL_SCALE) / total
        return lse, factor

    @cute.jit
    def few(self, mPart, mPartLse, outputs, split, unit, warp, lane):
        """A unit of 4 rows: this warp merges 256 columns of one."""
        mOut, mLse, has_lse, output_scale = outputs
        bands_per_row = LATENT // (BAND * FEW_BANDS)
        row = unit * ROWS_PER_FEW_UNIT + warp // bands_per_row
        column = (warp % bands_per_row) * (BAND * FEW_BANDS) + lane * VECTOR
        line = split[0] * split[3] + row  # fits 32 bits: 4096 requests of 2**17 rows
        if row < split[3]:
            maximum, total, tAcc = self.gather(
                mPart, mPartLse, split, row, column, Int32(0), 1, FEW_BANDS, FEW_BATCH
            )
            lse, factor = self.finish(maximum, total, output_scale)
            address = mOut.toint() + 2 * (Int64(line) * LATENT + column)
            for b in cutlass.range_constexpr(FEW_BANDS):
                store_words(
                    address + 2 * b * BAND,
                    pack_x2("bf16", tAcc[4 * b] * factor, tAcc[4 * b + 1] * factor),
                    pack_x2("bf16", tAcc[4 * b + 2] * factor, tAcc[4 * b + 3] * factor),
                )
            if (has_lse != 0) & (column == 0):
                (mLse + line).store(lse)

    @cute.jit
    def many(self, storage, mPart, mPartLse, outputs, split, unit, warp, lane):
        """A unit of 128 columns of one row: the warps share the partials."""
        mOut, mLse, has_lse, output_scale = outputs
        sMaximum = storage.maximum.get_tensor(cute.make_layout(WARPS))
        sTotal = storage.total.get_tensor(cute.make_layout(WARPS))
        sOutput = storage.output.get_tensor(
            cute.make_layout((BAND, WARPS), stride=(1, BAND))
        )
        row = unit // UNITS_PER_ROW
        band = (unit % UNITS_PER_ROW) * BAND
        maximum, total, tAcc = self.gather(
            mPart, mPartLse, split, row, band + lane * VECTOR, warp, WARPS, MANY_BANDS,
            MANY_BATCH,
        )  # fmt: skip
        if lane == 0:
            sMaximum[warp] = maximum
            sTotal[warp] = total
        for v in cutlass.range_constexpr(VECTOR):
            sOutput[VECTOR * lane + v, warp] = tAcc[v]
        cute.arch.sync_threads()
        column = 2 * (warp * 32 + lane)
        if column < BAND:
            maximum = -Float32.inf
            for i in cutlass.range_constexpr(WARPS):
                maximum = cutlass.max(maximum, sMaximum[i])
            reference = finite(maximum)
            total = Float32(0.0)
            low = Float32(0.0)
            high = Float32(0.0)
            for i in cutlass.range_constexpr(WARPS):
                weight = exp2_approx(sMaximum[i] - reference)
                total = fma(weight, sTotal[i], total)
                low = fma(weight, sOutput[column, i], low)
                high = fma(weight, sOutput[column + 1, i], high)
            lse, factor = self.finish(maximum, total, output_scale)
            line = split[0] * split[3] + row
            mWord = cute.make_tensor(
                mOut + (Int64(line) * LATENT + band + column) // 2, cute.make_layout(1)
            )
            mWord[0] = pack_x2("bf16", low * factor, high * factor)
            if (has_lse != 0) & (band + column == 0):
                (mLse + line).store(lse)
        cute.arch.sync_threads()


@cache
def _compile(blocks: int, use_pdl: bool):
    """The compiled function; it serves every number of rows and worker groups."""

    def pointer(dtype, align):
        return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        CombineKernel(blocks, use_pdl),
        pointer(Uint32, 16),
        pointer(Float32, 4),
        pointer(Int32, 4),
        pointer(Int32, 4),
        pointer(Uint32, 16),
        pointer(Float32, 4),
        Int32(1),
        Int32(1),
        Int32(1),
        Float32(1.0),
        make_fake_stream(),
    )


class CompiledCombine:
    """A compiled combine for one number of groups; see ``compile_combine_kernel``."""

    def __init__(self, groups: int, blocks: int, use_pdl: bool):
        plan.check_plan_shape(0, groups)
        self.groups = groups
        self.compiled = _compile(blocks, use_pdl)
        self._launch = Launcher(self.compiled, "ppppppiiifp")

    def __call__(
        self,
        partials_ptr: int,
        partial_lse_ptr: int,
        counts_ptr: int,
        work_ptr: int,
        out_ptr: int,
        lse_ptr: int | None,
        rows: int,
        output_scale: float,
        stream: int,
    ) -> None:
        """Launch on raw device addresses; nothing is checked.

        Args:
            partials_ptr: fp16 ``[2 groups, rows, 512]``, times ``PARTIAL_SCALE``,
                16-byte aligned.
            partial_lse_ptr: fp32 ``[2 groups, rows]``, log2.
            counts_ptr: int32 ``[4]`` of the plan.
            work_ptr: int32 ``[plan.work_len(groups)]`` of the plan.
            out_ptr: bf16 ``[requests * rows, 512]``, 16-byte aligned.
            lse_ptr: fp32 ``[requests * rows]``, or None to write no LSE.
            rows: Query rows of a request, heads x query length.
            output_scale: Factor of the merged output.
            stream: Handle of the CUDA stream.

        """
        has_lse = lse_ptr is not None
        self._launch(
            partials_ptr, partial_lse_ptr, counts_ptr, work_ptr, out_ptr,
            lse_ptr or 0, self.groups, rows, has_lse, output_scale, stream,
        )  # fmt: skip


@cache
def compile_combine_kernel(
    groups: int,
    num_sms: int,
    use_pdl: bool = False,
) -> CompiledCombine:
    """The combine of plans with ``groups`` worker groups, for any number of rows.

    All numbers of groups share one compilation.

    Args:
        groups: Worker groups of the plan.
        num_sms: Multiprocessors of the device; sets the size of the grid.
        use_pdl: Launch with programmatic dependent launch: its start overlaps the end
            of the decode kernel, which must be launched in that way too, and let go of
            this one only after its own wait.

    Raises:
        ValueError: A number of groups that the kernel does not serve.

    """
    return CompiledCombine(groups, num_sms * BLOCKS_PER_SM, use_pdl)
