# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One tile of the softmax role: S = Q K^T, online softmax, P to shared memory.

A thread holds two score rows (lane / 4 and + 8 of its warp's 16) and 16 of a tile's
64 tokens. Probabilities are ``exp2(s * scale - base)`` in e4m3, where ``base`` is the
row's reference in log2 units less ``P_LOG2_HEADROOM``. The reference is lazy: it moves
only when a tile's probabilities would leave e4m3's range. It also moves down, so that
one dominant key does not push the keys after it under e4m3's smallest value; a tile
that no longer matters next to the running sum leaves it where it is.

The K order of P is the order in which a thread holds its scores (tokens 0, 8, 1, 9,
...); the output role's transposed loads of V produce the same order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..config import HEAD_DIM, LATENT, TILE_TOKENS, UNIT_TILES
from .ptx import (
    exp2_approx,
    fma,
    load_4_words,
    pack_e4m3x4,
    select,
    stmatrix_x4,
)
from .role import Role

P_LOG2_HEADROOM = 4.0
"""A row's reference key gets P = 2 ** 4; 16 such keys sum to 256 < SUM_LIMIT."""
SUM_LIMIT = 440.0
"""A thread's sum over 16 keys above this may hold a P above 448, e4m3's largest."""
LOW_SUM = 0.125
"""All four threads of a row below this: the tile uses e4m3's subnormal end."""
MAX_LOG2_RISE = 4.5
"""Move the reference up when a key lies this far (log2) above it: P reaches 362."""
ASKED_LOG2_RISE = 0.75
"""The same where a row's sum asked for it: 16 keys below that sum to less than
SUM_LIMIT, so the row does move and does not ask again."""
DOMINANT_LOG2_RISE = 7.0
"""A key this far (log2) above all before it gets DOMINANT_LOG2_HEADROOM instead: its
neighbours in the same tile are light, and need e4m3's lower end."""
DOMINANT_LOG2_HEADROOM = 8.0
"""P = 2 ** 8 = 256 of 448."""
MAX_LOG2_DROP = 7.0
"""Move the reference down when a tile's largest key lies this far below it."""
NEGLIGIBLE_LOG2 = -25.0
"""A tile whose weight is below 2 ** this of the running sum moves nothing."""
UNSEEN = -1.0e30
"""Reference of a row that has seen no key."""

K_STEPS = HEAD_DIM // 32
LATENT_K_STEPS = LATENT // 32
# Q K^T of the next tile, in pieces between the four groups of a tile's softmax: a
# warpgroup can have 8 to 9 wgmmas in flight before issuing blocks the warp.
PIECES = ((0, 6), (6, 10), (10, 14), (14, 18))


class SoftmaxTile(Role):
    """Mixin of ``DecodeKernel``: Q K^T, softmax and P of one tile."""

    @cute.jit
    def issue_qk(
        self,
        ctx: cutlass.Constexpr,
        qk: cutlass.Constexpr,
        tS,
        tQ,
        tK,
        tKr,
        stage,
        first: cutlass.Constexpr,
        last: cutlass.Constexpr,
    ):
        """Issue k steps [first, last) of one tile's S = Q K^T and commit them."""
        warpgroup.fence()
        for k in cutlass.range_constexpr(first, last):
            mma = qk[0] if const_expr(k == 0) else qk[1]
            if const_expr(k < LATENT_K_STEPS):
                cute.gemm(mma, tS, tQ[None, None, k], tK[None, None, k, stage[0]], tS)
            else:
                cute.gemm(
                    mma,
                    tS,
                    tQ[None, None, k],
                    tKr[None, None, k - LATENT_K_STEPS, stage[1]],
                    tS,
                )
        warpgroup.commit_group()

    @cute.jit
    def advance_tile(self, stage, phase):
        """Next (latent stage, rope stage) and the latent ring's phase bit."""
        latent, phase = self.advance(stage[0], phase, self.tile.kv_stages)
        rope = stage[1] + 1
        if rope == self.tile.rope_stages:
            rope = Int32(0)
        return (latent, rope), phase

    @cute.jit
    def release_tile(self, ctx: cutlass.Constexpr, stage):
        """Q K^T of a tile is done: free its rope part, and our hold on the latent."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        cluster = self.tile.cluster
        # ``rope_empty`` lies right behind ``empty``; arithmetic instead of a branch.
        to_rope = self.tile.kv_stages + stage[1] - stage[0]
        barrier = ctx.empty + (stage[0] + lane // cluster * to_rope)
        if lane < 2 * cluster:
            if const_expr(cluster == 1):
                cute.arch.mbarrier_arrive(barrier)
            else:
                cute.arch.mbarrier_arrive(barrier, lane % cluster)

    @cute.jit
    def load_q(self, mQ: cute.Pointer, tQ, row0, row1, lane):
        """Load Q from global memory; ``arrange_q`` makes it the A fragments.

        ``mQ`` holds ``[requests * rows, 144]`` words; ``row0`` and ``row1`` are this
        thread's two score rows over all requests. Lane l of a quad loads words
        16g + 4l .. 16g + 4l + 3 of both, for each g.

        """
        place = mQ.toint() + lane % 4 * 16
        rows = (place + Int64(row0) * HEAD_DIM, place + Int64(row1) * HEAD_DIM)
        for g in cutlass.range_constexpr(K_STEPS // 2):
            for row in cutlass.range_constexpr(2):
                words = load_4_words(rows[row] + 64 * g)
                for w in cutlass.range_constexpr(4):
                    tQ[8 * g + 2 * w + row] = words[w]

    @cute.jit
    def arrange_q(self, tQ, lane):
        """Transpose 4 x 4 words within each quad.

        An A fragment wants words 8k + l and 8k + 4 + l of both rows for k step k: word
        l of each of the four lanes' loads. Loading them one by one, 4 bytes a lane,
        would take four times the loads, each as long as one of 16 bytes.
        """
        upper = Int32(lane & 2)
        odd = Int32(lane & 1)
        for n in cutlass.range_constexpr(K_STEPS):
            at = [8 * (n // 2) + n % 2 + 2 * w for w in range(4)]
            a, b, c, d = [tQ[i] for i in at]
            # Halves across lanes l and l ^ 2, then words across l and l ^ 1.
            first = cute.arch.shuffle_sync_bfly(select(upper, a, c), 2)
            second = cute.arch.shuffle_sync_bfly(select(upper, b, d), 2)
            low = (select(upper, first, a), select(upper, second, b))
            high = (select(upper, c, first), select(upper, d, second))
            first = cute.arch.shuffle_sync_bfly(select(odd, low[0], low[1]), 1)
            second = cute.arch.shuffle_sync_bfly(select(odd, high[0], high[1]), 1)
            tQ[at[0]] = select(odd, first, low[0])
            tQ[at[1]] = select(odd, low[1], first)
            tQ[at[2]] = select(odd, second, high[0])
            tQ[at[3]] = select(odd, high[1], second)

    @cute.jit
    def exponentials(self, tS, tState, tSum, tWord, scale, group: cutlass.Constexpr):
        """P of 16 tokens: sums into ``tSum``, e4m3 words into ``tWord``."""
        p = [
            exp2_approx(fma(tS[8 * group + i], scale, -tState[(i >> 1) & 1]))
            for i in range(8)
        ]
        tSum[0] = tSum[0] + ((p[0] + p[1]) + (p[4] + p[5]))
        tSum[1] = tSum[1] + ((p[2] + p[3]) + (p[6] + p[7]))
        tWord[2 * group] = pack_e4m3x4(p[0], p[4], p[1], p[5])
        tWord[2 * group + 1] = pack_e4m3x4(p[2], p[6], p[3], p[7])

    @cute.jit
    def tile_max(self, tS, row: cutlass.Constexpr):
        """Largest score of the thread's row ``row`` over the tile's 64 tokens."""
        high = tS[2 * row]
        for i in cutlass.range_constexpr(TILE_TOKENS // 8):
            for j in cutlass.range_constexpr(2):
                high = cute.arch.fmax(high, tS[4 * i + 2 * row + j])
        high = cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, 1))
        return cute.arch.fmax(high, cute.arch.shuffle_sync_bfly(high, 2))

    @cute.jit
    def move_reference(self, tS, tState, tAlpha, scale, most_rise: cutlass.Constexpr):
        """Choose the references for this tile; ``tAlpha`` gets the rescale factors.

        ``tState`` is ``[base 0, base 1, sum 0, sum 1]``. Returns 1 if accumulators of
        this thread's rows must be multiplied by alpha, else 0: those of a row that has
        seen no key yet are zero.
        """
        moved = Int32(0)
        for row in cutlass.range_constexpr(2):
            tAlpha[row] = Float32(1.0)
            top = self.tile_max(tS, row) * scale - P_LOG2_HEADROOM
            base = tState[row]
            total = tState[2 + row]
            total = total + cute.arch.shuffle_sync_bfly(total, 1)
            total = total + cute.arch.shuffle_sync_bfly(total, 2)
            rise = top - base
            # 64 keys at most as heavy as the tile's largest one: 2 ** (rise + 4 + 6).
            weight = rise + (P_LOG2_HEADROOM + 6.0 - NEGLIGIBLE_LOG2)
            matters = exp2_approx(weight) > total
            if (rise > most_rise) | ((rise < -MAX_LOG2_DROP) & matters):  # noqa: SIM102
                if top > UNSEEN:
                    if base > UNSEEN:
                        moved = Int32(1)
                        if rise > DOMINANT_LOG2_RISE:
                            top = top - (DOMINANT_LOG2_HEADROOM - P_LOG2_HEADROOM)
                    alpha = exp2_approx(base - top)
                    tAlpha[row] = alpha
                    tState[row] = top
                    tState[2 + row] = tState[2 + row] * alpha
        return moved

    @cute.jit
    def store_p(
        self, ctx: cutlass.Constexpr, tWord, p_unit, where, i: cutlass.Constexpr
    ):
        """Store tile ``i`` of a unit's P."""
        warp, _, p_address = where
        rows = self.tile.rows_per_cta
        if warp * 16 < rows:
            address = p_address + (UNIT_TILES * p_unit + i) * (rows * TILE_TOKENS)
            stmatrix_x4(address, tWord[0], tWord[1], tWord[2], tWord[3])
            stmatrix_x4(address ^ 32, tWord[4], tWord[5], tWord[6], tWord[7])

    @cute.jit
    def store_alpha(
        self, ctx: cutlass.Constexpr, tAlpha, moved, p_unit, where, i: cutlass.Constexpr
    ):
        """Store the rescale factors of tile ``i`` if a row of this warp moved.

        Returns:
            The tile's bit of the warp's flag: ``1 << i`` if a row moved, else 0.

        """
        warp, lane, _ = where
        bit = Int32(0)
        if cute.arch.vote_any_sync(moved != 0):
            bit = Int32(1 << i)
            if lane % 4 == 0:
                row = warp * 16 + lane // 4
                ctx.sAlpha[row, i, p_unit] = tAlpha[0]
                ctx.sAlpha[row + 8, i, p_unit] = tAlpha[1]
        return bit

    @cute.jit
    def publish(self, ctx: cutlass.Constexpr, flag, p_unit, p_phase, where):
        """Hand a unit's P, flag and factors to the output warpgroups."""
        warp, lane, _ = where
        if lane == 0:
            ctx.sFlag[warp, p_unit] = flag
        cute.arch.fence_proxy("async.shared", space="cta")
        self.arrive(ctx.p_full + p_unit)
        return self.advance(p_unit, p_phase, self.tile.p_units)

    @cute.jit
    def row_is_low(self, tSum):
        """1 if some row of the warp has tiny sums in all its four threads, else 0."""
        seen0 = cute.arch.vote_ballot_sync(tSum[0] >= LOW_SUM)
        seen1 = cute.arch.vote_ballot_sync(tSum[1] >= LOW_SUM)
        seen0 = (seen0 | (seen0 >> 1)) & 0x33333333
        seen1 = (seen1 | (seen1 >> 1)) & 0x33333333
        seen = (seen0 | (seen0 >> 2)) & (seen1 | (seen1 >> 2)) & 0x11111111
        return Int32(seen != 0x11111111)

    @cute.jit
    def softmax_tile(
        self,
        ctx: cutlass.Constexpr,
        tS,
        tState,
        tLow,
        scale,
        flag,
        p_unit,
        p_phase,
        where,
        i: cutlass.Constexpr,
        nxt: cutlass.Constexpr,
    ):
        """Softmax of tile ``i`` of a unit without masked keys.

        ``nxt(group)`` issues a piece of the next Q K^T. The reference moves at once
        when P overflows e4m3, and from the next unit on (``tLow``) when it is low.

        Returns:
            The unit's flag, P buffer and its phase for the next tile.

        """
        tSum = cute.make_rmem_tensor((2,), Float32)
        tWord = cute.make_rmem_tensor((8,), Uint32)
        tSum.fill(0.0)
        for group in cutlass.range_constexpr(4):
            if const_expr(nxt is not None and group > 0):
                nxt(group)
            self.exponentials(tS, tState, tSum, tWord, scale, group)
        high = cute.arch.vote_any_sync((tSum[0] > SUM_LIMIT) | (tSum[1] > SUM_LIMIT))
        if const_expr(i == 0):
            cute.arch.mbarrier_wait(ctx.p_empty + p_unit, p_phase)
            flag = Int32(0)
        self.store_p(ctx, tWord, p_unit, where, i)
        redo = high
        if const_expr(i == 0):
            redo = high | (tLow[0] != 0)
        if redo:
            tAlpha = cute.make_rmem_tensor((2,), Float32)
            moved = self.move_reference(tS, tState, tAlpha, scale, ASKED_LOG2_RISE)
            tSum.fill(0.0)
            for group in cutlass.range_constexpr(4):
                self.exponentials(tS, tState, tSum, tWord, scale, group)
            self.store_p(ctx, tWord, p_unit, where, i)
            flag = flag | self.store_alpha(ctx, tAlpha, moved, p_unit, where, i)
        tState[2] = tState[2] + tSum[0]
        tState[3] = tState[3] + tSum[1]
        if const_expr(i + 1 == UNIT_TILES):
            p_unit, p_phase = self.publish(ctx, flag, p_unit, p_phase, where)
            tLow[0] = self.row_is_low(tSum)
        return flag, p_unit, p_phase

    @cute.jit
    def masked_tile(
        self,
        ctx: cutlass.Constexpr,
        tS,
        tState,
        tBound,
        token0,
        scale,
        flag,
        p_unit,
        p_phase,
        where,
        i: cutlass.Constexpr,
    ):
        """Softmax of a tile in which row r sees tokens below ``tBound[r]`` only."""
        _, lane, _ = where
        tSum = cute.make_rmem_tensor((2,), Float32)
        tWord = cute.make_rmem_tensor((8,), Uint32)
        tAlpha = cute.make_rmem_tensor((2,), Float32)
        tSum.fill(0.0)
        for n in cutlass.range_constexpr(TILE_TOKENS // 8):
            for row in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(2):
                    token = token0 + 8 * n + j + 2 * (lane % 4)
                    if token >= tBound[row]:
                        tS[4 * n + 2 * row + j] = -Float32.inf
        moved = self.move_reference(tS, tState, tAlpha, scale, MAX_LOG2_RISE)
        for group in cutlass.range_constexpr(4):
            self.exponentials(tS, tState, tSum, tWord, scale, group)
        if const_expr(i == 0):
            cute.arch.mbarrier_wait(ctx.p_empty + p_unit, p_phase)
            flag = Int32(0)
        self.store_p(ctx, tWord, p_unit, where, i)
        flag = flag | self.store_alpha(ctx, tAlpha, moved, p_unit, where, i)
        tState[2] = tState[2] + tSum[0]
        tState[3] = tState[3] + tSum[1]
        if const_expr(i + 1 == UNIT_TILES):
            p_unit, p_phase = self.publish(ctx, flag, p_unit, p_phase, where)
        return flag, p_unit, p_phase
