# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Producer role: streams a request's KV pages into shared memory by TMA.

One warp. Its lanes look up 32 tiles' pages at a time in the block table, one batch
ahead of the copies, so that the table's latency stays off the critical path. In a
cluster of two each block copies its half of every tile and multicasts it to both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..config import TILE_TOKENS, UNIT_TILES
from .role import Role

EVICT_FIRST = 0x12F0000000000000
"""L2 policy (CUTLASS' TMA::CacheHintSm90 encoding): KV is read once per step."""


class ProducerRole(Role):
    """Mixin of ``DecodeKernel``: the KV producer warp."""

    @cute.jit
    def lookup(self, mTable: cute.Tensor, request, end, position, block_tiles):
        """Block id and tile within the block of a segment's tile ``position``.

        Units go from the segment's last one, ``end - 1``, down; the tiles of a unit go
        up. A tile outside the segment gives an entry that is not followed; it is
        clamped only so that the read stays inside the table.
        """
        tile = UNIT_TILES * (end - 1 - position // UNIT_TILES) + position % UNIT_TILES
        tile = cutlass.max(tile, 0)
        block = tile // block_tiles
        inside = cutlass.min(block, mTable.shape[1] - 1)
        return mTable[request, inside], tile - block * block_tiles

    @cute.jit
    def produce(self, ctx: cutlass.Constexpr, tma, seg, mTable, block_tiles):
        """Copy every tile of this group's segments.

        ``tma`` is (latent atom, source, destination, rope atom, source, destination),
        partitioned for this block; ``mTable`` holds ``[requests, blocks]`` block ids
        and ``block_tiles`` is the number of 64-token tiles in a block.

        """
        atom_n, src_n, dst_n, atom_r, src_r, dst_r = tma
        lane = cute.arch.lane_idx()
        stage = Int32(0)
        phase = Int32(1)
        rope = Int32(0)
        rope_phase = Int32(1)
        policy = cutlass.Int64(EVICT_FIRST)
        for request in cutlass.range(seg[0], seg[2], unroll=1):
            # Where the plan cuts a request, its table needs no length: both loads are
            # in flight together.
            end = seg[4]
            if request != seg[3]:
                end = self.segment(seg, request)[2]
            page, slot = self.lookup(mTable, request, end, lane, block_tiles)
            length, unit_begin, _, _ = self.segment(seg, request)
            tiles = (end - unit_begin) * UNIT_TILES
            # The request's last unit may hold one tile only: then load it twice.
            twice = (end * UNIT_TILES - 1) * TILE_TOKENS >= length
            for base in cutlass.range(0, tiles, 32, unroll=1):
                next_page = page
                next_slot = slot
                if base + 32 < tiles:
                    next_page, next_slot = self.lookup(
                        mTable, request, end, base + 32 + lane, block_tiles
                    )
                for j in cutlass.range(0, cutlass.min(tiles - base, 32), unroll=1):
                    source = j
                    if twice & (base + j == 1):
                        source = Int32(0)
                    tile_page = cute.arch.shuffle_sync(page, source)
                    tile_slot = cute.arch.shuffle_sync(slot, source)
                    cute.arch.mbarrier_wait(ctx.empty + stage, phase)
                    cute.arch.mbarrier_wait(ctx.rope_empty + rope, rope_phase)
                    full = ctx.full + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            full, self.tile.kv_stage_bytes
                        )
                    if const_expr(self.tile.cluster == 2):
                        mask = cutlass.Int16(3)
                        cute.copy(
                            atom_n,
                            src_n[(None, tile_slot, tile_page)],
                            dst_n[(None, stage)],
                            tma_bar_ptr=full,
                            mcast_mask=mask,
                            cache_policy=policy,
                        )
                        cute.copy(
                            atom_r,
                            src_r[(None, tile_slot, tile_page)],
                            dst_r[(None, rope)],
                            tma_bar_ptr=full,
                            mcast_mask=mask,
                            cache_policy=policy,
                        )
                    else:
                        cute.copy(
                            atom_n,
                            src_n[(None, tile_slot, tile_page)],
                            dst_n[(None, stage)],
                            tma_bar_ptr=full,
                            cache_policy=policy,
                        )
                        cute.copy(
                            atom_r,
                            src_r[(None, tile_slot, tile_page)],
                            dst_r[(None, rope)],
                            tma_bar_ptr=full,
                            cache_policy=policy,
                        )
                    stage, phase = self.advance(stage, phase, self.tile.kv_stages)
                    rope, rope_phase = self.advance(
                        rope, rope_phase, self.tile.rope_stages
                    )
                page = next_page
                slot = next_slot
