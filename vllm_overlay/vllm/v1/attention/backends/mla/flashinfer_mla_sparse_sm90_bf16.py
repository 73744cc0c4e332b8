# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode of few rows over a bf16 latent cache on Hopper, gathered by slot.

It computes what the FP8 kernel does (``flashinfer_mla_sparse_sm90_fp8`` has the
formulas), with everything transposed as there: ``S^T = K Q^T`` and ``O^T = V^T P^T``,
so that 8 heads fill the tensor core's products. The cache needs no conversion:
``cp.async`` gathers the rows in 16-byte pieces, and ``ldmatrix`` reads K (plain) and V
(transposed) from the one copy in shared memory. Q, K, V and P are bf16, all sums fp32.
A tile is twice as large as in FP8, so tiles have fewer tokens. The grid, the splits and
their merge are in ``flashinfer_mla_sparse_sm90_decode``.
"""

import torch

from vllm.triton_utils import gl
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_decode import (
    LAUNCH_DEPENDENTS_ASM,
    MAX_SPLITS,
    NEVER_SPECIALIZE,
    SparseDecode,
    Tile,
    gather,
    jit,
    launch_control,
    next_slots,
    norm_and_lse,
    share_of_row,
    weigh,
)

_LATENT = gl.constexpr(512)


@jit
def _stage_query(
    q, head0, heads, head_stride, HB: gl.constexpr, PAIRS: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Copy HB heads of a row's query to shared memory: bf16 ``[HB, 2 * PAIRS]``.

    ``q`` points at bf16 pairs (int32), ``head_stride`` counts pairs.
    """
    regs: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32] if PAIRS >= 128 else [4, 8], [NW, 1], [1, 0]
    )
    pairs: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    values: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    head = head0 + gl.arange(0, HB, gl.SliceLayout(1, regs))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, regs))
    words = gl.load(
        q + head[:, None] * head_stride + pair[None, :],
        mask=(head < heads)[:, None],
        other=0,
    )
    shared = gl.allocate_shared_memory(gl.int32, [HB, PAIRS], pairs, words)
    return shared._reinterpret(gl.bfloat16, [HB, 2 * PAIRS], values)


@jit
def _copy_tile(
    kv, kpe, at, cache, slot, slot_pe, chunks, ROPE: gl.constexpr, copy: gl.constexpr,
    copy_pe: gl.constexpr,
):  # fmt: skip
    """Start copying one tile into stage ``at``."""
    gather(kv.index(at), cache, slot, chunks, 0, _LATENT, copy)
    if ROPE > 0:
        gather(kpe.index(at), cache, slot_pe, chunks, _LATENT, ROPE, copy_pe)


