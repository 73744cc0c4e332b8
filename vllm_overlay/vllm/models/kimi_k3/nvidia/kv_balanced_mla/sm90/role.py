# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the roles of the decode kernel share: shared memory, rings, segments.

The roles name things alike. Tensors start with the letter of their space (m global,
s shared, t register):

    ctx         the block's shared memory (``SharedMemory``)
    seg         the group's stretch: first request, its first unit, one past the last
                request visited, request and unit of the end boundary, lengths on this
                rank, lengths over all ranks, (DCP world, rank, interleave), group,
                (heads, query tokens, rows)
    stage       latent stage of one 64-token tile, in the softmax role (latent stage,
                rope stage); ``phase`` the latent barrier's phase bit
    p_unit      buffer of one unit's P; ``p_phase`` likewise
    ring        (stage, phase, p_unit, p_phase)
    tS          scores of one tile, 32 fp32 a thread: column pair, row, group of 8
    tState      [base 0, base 1, sum 0, sum 1]: log2 reference and row sums
    tLow        1 if the last unit's P was too small for e4m3's normal range
    tQ, tK, tKr wgmma fragments of the query, the latent and the rope part of the keys
    where       (warp of the warpgroup, lane, shared-memory address of its P row)
    score       what all tiles of the softmax role share: (shared memory, qk, tQ, tK,
                tKr, tState, tLow, scale, where)
    qk, pv      (overwriting, accumulating) tiled MMA
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..config import UNIT_TOKENS, DecodeTile


@dataclass(frozen=True)
class SharedMemory:
    """The block's shared memory as the roles see it: barriers, tensors, addresses."""

    full: Any
    empty: Any
    rope_empty: Any
    p_full: Any
    p_empty: Any
    sAlpha: Any
    sFlag: Any
    sInverse: Any
    sP: Any
    sK: Any
    sKr: Any
    p_base: Any
    k_base: Any
    flag_base: Any


class Role:
    """Base of the role mixins: compile-time facts and the helpers of every role."""

    every_lane_arrives = False
    """For race checkers, which follow a barrier only for the threads that arrive at
    it. Otherwise one lane arrives for its warp, after a warp barrier."""

    def __init__(self, tile: DecodeTile, causal: bool) -> None:
        self.tile = tile
        self.causal = causal

    @property
    def arrivals_per_warp(self) -> int:
        """Arrivals of one warp at a barrier of the probabilities."""
        return 32 if self.every_lane_arrives else 1

    @cute.jit
    def arrive(self, barrier):
        """This warp arrives at a barrier of the probabilities."""
        cute.arch.sync_warp()
        lanes = 32 if const_expr(self.every_lane_arrives) else 1
        if cute.arch.lane_idx() < lanes:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def advance(self, stage, phase, stages: cutlass.Constexpr):
        """Next stage of a ring of ``stages`` and its phase bit."""
        stage = stage + 1
        if stage == stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def segment(self, seg, request):
        """This group's piece of ``request``: KV length, units, partial slot or -1."""
        first, first_unit, _, last, last_unit, mLens, _, _, group, _ = seg
        length = cutlass.max(mLens[request], 0)
        units = (length + (UNIT_TOKENS - 1)) // UNIT_TOKENS
        begin = Int32(0)
        end = units
        if request == first:
            begin = first_unit
        if request == last:
            end = last_unit
        slot = Int32(-1)
        if begin > 0:
            slot = 2 * group
        elif end < units:
            slot = 2 * group + 1
        return length, begin, end, slot

    @cute.jit
    def release_kv(self, ctx: cutlass.Constexpr, stage):
        """This warp is done with a KV stage: tell the producers of the cluster."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if const_expr(self.tile.cluster == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(ctx.empty + stage)
        else:
            if lane < self.tile.cluster:
                cute.arch.mbarrier_arrive(ctx.empty + stage, lane)
