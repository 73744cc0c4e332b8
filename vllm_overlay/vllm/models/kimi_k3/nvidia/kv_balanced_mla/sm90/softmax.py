# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Softmax role: walks the group's segments and pipelines Q K^T with the softmax.

A segment's units run from the last one down. Units that every row sees in full run with
the next tile's Q K^T in flight; a unit with masked keys runs tile by tile.
``softmax_tile.py`` has what happens to one tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..config import HEAD_DIM, TILE_TOKENS, UNIT_TILES, UNIT_TOKENS
from .softmax_tile import K_STEPS, PIECES, UNSEEN, SoftmaxTile


class SoftmaxRole(SoftmaxTile):
    """Mixin of ``DecodeKernel``: the softmax warpgroup."""

    @cute.jit
    def fast_units(
        self, score: cutlass.Constexpr, even, odd, ring: cutlass.Constexpr, units
    ):
        """``units`` (1 or more) units without masked keys.

        Each tile's softmax has the next tile's Q K^T in flight and ends when that is
        done, which costs next to nothing: its last wgmmas are issued before the last
        quarter of the exponentials. So none is in flight over the loop's back edge,
        where ptxas would make them run one by one. ``even`` and ``odd`` are the score
        fragments of the tiles of a unit.

        Returns:
            ``ring`` after the last unit.

        """
        ctx, qk, tQ, tK, tKr, tState, tLow, scale, where = score
        stage, phase, p_unit, p_phase = ring
        cute.arch.mbarrier_wait(ctx.full + stage[0], phase)
        self.issue_qk(ctx, qk, even, tQ, tK, tKr, stage, 0, K_STEPS)
        warpgroup.wait_group(0)
        self.release_tile(ctx, stage)
        ring = (stage, phase, p_unit, p_phase)
        for _ in cutlass.range(0, units - 1, unroll=1):
            flag, ring = self.overlapped_tile(score, even, odd, ring, Int32(0), 0)
            flag, ring = self.overlapped_tile(score, odd, even, ring, flag, 1)
        flag, ring = self.overlapped_tile(score, even, odd, ring, Int32(0), 0)
        stage, phase, p_unit, p_phase = ring
        flag, p_unit, p_phase = self.softmax_tile(
            ctx, odd, tState, tLow, scale, flag, p_unit, p_phase, where, 1, None
        )
        stage, phase = self.advance_tile(stage, phase)
        return stage, phase, p_unit, p_phase

    @cute.jit
    def overlapped_tile(
        self, score: cutlass.Constexpr, tS, tNext, ring, flag, i: cutlass.Constexpr
    ):
        """Softmax of ``tS`` with the next tile's Q K^T, to ``tNext``, in flight.

        ``ring`` is that of ``tS``'s tile.

        Returns:
            The unit's flag, and ``ring`` of the next tile.

        """
        ctx, qk, tQ, tK, tKr, tState, tLow, scale, where = score
        stage, phase, p_unit, p_phase = ring
        stage, phase = self.advance_tile(stage, phase)
        cute.arch.mbarrier_wait(ctx.full + stage[0], phase)
        self.issue_qk(ctx, qk, tNext, tQ, tK, tKr, stage, *PIECES[0])

        def issue(group):
            self.issue_qk(ctx, qk, tNext, tQ, tK, tKr, stage, *PIECES[group])

        flag, p_unit, p_phase = self.softmax_tile(
            ctx, tS, tState, tLow, scale, flag, p_unit, p_phase, where, i, issue
        )
        warpgroup.wait_group(0)
        self.release_tile(ctx, stage)
        return flag, (stage, phase, p_unit, p_phase)

    @cute.jit
    def sequential_unit(
        self,
        score: cutlass.Constexpr,
        tS,
        tBound,
        token0,
        ring: cutlass.Constexpr,
        masked: cutlass.Constexpr,
    ):
        """One unit, tile by tile, with or without masked keys.

        Returns:
            ``ring`` after the unit.

        """
        ctx, qk, tQ, tK, tKr, tState, tLow, scale, where = score
        stage, phase, p_unit, p_phase = ring
        flag = Int32(0)
        for i in cutlass.range_constexpr(UNIT_TILES):
            cute.arch.mbarrier_wait(ctx.full + stage[0], phase)
            self.issue_qk(ctx, qk, tS, tQ, tK, tKr, stage, 0, K_STEPS)
            warpgroup.wait_group(0)
            self.release_tile(ctx, stage)
            stage, phase = self.advance_tile(stage, phase)
            if const_expr(masked):
                flag, p_unit, p_phase = self.masked_tile(
                    ctx,
                    tS,
                    tState,
                    tBound,
                    token0 + i * TILE_TOKENS,
                    scale,
                    flag,
                    p_unit,
                    p_phase,
                    where,
                    i,
                )
            else:
                flag, p_unit, p_phase = self.softmax_tile(
                    ctx, tS, tState, tLow, scale, flag, p_unit, p_phase, where, i, None
                )
        return stage, phase, p_unit, p_phase

    @cute.jit
    def write_lse(
        self, tState, mLse, mPartLse, first_row, slot, has_lse, row0, local_row,
        total_rows,
    ):  # fmt: skip
        """Store the LSE of this thread's two rows: the request's, or a partial's.

        The sums of the unrounded probabilities make the LSE; the output role divides by
        the sums of the rounded ones, which are what it multiplies.
        """
        for i in cutlass.range_constexpr(2):
            total = tState[2 + i]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            lse = -Float32.inf
            if total > 0.0:
                lse = cute.math.log2(total, fastmath=True) + tState[i]
            row = row0 + 8 * i
            if (
                (cute.arch.lane_idx() % 4 == 0)
                & (row < total_rows)
                & (local_row + 8 * i < self.tile.rows_per_cta)
            ):
                if slot >= 0:
                    mPartLse[slot * total_rows + row] = lse
                elif has_lse != 0:
                    mLse[first_row + row] = lse

    @cute.jit
    def visible_keys(self, seg, request, length, row):
        """KV entries of this rank that query row ``row`` may see, in [0, length].

        Without DCP the global and the local length agree and the mapping is the
        identity. The bound is global first, then mapped: entry p of the request lives
        on rank ``(p // interleave) % world``.
        """
        bound = length
        if const_expr(self.causal):
            token = row // seg[9][0]
            seen = seg[6][request] - seg[9][1] + 1 + token
            world, rank, interleave = seg[7]
            seen = cutlass.max(seen, 0)
            cycle = world * interleave
            whole = seen // cycle
            part = seen - whole * cycle - rank * interleave
            part = cutlass.min(cutlass.max(part, 0), interleave)
            bound = cutlass.min(whole * interleave + part, length)
        return bound

    @cute.jit
    def softmax(
        self,
        ctx: cutlass.Constexpr,
        qk: cutlass.Constexpr,
        mQ,
        mLse,
        mPartLse,
        seg,
        scale,
        has_lse,
        row_base,
        tid,
    ):
        """The softmax warpgroup's loop over segments.

        ``row_base`` is the first row of this block within a request.

        """
        total_rows = seg[9][2]
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        thr = qk[0].get_slice(tid)
        tQ = thr.make_fragment_A(thr.partition_shape_A((64, HEAD_DIM)))
        tQw = cute.recast_tensor(tQ, Uint32)
        tK = thr.make_fragment_B(thr.partition_B(ctx.sK))
        tKr = thr.make_fragment_B(thr.partition_B(ctx.sKr))
        tA = thr.make_fragment_C(thr.partition_shape_C((64, TILE_TOKENS)))
        tB = tA
        if const_expr(self.tile.interleaved):
            tB = thr.make_fragment_C(thr.partition_shape_C((64, TILE_TOKENS)))
        tState = cute.make_rmem_tensor((4,), Float32)
        tBound = cute.make_rmem_tensor((2,), Int32)
        tLow = cute.make_rmem_tensor((1,), Int32)

        # stmatrix: lane gives the address of one 16-byte row of P (K_SW64 layout).
        p_row = warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)
        p_chunk = (lane >> 4) ^ ((p_row >> 1) & 3)
        where = (warp, lane, ctx.p_base + p_row * TILE_TOKENS + p_chunk * 16)

        # What all tiles share.
        score = (ctx, qk, tQ, tK, tKr, tState, tLow, scale, where)

        local_row = warp * 16 + lane // 4
        row0 = row_base + local_row
        row1 = row0 + 8
        stage = (Int32(0), Int32(0))
        phase = Int32(0)
        p_unit = Int32(0)
        p_phase = Int32(1)
        for request in cutlass.range(seg[0], seg[2], unroll=1):
            # The query first: its loads need no length, so they overlap that one.
            first_row = request * total_rows
            self.load_q(
                mQ,
                tQw,
                first_row + cutlass.min(row0, total_rows - 1),
                first_row + cutlass.min(row1, total_rows - 1),
                lane,
            )
            length, unit_begin, unit_end, slot = self.segment(seg, request)
            tBound[0] = self.visible_keys(
                seg, request, length, cutlass.min(row0, total_rows - 1)
            )
            tBound[1] = self.visible_keys(
                seg, request, length, cutlass.min(row1, total_rows - 1)
            )
            # Units below this one are visible to every row of the block.
            free_end = cutlass.min(
                self.visible_keys(seg, request, length, row_base) // (UNIT_TOKENS),
                unit_end,
            )
            tState[0] = Float32(UNSEEN)
            tState[1] = Float32(UNSEEN)
            tState[2] = Float32(0.0)
            tState[3] = Float32(0.0)
            tLow[0] = Int32(0)
            self.arrange_q(tQw, lane)
            # From the last unit down: a key that outweighs all others is most often
            # the first one. Met last, it scales fp32 sums down; met first, it would
            # hold its neighbours under e4m3's smallest value.
            unit = unit_end - 1
            while unit >= unit_begin:
                token0 = unit * (UNIT_TOKENS)
                ring = (stage, phase, p_unit, p_phase)
                if unit < free_end:
                    if const_expr(self.tile.interleaved):
                        stage, phase, p_unit, p_phase = self.fast_units(
                            score, tA, tB, ring, unit + 1 - unit_begin
                        )
                        unit = unit_begin - 1
                    else:
                        stage, phase, p_unit, p_phase = self.sequential_unit(
                            score, tA, tBound, token0, ring, False
                        )
                        unit = unit - 1
                else:
                    stage, phase, p_unit, p_phase = self.sequential_unit(
                        score, tA, tBound, token0, ring, True
                    )
                    unit = unit - 1

            self.write_lse(
                tState, mLse, mPartLse, first_row, slot, has_lse, row0, local_row,
                total_rows,
            )  # fmt: skip
