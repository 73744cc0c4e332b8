# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Output role: O^T += V^T P^T with V^T as register operand, promoted to fp32.

Two warpgroups, 256 latent columns each, as four m64 tiles. A transposed ldmatrix turns
32 tokens x 16 columns of V into two columns' bytes for pairs of tokens; a byte permute
then gives the A fragment of wgmma: fragment row r is column 2r and row r + 8 column
2r + 1 of the 16, and the K order is tokens 0, 8, 1, 9, ... (the order in which the
softmax role stores P).

FP8 wgmma keeps 13 bits of its accumulator, so every unit of 128 tokens starts from
zero and is added to fp32 registers. The usual unit does only that. A unit in which a
row's reference moved, or which holds the request's last tokens, takes a slower path:
tile by tile, accumulators times alpha, and V's bytes past the KV length masked to 0
(they may be NaN patterns, and 0 x NaN is NaN).

The divisor is the sum of the rounded probabilities, those of the product: with the sum
of the unrounded ones a row of nearly equal scores, which e4m3 rounds alike, would come
out up to 1/16 too large or too small. Four threads share a row, 16 tokens of each tile
apiece; they read P from shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..config import (
    LATENT,
    OUTPUT_M_TILES,
    PARTIAL_SCALE,
    TILE_TOKENS,
    UNIT_TILES,
    UNIT_TOKENS,
    WARPGROUP_THREADS,
)
from .ptx import ldmatrix_x4_trans, or_of_four, pack_x2, sum_e4m3x16
from .role import Role

TILE_K_STEPS = TILE_TOKENS // 32
UNIT_K_STEPS = UNIT_TOKENS // 32
LATENT_STAGE_BYTES = TILE_TOKENS * LATENT
SUM_THREADS = TILE_TOKENS // 16
"""Threads that share the row sum of one query row."""
OUTPUT_BARRIER = 1
"""Named barrier of the output warpgroups."""


