# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode over an FP8 (e4m3) latent cache on Hopper, gathered by slot.

For query row r, head h and the slots ``slots[r, :lens[r]]`` (``scale`` is the softmax
scale times ``k_scale``):

    s_n = q[r, h] . kv[slot_n] * scale              (512 latent + 64 rope values)
    o   = k_scale * sum_n 2^(s_n log2 e) latent[slot_n] / sum_n 2^(s_n log2 e)
    lse = log2(sum_n 2^(s_n log2 e))

Everything is transposed so that tokens and latent values, not the few heads, fill the
16 rows of the tensor core's m16n8k16: ``S^T = K Q^T`` and ``O^T = V^T P^T``. With 8
heads nothing is padded.

The cache is moved and read as 16-bit words, each a pair of neighbouring e4m3 values:
``cp.async`` gathers a row in 16-byte pieces, ``ldmatrix`` (plain for K, transposed for
V) brings the words into the operand layout of a 16-bit MMA, and there one word becomes
an even and an odd value in f16, which holds every e4m3 value exactly. So one copy of
the tile in shared memory, in FP8, serves both products, and each is the sum of an even
and an odd half. P is f16 too; all sums are fp32.

The grid, the splits and their merge are in ``flashinfer_mla_sparse_sm90_decode``.
"""

import torch

from vllm.triton_utils import gl
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_decode import (
    LAUNCH_DEPENDENTS_ASM,
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

LATENT_PAIRS = gl.constexpr(256)

# One 32-bit register holds the words of two neighbours along the product's inner
# dimension: bytes (even, odd, even, odd). Sort them, then convert pair by pair.
_UNPACK_ASM = gl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)


@jit
def _unpack(words):
    """The even (low byte) and odd (high byte) e4m3 values of 16-bit words, as f16."""
    return gl.inline_asm_elementwise(
        _UNPACK_ASM, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True,
        pack=2,
    )  # fmt: skip


@jit
def _stage_query(
    q, head0, heads, head_stride, HB: gl.constexpr, PAIRS: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Copy HB heads of a row's query to shared memory, even and odd values apart.

    ``q`` points at bf16 pairs (int32), ``head_stride`` counts pairs. Returns two f16
    buffers ``[HB, PAIRS]``.
    """
    wide: gl.constexpr = PAIRS >= 128
    regs: gl.constexpr = gl.BlockedLayout(
        [1, 4], [1, 32] if wide else [4, 8], [NW, 1], [1, 0]
    )
    shared: gl.constexpr = gl.SwizzledSharedLayout(
        8, 1 if wide else 2, 8 if wide else 4, [1, 0]
    )
    head = head0 + gl.arange(0, HB, gl.SliceLayout(1, regs))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, regs))
    words = gl.load(
        q + head[:, None] * head_stride + pair[None, :],
        mask=(head < heads)[:, None],
        other=0,
    )
    even = (words << 16).to(gl.float32, bitcast=True).to(gl.float16)
    odd = (words & -65536).to(gl.float32, bitcast=True).to(gl.float16)
    return (
        gl.allocate_shared_memory(gl.float16, [HB, PAIRS], shared, even),
        gl.allocate_shared_memory(gl.float16, [HB, PAIRS], shared, odd),
    )


@jit
def _copy_tile(
    kv, kpe, at, cache, slot, slot_pe, chunks, ROPE_PAIRS: gl.constexpr,
    copy: gl.constexpr, copy_pe: gl.constexpr,
):  # fmt: skip
    """Start copying one tile into stage ``at``."""
    gather(kv.index(at), cache, slot, chunks, 0, LATENT_PAIRS, copy)
    if ROPE_PAIRS > 0:
        gather(kpe.index(at), cache, slot_pe, chunks, LATENT_PAIRS, ROPE_PAIRS, copy_pe)


