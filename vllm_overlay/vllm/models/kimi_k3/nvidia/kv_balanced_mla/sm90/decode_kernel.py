# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV-balanced split-KV MLA decode on Hopper: the main kernel.

For each query row i of request r, over the KV entries it may see:

    s = q_i . k * scale              (FP8 x FP8, fp32 accumulation over 576)
    o_i = sum(2^s v) / sum(2^s)      (P rounded to e4m3, FP8 products in units of 128
                                      tokens, promoted to fp32)
    lse_i = log2(sum(2^s))

Grid: ``groups x row_chunks`` clusters of one or two thread blocks. A group walks one
contiguous stretch of the plan's line of (request, unit) pairs; its row chunks walk the
same KV for different rows. A whole request is written to ``out``; a piece of one goes
to the partial slots that the combine kernel merges.

Roles (512 threads): warp 0 producer, warps 4-7 softmax, warps 8-11 and 12-15 output.

    barrier     arrivals          from -> to
    full        1 + bytes         TMA -> softmax, output (one a latent stage)
    empty       12 x cluster      softmax, output warps of both blocks -> producer
    rope_empty  4 x cluster       softmax warps of both blocks -> producer
    p_full      4                 softmax warps -> output (one a unit's P)
    p_empty     8                 output warps -> softmax

A row that sees nothing gets output 0 and LSE -inf; a request of length 0 is visited by
one group, which writes that.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..config import (
    HEAD_DIM,
    LATENT,
    NUM_THREADS,
    PRODUCER_REGISTERS,
    ROPE,
    TILE_TOKENS,
    UNIT_TILES,
    WARPGROUP_THREADS,
    DecodeTile,
)
from .output import OutputRole
from .producer import ProducerRole
from .role import SharedMemory
from .softmax import SoftmaxRole

FP8 = cutlass.Float8E4M3FN
OUTPUT_WARPS = 8
SOFTMAX_WARPS = 4


class DecodeKernel(ProducerRole, SoftmaxRole, OutputRole):
    """One compiled tile; heads and query tokens are run-time values."""

    def __init__(self, tile: DecodeTile, causal: bool):
        super().__init__(tile, causal)
        self.shared_storage: Any = None
        self.entry_registers = 65536 // NUM_THREADS // 8 * 8

    def mma_pair(self, n: int):
        """``(overwriting, accumulating)`` m64 ``n`` k32 FP8 MMAs, A in registers.

        Setting the field on one object inside a loop or branch would leave a value
        behind that other branches must not use.
        """
        pair = tuple(
            sm90_utils.make_trivial_tiled_mma(
                FP8,
                FP8,
                OperandMajorMode.K,
                OperandMajorMode.K,
                Float32,
                (1, 1, 1),
                (64, n),
                warpgroup.OperandSource.RMEM,
            )
            for _ in range(2)
        )
        for mma, accumulate in zip(pair, (False, True)):
            mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return pair

    def storage(self, k_layout, kr_layout, p_layout) -> Any:
        """The block's shared memory, as a struct of the DSL."""
        tile = self.tile
        stages = tile.kv_stages

        @cute.struct
        class SharedStorage:
            full: cute.struct.MemRange[Int64, stages]
            # The latents' stages, then the rope parts'.
            empty: cute.struct.MemRange[Int64, stages + tile.rope_stages]
            p_full: cute.struct.MemRange[Int64, tile.p_units]
            p_empty: cute.struct.MemRange[Int64, tile.p_units]
            alpha: cute.struct.MemRange[Float32, 64 * tile.p_stages]
            flags: cute.struct.Align[
                cute.struct.MemRange[Int32, SOFTMAX_WARPS * tile.p_units], 16
            ]
            inverse: cute.struct.MemRange[Float32, 2 * 64]
            p: cute.struct.Align[cute.struct.MemRange[FP8, cute.cosize(p_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[FP8, cute.cosize(k_layout)], 1024]
            kr: cute.struct.Align[
                cute.struct.MemRange[FP8, cute.cosize(kr_layout)], 1024
            ]

        return SharedStorage

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        cache: cute.Pointer,
        table: cute.Pointer,
        lens: cute.Pointer,
        causal_lens: cute.Pointer,
        work: cute.Pointer,
        partials: cute.Pointer,
        partial_lse: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        num_blocks: Int32,
        block_size: Int32,
        block_stride: Int64,
        table_stride: Int32,
        table_width: Int32,
        groups: Int32,
        heads: Int32,
        qlen: Int32,
        row_chunks: Int32,
        has_lse: Int32,
        cp_world: Int32,
        cp_rank: Int32,
        cp_interleave: Int32,
        scale_log2: Float32,
        output_scale: Float32,
        stream: cuda.CUstream,
    ):
        """Launch. Pointers are device addresses; see ``core.KvBalancedMla.decode``."""
        tile = self.tile
        stages, cluster = tile.kv_stages, tile.cluster
        rope_stages = tile.rope_stages
        block_stride = cute.assume(block_stride, divby=16)
        mK = cute.make_tensor(
            cache,
            cute.make_layout(
                (block_size, LATENT, num_blocks), stride=(HEAD_DIM, 1, block_stride)
            ),
        )
        mKr = cute.make_tensor(
            cache + LATENT,
            cute.make_layout(
                (block_size, ROPE, num_blocks), stride=(HEAD_DIM, 1, block_stride)
            ),
        )
        mTable = cute.make_tensor(
            table, cute.make_layout((1 << 20, table_width), stride=(table_stride, 1))
        )
        kinds = warpgroup.SmemLayoutAtomKind
        wide = warpgroup.make_smem_layout_atom(kinds.K_SW128, FP8)
        narrow = warpgroup.make_smem_layout_atom(kinds.K_SW64, FP8)
        k_layout = cute.tile_to_shape(wide, (TILE_TOKENS, LATENT, stages), (0, 1, 2))
        kr_layout = cute.tile_to_shape(
            narrow, (TILE_TOKENS, ROPE, rope_stages), (0, 1, 2)
        )
        p_layout = cute.tile_to_shape(
            narrow, (tile.rows_per_cta, TILE_TOKENS, tile.p_stages), (0, 1, 2)
        )
        if const_expr(cluster == 2):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        else:
            load = cpasync.CopyBulkTensorTileG2SOp()
        k_atom, k_source = cpasync.make_tiled_tma_atom(
            load,
            mK,
            cute.slice_(k_layout, (None, None, 0)),
            (TILE_TOKENS, LATENT),
            num_multicast=cluster,
        )
        kr_atom, kr_source = cpasync.make_tiled_tma_atom(
            load,
            mKr,
            cute.slice_(kr_layout, (None, None, 0)),
            (TILE_TOKENS, ROPE),
            num_multicast=cluster,
        )

        self.shared_storage = self.storage(k_layout, kr_layout, p_layout)
        self.kernel(
            k_atom,
            k_source,
            kr_atom,
            kr_source,
            k_layout,
            kr_layout,
            p_layout,
            q,
            mTable,
            lens,
            causal_lens,
            work,
            partials,
            partial_lse,
            out,
            lse,
            block_size // TILE_TOKENS,
            heads,
            qlen,
            row_chunks,
            has_lse,
            cp_world,
            cp_rank,
            cp_interleave,
            scale_log2,
            output_scale,
        ).launch(
            grid=(groups * row_chunks * cluster, 1, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(cluster, 1, 1),
            smem=self.shared_storage.size_in_bytes(),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        k_atom: cute.CopyAtom,
        k_source: cute.Tensor,
        kr_atom: cute.CopyAtom,
        kr_source: cute.Tensor,
        k_layout: cute.ComposedLayout,
        kr_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        mQ: cute.Pointer,
        mTable: cute.Tensor,
        mLens: cute.Pointer,
        mCausalLens: cute.Pointer,
        mWork: cute.Pointer,
        mPart: cute.Pointer,
        mPartLse: cute.Pointer,
        mOut: cute.Pointer,
        mLse: cute.Pointer,
        block_tiles: Int32,
        heads: Int32,
        qlen: Int32,
        row_chunks: Int32,
        has_lse: Int32,
        cp_world: Int32,
        cp_rank: Int32,
        cp_interleave: Int32,
        scale_log2: Float32,
        output_scale: Float32,
    ):
        tile = self.tile
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warpgroup_index = cute.arch.make_warp_uniform(tid // WARPGROUP_THREADS)
        warp = cute.arch.make_warp_uniform(tid // 32)
        rank = Int32(0)
        if const_expr(tile.cluster == 2):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        worker = block // tile.cluster
        group = worker // row_chunks
        chunk = worker - group * row_chunks
        row_base = (chunk * tile.cluster + rank) * tile.rows_per_cta

        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.shared_storage)
        ctx = self.view(storage, k_layout, kr_layout, p_layout)
        if tid == 0:
            self.init_barriers(ctx)
        if warp == 0:
            cpasync.prefetch_descriptor(k_atom)
            cpasync.prefetch_descriptor(kr_atom)
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        # Programmatic launch: everything before this overlaps the kernel in front,
        # and the combine may get ready while this one runs.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # ``seg`` of role.py.
        mBounds = cute.make_tensor(mWork + 2 * group, cute.make_layout(4))
        last = mBounds[2]
        last_unit = mBounds[3]
        end = last
        if last_unit > 0:
            end = last + 1
        lens = cute.make_tensor(mLens, cute.make_layout(1 << 20))
        causal = cute.make_tensor(mCausalLens, cute.make_layout(1 << 20))
        seg = (
            mBounds[0],
            mBounds[1],
            end,
            last,
            last_unit,
            lens,
            causal,
            (cp_world, cp_rank, cp_interleave),
            group,
            (heads, qlen, heads * qlen),
        )
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                latent = self.partition(k_atom, k_source, ctx.sK, LATENT, rank)
                rope = self.partition(kr_atom, kr_source, ctx.sKr, ROPE, rank)
                self.produce(ctx, latent + rope, seg, mTable, block_tiles)
        elif warpgroup_index == 1:
            if const_expr(tile.softmax_registers > self.entry_registers):
                cute.arch.setmaxregister_increase(tile.softmax_registers)
            else:
                cute.arch.setmaxregister_decrease(tile.softmax_registers)
            self.softmax(
                ctx,
                self.mma_pair(TILE_TOKENS),
                mQ,
                mLse,
                mPartLse,
                seg,
                scale_log2,
                has_lse,
                row_base,
                tid % WARPGROUP_THREADS,
            )
        else:
            if const_expr(tile.output_registers > self.entry_registers):
                cute.arch.setmaxregister_increase(tile.output_registers)
            else:
                cute.arch.setmaxregister_decrease(tile.output_registers)
            self.output(
                ctx,
                self.mma_pair(tile.rows_per_cta // tile.n_split),
                mOut,
                mPart,
                seg,
                output_scale,
                row_base,
                warpgroup_index - 2,
                tid % WARPGROUP_THREADS,
            )
        # No block may leave while its peer can still write or arrive here.
        self.sync_cluster()

    @cute.jit
    def view(self, storage, k_layout, kr_layout, p_layout):
        """What the roles see of the shared memory."""
        tile = self.tile
        return SharedMemory(
            full=storage.full.data_ptr(),
            empty=storage.empty.data_ptr(),
            rope_empty=storage.empty.data_ptr() + tile.kv_stages,
            p_full=storage.p_full.data_ptr(),
            p_empty=storage.p_empty.data_ptr(),
            sAlpha=storage.alpha.get_tensor(
                cute.make_layout((64, UNIT_TILES, tile.p_units))
            ),
            sFlag=storage.flags.get_tensor(
                cute.make_layout(
                    (SOFTMAX_WARPS, tile.p_units), stride=(1, SOFTMAX_WARPS)
                )
            ),
            sInverse=storage.inverse.get_tensor(cute.make_layout((64, 2))),
            sP=storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            sK=storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner),
            sKr=storage.kr.get_tensor(kr_layout.outer, swizzle=kr_layout.inner),
            p_base=Int32(storage.p.data_ptr().toint()),
            k_base=Int32(storage.k.data_ptr().toint()),
            flag_base=Int32(storage.flags.data_ptr().toint()),
        )

    @cute.jit
    def partition(self, atom, source, destination, width: cutlass.Constexpr, rank):
        """This block's share of a TMA copy: atom, source, destination."""
        tiles = cute.local_tile(source, (TILE_TOKENS, width), (None, 0, None))
        dst, src = cpasync.tma_partition(
            atom,
            rank,
            cute.make_layout(self.tile.cluster),
            cute.group_modes(destination, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        return atom, src, dst

    @cute.jit
    def init_barriers(self, ctx: cutlass.Constexpr):
        """Set up every barrier; for one thread."""
        tile = self.tile
        consumers = (SOFTMAX_WARPS + OUTPUT_WARPS) * tile.cluster
        for i in cutlass.range_constexpr(tile.kv_stages):
            cute.arch.mbarrier_init(ctx.full + i, 1)
            cute.arch.mbarrier_init(ctx.empty + i, consumers)
        for i in cutlass.range_constexpr(tile.rope_stages):
            cute.arch.mbarrier_init(ctx.rope_empty + i, SOFTMAX_WARPS * tile.cluster)
        for i in cutlass.range_constexpr(tile.p_units):
            cute.arch.mbarrier_init(
                ctx.p_full + i, SOFTMAX_WARPS * self.arrivals_per_warp
            )
            cute.arch.mbarrier_init(
                ctx.p_empty + i, OUTPUT_WARPS * self.arrivals_per_warp
            )

    @cute.jit
    def sync_cluster(self):
        """Barrier over the cluster (over the block when it stands alone)."""
        if const_expr(self.tile.cluster == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