class OutputRole(Role):
    """Mixin of ``DecodeKernel``: the two output warpgroups."""

    @cute.jit
    def load_v(
        self,
        tA,
        slots,
        m_tile: cutlass.Constexpr,
        offsets,
        half,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
    ):
        """Transpose ``count`` tiles' V columns of ``m_tile`` into A fragments.

        ``tA`` gets four words a k step; ``slots`` are the shared-memory addresses of
        the unit's tiles, ``offsets`` this lane's for even and for odd m tiles, ``half``
        that of the warpgroup's first column chunk, ``first`` the first of the tiles.

        """
        chunk = half + (m_tile // 2) * (TILE_TOKENS * 128)
        for i in cutlass.range_constexpr(count):
            for k in cutlass.range_constexpr(TILE_K_STEPS):
                x0, x1, x2, x3 = ldmatrix_x4_trans(
                    slots[first + i] + offsets[m_tile % 2] + chunk + k * 4096
                )
                word = 4 * (i * TILE_K_STEPS + k)
                tA[word] = Uint32(cute.arch.prmt(x0, x1, 0x6240))
                tA[word + 1] = Uint32(cute.arch.prmt(x0, x1, 0x7351))
                tA[word + 2] = Uint32(cute.arch.prmt(x2, x3, 0x6240))
                tA[word + 3] = Uint32(cute.arch.prmt(x2, x3, 0x7351))

    @cute.jit
    def mask_v(self, tA, valid, lane):
        """Zero the bytes of one tile's A words whose token is >= ``valid``."""
        for k in cutlass.range_constexpr(TILE_K_STEPS):
            for half in cutlass.range_constexpr(2):
                left = valid - (32 * k + 16 * half) - 2 * (lane % 4)
                keep = Uint32(0)
                for byte, token in ((0, 0), (1, 8), (2, 1), (3, 9)):
                    bits = Uint32(0)
                    if token < left:
                        bits = Uint32(0xFF << (8 * byte))
                    keep = keep | bits
                for row in cutlass.range_constexpr(2):
                    word = 4 * k + 2 * half + row
                    tA[word] = tA[word] & keep

    @cute.jit
    def add_row_sum(self, tTotal, address, p_tile, sums):
        """Add this thread's part of one tile of P, if it has a row to sum.

        ``address`` is that of its 16 tokens in the first tile of P.

        """
        if sums:
            tile_bytes = self.tile.rows_per_cta * TILE_TOKENS
            tTotal[0] = tTotal[0] + sum_e4m3x16(address + p_tile * tile_bytes)

    @cute.jit
    def share_inverse(self, ctx: cutlass.Constexpr, tTotal, sum_row, sums, buffer):
        """Put 1 / row sum of all rows into buffer ``buffer``, 0 for a row of zeros.

        Two buffers: a warpgroup may be a segment ahead of the other one, not two.

        """
        total = tTotal[0]
        total = total + cute.arch.shuffle_sync_bfly(total, 1)
        total = total + cute.arch.shuffle_sync_bfly(total, 2)
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
        if sums & (cute.arch.lane_idx() % SUM_THREADS == 0):
            ctx.sInverse[sum_row, buffer] = inverse
        cute.arch.barrier(
            barrier_id=OUTPUT_BARRIER, number_of_threads=2 * WARPGROUP_THREADS
        )

    @cute.jit
    def fast_unit(
        self, share: cutlass.Constexpr, slots, stages: cutlass.Constexpr, p_unit
    ):
        """A whole unit: four k steps into a temporary, then one fp32 add.

        V's first fragment is in ``tA`` already; the KV stages are released here.
        ``share`` is what all units share (``output``), ``slots`` are the addresses of
        the unit's tiles.
        """
        ctx, pv, tAcc, tTmp, tA, tP, tTotal, offsets, half, lane, sum_place = share
        _, sum_address, sums = sum_place
        tAw = cute.recast_tensor(tA, Uint32)
        split = self.tile.n_split
        size = cute.size(tTmp)
        for m in cutlass.range_constexpr(OUTPUT_M_TILES):
            for q in cutlass.range_constexpr(split):
                warpgroup.fence()
                for k in cutlass.range_constexpr(UNIT_K_STEPS):
                    mma = pv[0] if const_expr(k == 0) else pv[1]
                    cute.gemm(
                        mma,
                        tTmp,
                        tA[None, None, k],
                        tP[q][
                            None,
                            None,
                            k % TILE_K_STEPS,
                            UNIT_TILES * p_unit + k // TILE_K_STEPS,
                        ],
                        tTmp,
                    )
                warpgroup.commit_group()
                if const_expr(m + 1 == OUTPUT_M_TILES and q == 0):
                    for i in cutlass.range_constexpr(UNIT_TILES):
                        self.release_kv(ctx, stages[i])
                    for i in cutlass.range_constexpr(UNIT_TILES):
                        p_tile = UNIT_TILES * p_unit + i
                        self.add_row_sum(tTotal, sum_address, p_tile, sums)
                warpgroup.wait_group(0)
                if const_expr(m + 1 < OUTPUT_M_TILES and q + 1 == split):
                    self.load_v(tAw, slots, m + 1, offsets, half, 0, UNIT_TILES)
                for i in cutlass.range_constexpr(size):
                    tAcc[m][q * size + i] = tAcc[m][q * size + i] + tTmp[i]

    @cute.jit
    def slow_tile(
        self,
        share: cutlass.Constexpr,
        slots,
        tile: cutlass.Constexpr,
        p_unit,
        valid,
    ):
        """One tile with rescaled accumulators and V masked at ``valid`` tokens."""
        ctx, pv, tAcc, tTmp, tA, tP, tTotal, offsets, half, lane, sum_place = share
        sum_row, sum_address, sums = sum_place
        if (ctx.sFlag[sum_row // 16, p_unit] >> tile) & 1 != 0:
            tTotal[0] = tTotal[0] * ctx.sAlpha[sum_row, tile, p_unit]
        self.add_row_sum(tTotal, sum_address, UNIT_TILES * p_unit + tile, sums)
        tAw = cute.recast_tensor(tA, Uint32)
        split = self.tile.n_split
        size = cute.size(tTmp)
        blocks = size // 4
        for m in cutlass.range_constexpr(OUTPUT_M_TILES):
            self.load_v(tAw, slots, m, offsets, half, tile, 1)
            self.mask_v(tAw, valid, lane)
            for q in cutlass.range_constexpr(split):
                warpgroup.fence()
                for k in cutlass.range_constexpr(TILE_K_STEPS):
                    mma = pv[0] if const_expr(k == 0) else pv[1]
                    cute.gemm(
                        mma,
                        tTmp,
                        tA[None, None, k],
                        tP[q][None, None, k, UNIT_TILES * p_unit + tile],
                        tTmp,
                    )
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                for b in cutlass.range_constexpr(blocks):
                    block = q * blocks + b
                    moved = (ctx.sFlag[block // 2, p_unit] >> tile) & 1
                    for j in cutlass.range_constexpr(2):
                        alpha = Float32(1.0)
                        if moved != 0:
                            alpha = ctx.sAlpha[
                                block * 8 + 2 * (lane % 4) + j, tile, p_unit
                            ]
                        for h in cutlass.range_constexpr(2):
                            i = 4 * b + 2 * h + j
                            acc = tAcc[m][q * size + i]
                            tAcc[m][q * size + i] = acc * alpha + tTmp[i]

    @cute.jit
    def write_output(
        self,
        ctx: cutlass.Constexpr,
        tAcc: cutlass.Constexpr,
        mOut,
        mPart,
        request,
        total_rows,
        slot,
        row_base,
        column,
        output_scale,
        lane,
        buffer,
    ):
        """Store this thread's output: bf16 result, or fp16 partial for the combine.

        ``mOut`` holds words of two bf16, ``[requests * rows, 256]``, ``mPart`` words of
        two fp16, ``[slots, rows, 256]``, normalised and times ``PARTIAL_SCALE``;
        ``column`` is this thread's first one, even.

        """
        tile_rows = self.tile.rows_per_cta
        for b in cutlass.range_constexpr(tile_rows // 8):
            for j in cutlass.range_constexpr(2):
                local_row = b * 8 + 2 * (lane % 4) + j
                row = row_base + local_row
                inverse = ctx.sInverse[local_row, buffer]
                if row < total_rows:
                    first = 4 * b + j
                    if slot >= 0:
                        line = slot * total_rows + row
                        factor = inverse * PARTIAL_SCALE
                        self.store_row("f16", mPart, line, column, tAcc, first, factor)
                    else:
                        line = request * total_rows + row
                        factor = inverse * output_scale
                        self.store_row("bf16", mOut, line, column, tAcc, first, factor)

    @cute.jit
    def store_row(
        self,
        kind: cutlass.Constexpr,
        words,
        line,
        column,
        tAcc: cutlass.Constexpr,
        first: cutlass.Constexpr,
        factor,
    ):
        """Store this thread's part of row ``line`` times ``factor``, two values a word.

        ``first`` is the row's first accumulator in each m tile.

        """
        mWord = cute.make_tensor(
            words + (Int64(line) * (LATENT // 2) + column // 2),
            cute.make_layout(LATENT // 2),
        )
        for m in cutlass.range_constexpr(OUTPUT_M_TILES):
            mWord[32 * m] = pack_x2(
                kind, tAcc[m][first] * factor, tAcc[m][first + 2] * factor
            )

    @cute.jit
    def output(
        self,
        ctx: cutlass.Constexpr,
        pv: cutlass.Constexpr,
        mOut,
        mPart,
        seg,
        output_scale,
        row_base,
        half_index,
        tid,
    ):
        """An output warpgroup's loop over segments.

        ``row_base`` is the first row of this block within a request, ``half_index`` (0
        or 1) says which 256 latent columns this warpgroup owns.

        """
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        rows = self.tile.rows_per_cta
        split = self.tile.n_split
        thr = pv[0].get_slice(tid)
        tA = thr.make_fragment_A(thr.partition_shape_A((64, UNIT_TOKENS)))
        tAw = cute.recast_tensor(tA, Uint32)
        tTmp = thr.make_fragment_C(thr.partition_shape_C((64, rows // split)))
        tAcc = [
            cute.make_rmem_tensor((rows // 2,), Float32) for _ in range(OUTPUT_M_TILES)
        ]
        tP = [
            thr.make_fragment_B(
                thr.partition_B(
                    cute.local_tile(
                        ctx.sP,
                        (rows // split, TILE_TOKENS, self.tile.p_stages),
                        (q, 0, 0),
                    )
                )
            )
            for q in range(split)
        ]
        even = lane * 128 + ((warp ^ (lane & 7)) << 4)
        offsets = (even, even ^ 64)
        half = half_index * (OUTPUT_M_TILES // 2 * TILE_TOKENS * 128)
        column = half_index * (LATENT // 2) + warp * 16 + 2 * (lane // 4)
        index = half_index * WARPGROUP_THREADS + tid
        sums = index // SUM_THREADS < rows
        sum_row = index // SUM_THREADS % rows
        sum_address = ctx.p_base + sum_row * TILE_TOKENS + index % SUM_THREADS * 16
        tTotal = cute.make_rmem_tensor((1,), Float32)
        buffer = Int32(0)
        # What all units share.
        place = (sum_row, sum_address, sums)
        share = (ctx, pv, tAcc, tTmp, tA, tP, tTotal, offsets, half, lane, place)

        stage = Int32(0)
        phase = Int32(0)
        p_unit = Int32(0)
        p_phase = Int32(0)
        for request in cutlass.range(seg[0], seg[2], unroll=1):
            length, unit_begin, unit_end, slot = self.segment(seg, request)
            for m in cutlass.range_constexpr(OUTPUT_M_TILES):
                tAcc[m].fill(0.0)
            tTotal[0] = Float32(0.0)
            for done in cutlass.range(0, unit_end - unit_begin, unroll=1):
                unit = unit_end - 1 - done
                stage0 = stage
                cute.arch.mbarrier_wait(ctx.full + stage, phase)
                stage, phase = self.advance(stage, phase, self.tile.kv_stages)
                stage1 = stage
                cute.arch.mbarrier_wait(ctx.full + stage, phase)
                stage, phase = self.advance(stage, phase, self.tile.kv_stages)
                slots = (
                    ctx.k_base + stage0 * LATENT_STAGE_BYTES,
                    ctx.k_base + stage1 * LATENT_STAGE_BYTES,
                )
                self.load_v(tAw, slots, 0, offsets, half, 0, UNIT_TILES)
                cute.arch.mbarrier_wait(ctx.p_full + p_unit, p_phase)
                moved = cute.arch.make_warp_uniform(
                    or_of_four(ctx.flag_base + p_unit * 16)
                )
                if (moved == 0) & ((unit + 1) * UNIT_TOKENS <= length):
                    self.fast_unit(share, slots, (stage0, stage1), p_unit)
                else:
                    for i in cutlass.range_constexpr(UNIT_TILES):
                        valid = length - unit * UNIT_TOKENS - i * TILE_TOKENS
                        self.slow_tile(share, slots, i, p_unit, valid)
                    self.release_kv(ctx, stage0)
                    self.release_kv(ctx, stage1)
                self.arrive(ctx.p_empty + p_unit)
                p_unit, p_phase = self.advance(p_unit, p_phase, self.tile.p_units)
            self.share_inverse(ctx, tTotal, sum_row, sums, buffer)
            self.write_output(
                ctx,
                tAcc,
                mOut,
                mPart,
                request,
                seg[9][2],
                slot,
                row_base,
                column,
                output_scale,
                lane,
                buffer,
            )
            buffer = buffer ^ 1