@jit
def _scores(
    even_acc, odd_acc, kv, q_even, q_odd, PAIRS: gl.constexpr, STEP: gl.constexpr,
    a: gl.constexpr, b: gl.constexpr,
):  # fmt: skip
    """Add K Q^T over PAIRS words to the two accumulators, STEP words at a time."""
    for i in gl.static_range(PAIRS // STEP):
        even, odd = _unpack(kv.slice(i * STEP, STEP, dim=1).load(a))
        q = q_even.slice(i * STEP, STEP, dim=1).permute((1, 0)).load(b)
        even_acc = gl.nvidia.ampere.mma_v2(even, q, even_acc)
        q = q_odd.slice(i * STEP, STEP, dim=1).permute((1, 0)).load(b)
        odd_acc = gl.nvidia.ampere.mma_v2(odd, q, odd_acc)
    return even_acc, odd_acc


@jit(do_not_specialize=NEVER_SPECIALIZE)
def _decode_kernel(
    q_nope,  # bf16 pairs [rows, heads, 256] as int32
    q_pe,  # bf16 pairs [rows, heads, 32] as int32
    cache,  # e4m3 pairs [slots, 256 + 32] as int16, rows 16 * chunks bytes apart
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
    DS: gl.constexpr,  # words of a tile's row that a step of Q K^T converts
    TS: gl.constexpr,  # tokens that a step of P V converts
    LANES: gl.constexpr,  # threads that copy a stretch of a row together
    SPLIT: gl.constexpr,
):  # fmt: skip
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [NW, 1], [1, 0])
    copy_pe: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [NW, 1], [1, 0])
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
    even_out = gl.full([LATENT_PAIRS, HB], 0.0, gl.float32, mma)
    odd_out = gl.full([LATENT_PAIRS, HB], 0.0, gl.float32, mma)

    if first < end:
        slots += row64 * slot_row
        last = length - 1
        n = gl.arange(0, BN, gl.SliceLayout(1, copy))
        n_pe = gl.arange(0, BN, gl.SliceLayout(1, copy_pe))
        kv = gl.allocate_shared_memory(
            gl.int16, [NS, BN, LATENT_PAIRS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        )
        kpe = kv
        if ROPE_PAIRS > 0:
            kpe = gl.allocate_shared_memory(
                gl.int16, [NS, BN, ROPE_PAIRS], gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
            )
        probs = gl.allocate_shared_memory(
            gl.float16, [BN, HB], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
        )
        # The slots of the next tile to copy are loaded a tile ahead.
        slot, slot_pe = next_slots(slots, first * BN, n, n_pe, last)
        for i in gl.static_range(AHEAD):
            if first + i < end:
                _copy_tile(
                    kv, kpe, i, cache, slot, slot_pe, chunks, ROPE_PAIRS, copy, copy_pe
                )
            gl.nvidia.ampere.async_copy.commit_group()
            slot, slot_pe = next_slots(slots, (first + i + 1) * BN, n, n_pe, last)
        q_even, q_odd = _stage_query(
            q_nope + row64 * qn_row, head0, heads, qn_head, HB, LATENT_PAIRS, NW
        )
        if ROPE_PAIRS > 0:
            r_even, r_odd = _stage_query(
                q_pe + row64 * qp_row, head0, heads, qp_head, HB, ROPE_PAIRS, NW
            )
        use = 0
        fill = AHEAD % NS
        for tile in range(first, end):
            gl.nvidia.ampere.async_copy.wait_group(AHEAD - 1)
            if NS > 1:
                if tile + AHEAD < end:
                    _copy_tile(
                        kv, kpe, fill, cache, slot, slot_pe, chunks, ROPE_PAIRS, copy,
                        copy_pe,
                    )  # fmt: skip
                gl.nvidia.ampere.async_copy.commit_group()
                slot, slot_pe = next_slots(
                    slots, (tile + AHEAD + 1) * BN, n, n_pe, last
                )

            s = gl.full([BN, HB], 0.0, gl.float32, mma)
            s_odd = gl.full([BN, HB], 0.0, gl.float32, mma)
            s, s_odd = _scores(
                s, s_odd, kv.index(use), q_even, q_odd, LATENT_PAIRS, DS, a, b
            )
            if ROPE_PAIRS > 0:
                s, s_odd = _scores(
                    s,
                    s_odd,
                    kpe.index(use),
                    r_even,
                    r_odd,
                    ROPE_PAIRS,
                    ROPE_PAIRS,
                    a,
                    b,
                )
            token = tile * BN + gl.arange(0, BN, by_row)
            s = gl.where(
                (token < length)[:, None], (s + s_odd) * scale_log2, float("-inf")
            )
            p, top, shrink = weigh(s, top)
            probs.store(p.to(gl.float16))
            # The sum over tokens waits until the end.
            total = total * shrink[None, :] + p
            even_out = even_out * shrink[None, :]
            odd_out = odd_out * shrink[None, :]
            for i in gl.static_range(BN // TS):
                words = kv.index(use).slice(i * TS, TS, dim=0).permute((1, 0)).load(a)
                even, odd = _unpack(words)
                weight = probs.slice(i * TS, TS, dim=0).load(b)
                even_out = gl.nvidia.ampere.mma_v2(even, weight, even_out)
                odd_out = gl.nvidia.ampere.mma_v2(odd, weight, odd_out)
            if NS > 1:
                use = gl.where(use == NS - 1, 0, use + 1)
                fill = gl.where(fill == NS - 1, 0, fill + 1)
            else:
                if tile + 1 < end:
                    _copy_tile(
                        kv, kpe, 0, cache, slot, slot_pe, chunks, ROPE_PAIRS, copy,
                        copy_pe,
                    )  # fmt: skip
                gl.nvidia.ampere.async_copy.commit_group()
                slot, slot_pe = next_slots(slots, (tile + 2) * BN, n, n_pe, last)

    norm, row_lse = norm_and_lse(total, top, k_scale)
    even_out = even_out * norm[None, :]
    odd_out = odd_out * norm[None, :]
    head = head0 + gl.arange(0, HB, by_head)
    pair = gl.arange(0, LATENT_PAIRS, by_row)
    live = head < heads
    if SPLIT:
        at = (row64 * splits + split) * heads + head
        if first < end:
            even_at = part + at[None, :] * 512 + pair[:, None]
            gl.store(even_at, even_out, mask=live[None, :])
            gl.store(even_at + 256, odd_out, mask=live[None, :])
        gl.store(part_lse + at, row_lse, mask=live)
    else:
        low = even_out.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        high = odd_out.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16
        at = out + row64 * out_row + head[None, :] * out_head + pair[:, None]
        gl.store(at, low | high, mask=live[None, :])
        at_lse = lse + row64 * lse_row + head * lse_head
        gl.store(at_lse, row_lse, mask=live & (has_lse != 0))


def choose_tile(heads: int) -> Tile:
    """The measured tile for a number of heads."""
    if heads <= 8:
        return Tile(heads=8, tokens=64, stages=2, warps=4, blocks_by_registers=4)
    return Tile(heads=16, tokens=64, stages=2, warps=4, token_step=32)


class SparseFp8Decode(SparseDecode):
    """The decode over an FP8 (e4m3) cache."""

    cache_dtype = torch.float8_e4m3fn
    _choose_tile = staticmethod(choose_tile)

    @staticmethod
    def _kernel():
        return _decode_kernel