@jit
def _scores(
    acc, other, kv, q, DIM: gl.constexpr, STEP: gl.constexpr, a: gl.constexpr,
    b: gl.constexpr,
):  # fmt: skip
    """Add K Q^T over DIM values to two accumulators in turn, STEP values at a time."""
    for i in gl.static_range(DIM // STEP):
        k = kv.slice(i * STEP, STEP, dim=1).load(a)
        qt = q.slice(i * STEP, STEP, dim=1).permute((1, 0)).load(b)
        acc, other = other, gl.nvidia.ampere.mma_v2(k, qt, acc)
    return acc, other


@jit(do_not_specialize=NEVER_SPECIALIZE)
def _decode_kernel(
    q_nope,  # bf16 pairs [rows, heads, 256] as int32
    q_pe,  # bf16 pairs [rows, heads, 32] as int32
    cache,  # bf16 [slots, 512 + 64], rows 16 * chunks bytes apart
    slots,  # int32 [rows, width]
    lens,  # int32 [rows]
    out,  # bf16 pairs [rows, heads, 256] as int32
    lse,  # fp32 [rows, heads]
    part,  # fp32 [rows, splits, heads, 2, 256]: even values, odd values
    part_lse,  # fp32 [rows, splits, heads]
    qn_row, qn_head, qp_row, qp_head, chunks, slot_row,  # strides, in elements
    out_row, out_head, lse_row, lse_head, width, heads, splits, has_lse,
    scale_log2, k_scale,
    HB: gl.constexpr,  # heads of a block
    ROPE_PAIRS: gl.constexpr,
    BN: gl.constexpr,  # tokens of a tile
    NS: gl.constexpr,  # tiles in shared memory
    NW: gl.constexpr,  # warps
    DS: gl.constexpr,  # values of a tile's row that a step of Q K^T loads
    TS: gl.constexpr,  # tokens that a step of P V loads
    LANES: gl.constexpr,  # threads that copy a stretch of a row together
    SPLIT: gl.constexpr,
):  # fmt: skip
    ROPE: gl.constexpr = 2 * ROPE_PAIRS
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    copy_pe: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_head: gl.constexpr = gl.SliceLayout(0, mma)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    AHEAD: gl.constexpr = NS - 1 if NS > 1 else 1  # tiles that are under way

    if SPLIT:
        # The merge may get ready; it waits for this grid's end before it reads.
        launch_control(LAUNCH_DEPENDENTS_ASM)
    row64, head0, split, length, first, end = share_of_row(
        lens, width, heads, splits, HB, BN
    )

    top = gl.full([HB], float("-inf"), gl.float32, by_head)
    total = gl.full([BN, HB], 0.0, gl.float32, mma)
    acc = gl.full([_LATENT, HB], 0.0, gl.float32, mma)

    if first < end:
        slots += row64 * slot_row
        last = length - 1
        n = gl.arange(0, BN, gl.SliceLayout(1, copy))
        n_pe = gl.arange(0, BN, gl.SliceLayout(1, copy_pe))
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        kv = gl.allocate_shared_memory(gl.bfloat16, [NS, BN, _LATENT], swizzled)
        kpe = kv
        if ROPE > 0:
            kpe = gl.allocate_shared_memory(gl.bfloat16, [NS, BN, ROPE], swizzled)
        probs = gl.allocate_shared_memory(
            gl.bfloat16, [BN, HB], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
        )
        # The slots of the next tile to copy are loaded a tile ahead.
        slot, slot_pe = next_slots(slots, first * BN, n, n_pe, last)
        for i in gl.static_range(AHEAD):
            if first + i < end:
                _copy_tile(
                    kv, kpe, i, cache, slot, slot_pe, chunks, ROPE, copy, copy_pe
                )
            gl.nvidia.ampere.async_copy.commit_group()
            slot, slot_pe = next_slots(slots, (first + i + 1) * BN, n, n_pe, last)
        q = _stage_query(
            q_nope + row64 * qn_row, head0, heads, qn_head, HB, _LATENT // 2, NW
        )
        if ROPE > 0:
            r = _stage_query(
                q_pe + row64 * qp_row, head0, heads, qp_head, HB, ROPE_PAIRS, NW
            )
        use = 0
        fill = AHEAD % NS
        for tile in range(first, end):
            gl.nvidia.ampere.async_copy.wait_group(AHEAD - 1)
            if NS > 1:
                if tile + AHEAD < end:
                    _copy_tile(
                        kv, kpe, fill, cache, slot, slot_pe, chunks, ROPE, copy,
                        copy_pe,
                    )  # fmt: skip
                gl.nvidia.ampere.async_copy.commit_group()
                slot, slot_pe = next_slots(
                    slots, (tile + AHEAD + 1) * BN, n, n_pe, last
                )

            s = gl.full([BN, HB], 0.0, gl.float32, mma)
            s_other = gl.full([BN, HB], 0.0, gl.float32, mma)
            s, s_other = _scores(s, s_other, kv.index(use), q, _LATENT, DS, a, b)
            if ROPE > 0:
                s, s_other = _scores(s, s_other, kpe.index(use), r, ROPE, ROPE, a, b)
            token = tile * BN + gl.arange(0, BN, by_row)
            s = gl.where(
                (token < length)[:, None], (s + s_other) * scale_log2, float("-inf")
            )
            weight, top, shrink = weigh(s, top)
            probs.store(weight.to(gl.bfloat16))
            # The sum over tokens waits until the end.
            total = total * shrink[None, :] + weight
            acc = acc * shrink[None, :]
            for i in gl.static_range(BN // TS):
                vt = kv.index(use).slice(i * TS, TS, dim=0).permute((1, 0)).load(a)
                p = probs.slice(i * TS, TS, dim=0).load(b)
                acc = gl.nvidia.ampere.mma_v2(vt, p, acc)
            if NS > 1:
                use = gl.where(use == NS - 1, 0, use + 1)
                fill = gl.where(fill == NS - 1, 0, fill + 1)
            else:
                if tile + 1 < end:
                    _copy_tile(
                        kv, kpe, 0, cache, slot, slot_pe, chunks, ROPE, copy, copy_pe
                    )
                gl.nvidia.ampere.async_copy.commit_group()
                slot, slot_pe = next_slots(slots, (tile + 2) * BN, n, n_pe, last)

    norm, row_lse = norm_and_lse(total, top, k_scale)
    acc = acc * norm[None, :]
    head = head0 + gl.arange(0, HB, by_head)
    value = gl.arange(0, _LATENT, by_row)
    live = head < heads
    if SPLIT:
        at = (row64 * splits + split) * heads + head
        if first < end:
            # As the merge wants them: even values, then odd ones.
            place = value % 2 * (_LATENT // 2) + value // 2
            gl.store(part + at[None, :] * 512 + place[:, None], acc, mask=live[None, :])
        gl.store(part_lse + at, row_lse, mask=live)
    else:
        values = out.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        at = 2 * (row64 * out_row + head[None, :] * out_head) + value[:, None]
        gl.store(values + at, acc.to(gl.bfloat16), mask=live[None, :])
        at_lse = lse + row64 * lse_row + head * lse_head
        gl.store(at_lse, row_lse, mask=live & (has_lse != 0))


FEW_ROWS = 4
"""Up to here each block has one tile, so a large one is better than two."""


def choose_tile(heads: int, few: bool = False) -> Tile:
    """The measured tile for a number of heads."""
    return Tile(
        heads=8 if heads <= 8 else 16,
        tokens=64 if few else 32,
        stages=1 if few else 2,
        warps=4,
        value_bytes=2,
    )


# Tokens of a split up to so many rows, measured on an H200 with 2048 slots a row.
_SPLIT_TOKENS = {
    8: ((8, 64), (32, 256), (64, 512)),
    16: ((4, 64), (8, 128), (16, 256), (64, 512)),
}


def own_rows(heads: int) -> int:
    """Up to how many rows this kernel is faster than FlashInfer's, by measurement."""
    if heads <= 8:
        return 64
    return 16 if heads <= 16 else 0


class SparseBf16Decode(SparseDecode):
    """The decode over a bf16 cache."""

    cache_dtype = torch.bfloat16
    _choose_tile = staticmethod(choose_tile)

    @staticmethod
    def _kernel():
        return _decode_kernel

    def tile_of(self, rows: int) -> Tile:
        """The tile of a call of ``rows`` rows."""
        if self._forced_tile is not None or rows > FEW_ROWS:
            return self.tile
        return choose_tile(self.heads, few=True)

    def num_splits(self, rows: int) -> int:
        """Splits of each row's KV in a call of ``rows`` rows; never the lengths."""
        if self._forced_splits is not None:
            return self._forced_splits
        for most, tokens in _SPLIT_TOKENS[self.tile.heads]:
            if rows * self._head_blocks <= most:
                return min(cdiv(self.topk_width, tokens), MAX_SPLITS)
        return super().num_splits(rows)
