# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the sparse MLA decodes on Hopper share, whatever the cache's type.

``flashinfer_mla_sparse_sm90_fp8`` and ``.._bf16`` hold the kernels that attend a row to
its slots, their tiles and their formats. Here are the slots' gather into shared memory,
the choice of the splits, the launch, and the kernel that merges splits.

Grid of a decode kernel: ``(rows x head blocks, splits)``. A split takes an equal share
of the row's tiles, read from ``lens`` on the device. Several splits write normalised
fp32 partials ``o_i`` with their LSE (log2), and the merge gives

    o   = sum_i 2^lse_i o_i / sum_i 2^lse_i
    lse = log2(sum_i 2^lse_i)

A row without slots gets output 0 and LSE -inf. Slots past ``lens[r]`` are not read: the
last tile repeats the last valid slot.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.triton_utils import HAS_TRITON, LOG2E, gl, gluon, triton
from vllm.utils.math_utils import cdiv, next_power_of_2

LATENT = 512
ROPE = 64
MAX_HEADS = 128
SHARED_BYTES = 228 * 1024
"""Shared memory of an SM on Hopper."""
MAX_SPLITS = 64
MERGE_VALUES = 2048
"""Splits x pairs of values that a block of the merge holds."""

jit = gluon.jit if HAS_TRITON else triton.jit  # the latter a stub that does nothing

LAUNCH_DEPENDENTS_ASM = gl.constexpr("griddepcontrol.launch_dependents; // $0")
_WAIT_ASM = gl.constexpr("griddepcontrol.wait; // $0")


@jit
def launch_control(asm: gl.constexpr):
    """Wait for the grid in front, or let the next one be launched."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def gather(
    dst, cache, slot, chunks, first: gl.constexpr, pairs: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Start copying ``pairs`` words from word ``first`` on of each slot's row."""
    # Rows are a multiple of 16 bytes apart; said this way the copies stay 16 wide.
    at = slot.to(gl.int64) * chunks * 8
    word = gl.arange(0, pairs, gl.SliceLayout(0, layout)) + first
    gl.nvidia.ampere.async_copy.async_copy_global_to_shared(
        dst, cache + at[:, None] + word[None, :]
    )


@jit
def next_slots(slots, base, n, n_pe, last):
    """Slots of the tokens from ``base`` on, repeating the row's last valid one."""
    slot = gl.load(slots + gl.minimum(base + n, last))
    return slot, gl.load(slots + gl.minimum(base + n_pe, last))


@jit
def share_of_row(lens, width, heads, splits, HB: gl.constexpr, BN: gl.constexpr):
    """What this block does: row, first head, split, KV length, tiles [first, end)."""
    blocks = (heads + HB - 1) // HB
    row = gl.program_id(0) // blocks
    head0 = gl.program_id(0) % blocks * HB
    split = gl.program_id(1)
    row64 = row.to(gl.int64)
    length = gl.minimum(gl.load(lens + row), width)
    tiles = (length + BN - 1) // BN
    first = tiles * split // splits
    end = tiles * (split + 1) // splits
    return row64, head0, split, length, first, end


@jit
def weigh(s, top):
    """Weights of scores ``s``, the new running maximum, and what shrinks old sums."""
    new_top = gl.maximum(top, gl.max(s, axis=0))
    shrink = gl.exp2(top - new_top)
    return gl.exp2(s - new_top[None, :]), new_top, shrink


@jit
def norm_and_lse(total, top, k_scale):
    """Factor of the sums, and LSE; 0 and -inf for heads that saw no slot."""
    mass = gl.sum(total, axis=0)
    empty = mass == 0
    lse = gl.where(empty, float("-inf"), top + gl.log2(mass))
    return gl.where(empty, 0.0, k_scale / mass), lse


# All but the cache, whose 16-byte alignment the copies need, and our own scratch: one
# binary serves every stride and address, so nothing compiles after the warm-up.
NEVER_SPECIALIZE = [
    *("q_nope", "q_pe", "slots", "lens", "out", "lse", "part_lse"),
    *("qn_row", "qn_head", "qp_row", "qp_head", "chunks", "slot_row"),
    *("out_row", "out_head", "lse_row", "lse_head"),
    *("width", "heads", "splits", "has_lse"),
]


@jit(
    do_not_specialize=[
        *("part_lse", "out", "lse", "heads", "splits"),
        *("out_row", "out_head", "lse_row", "lse_head", "has_lse"),
    ]
)
def _merge_kernel(
    part,  # fp32 [rows, splits, heads, 2, 256]
    part_lse,  # fp32 [rows, splits, heads]
    out,  # bf16 pairs [rows, heads, 256] as int32
    lse,  # fp32 [rows, heads]
    heads,
    splits,
    out_row,
    out_head,
    lse_row,
    lse_head,
    has_lse,
    MAX: gl.constexpr,  # the splits, up to a power of 2
    PAIRS: gl.constexpr,  # pairs that a block merges
):
    """Merge the partials of one row and head; the grid's second axis cuts the pairs."""
    # One warp, and a thread holds all splits of its pairs: no exchange, no barrier.
    tile: gl.constexpr = gl.BlockedLayout([MAX, PAIRS // 32], [1, 32], [1, 1], [1, 0])
    launch_control(_WAIT_ASM)
    row = gl.program_id(0) // heads
    head = gl.program_id(0) % heads
    row64 = row.to(gl.int64)
    split = gl.arange(0, MAX, gl.SliceLayout(1, tile))
    pair = gl.program_id(1) * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, tile))
    at = (row64 * splits + split) * heads + head
    piece = gl.load(part_lse + at, mask=split < splits, other=float("-inf"))
    # Partials are loaded while their weights are still unknown. Those of a split
    # without slots were not written: whatever they hold is dropped afterwards.
    even_at = part + at[:, None] * 512 + pair[None, :]
    live = (split < splits)[:, None] & (pair >= 0)[None, :]
    even = gl.load(even_at, mask=live, other=0.0)
    odd = gl.load(even_at + 256, mask=live, other=0.0)
    top = gl.max(piece, axis=0)
    weight = gl.where(piece == float("-inf"), 0.0, gl.exp2(piece - top))
    mass = gl.sum(weight, axis=0)
    norm = gl.where(mass == 0, 0.0, 1.0 / mass)
    used = weight[:, None] > 0
    even = gl.sum(gl.where(used, even * weight[:, None], 0.0), axis=0) * norm
    odd = gl.sum(gl.where(used, odd * weight[:, None], 0.0), axis=0) * norm
    low = even.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    high = odd.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) << 16
    gl.store(out + row64 * out_row + head * out_head + pair, low | high)
    if (gl.program_id(1) == 0) & (has_lse != 0):
        value = gl.where(mass == 0, float("-inf"), top + gl.log2(mass))
        gl.store(lse + row64 * lse_row + head * lse_head, value)


@dataclass(frozen=True)
class Tile:
    """How a block works: chosen by measurement, fixed per number of heads."""

    heads: int
    """Heads of a block: 8 or 16, the N of the tensor core's products."""
    tokens: int
    """Tokens of a tile of the KV: 16 a warp, or a multiple."""
    stages: int
    """Tiles in shared memory; one is computed on, the others are under way."""
    warps: int
    pair_step: int = 64
    """Words of each token that one step of Q K^T converts: 64, 128 or 256."""
    token_step: int = 16
    """Tokens that one step of P V converts: a multiple of 16."""
    blocks_by_registers: int = 2
    """Blocks that run at once on an SM as far as registers go."""
    lanes: int = 8
    """Threads that copy a stretch of 16 bytes each of one token's row: 4 to 32. Few
    mean that a thread looks up few slots."""
    value_bytes: int = 1
    """Of the cache."""

    def shared_bytes(self, rope_dim: int) -> int:
        """Shared memory of a block: the tiles, the query, P and the driver's 1 KiB."""
        dim = LATENT + rope_dim
        query = 2 * self.heads * dim
        return (
            self.stages * self.tokens * dim * self.value_bytes
            + query
            + 2 * self.tokens * self.heads
            + 1024
        )

    def blocks_per_sm(self, rope_dim: int) -> int:
        """Blocks that run at once on an SM."""
        return min(
            SHARED_BYTES // self.shared_bytes(rope_dim), self.blocks_by_registers
        )


@functools.cache
def choose_splits(
    blocks: int, tiles: int, sms: int, per_sm: int, tile_heads: int
) -> int:
    """Splits of a row's KV so that the grid fills the device evenly.

    Args:
        blocks: Blocks of the grid without splitting: rows x head blocks.
        tiles: Tiles of a row of full width.
        sms: Multiprocessors.
        per_sm: Blocks that run at once on one.
        tile_heads: Heads of a block, whose partial results a split writes.

    Returns:
        The splits with the least estimated time, in units of a tile on an otherwise
        idle SM. k blocks on an SM slow each other down to 0.7 k (measured for 2). A
        block's start costs a tile, its partial results as much as they have bytes, and
        the merge another tile. Partial results stay below 4 full waves.

    """

    def cost(splits: int) -> tuple[float, int]:
        full, rest = divmod(blocks * splits, sms * per_sm)
        slow = full * max(1.0, 0.7 * per_sm)
        if rest:
            slow += max(1.0, 0.7 * cdiv(rest, sms))
        share = cdiv(tiles, splits) + 1
        if splits == 1:
            return slow * share, splits
        return slow * (share + tile_heads / 16) + 1, splits

    most = min(tiles, MAX_SPLITS, 4 * sms * per_sm // blocks)
    return min(range(1, max(most, 1) + 1), key=cost)


class SparseDecode:
    """The decode of one shape; scratch is made here, ``decode`` allocates nothing.

    A subclass names the cache's type and how its kernel is launched.

    Args:
        max_rows: Most query rows (tokens) of a call.
        heads: Local query heads, 1 to 128.
        rope_dim: 64, or 0 for a model without a rope part.
        topk_width: Columns of ``slots``: the most slots of a row.
        device: Where the tensors live.
        tile: Overrides the measured choice (for tuning and tests).
        splits: Overrides the choice by number of rows (for tuning and tests).

    Raises:
        ValueError: A value that the kernel can't take; all reasons at once.

    """

    cache_dtype: ClassVar[torch.dtype]

    def __init__(
        self,
        max_rows: int,
        heads: int,
        rope_dim: int,
        topk_width: int,
        device: torch.device,
        *,
        tile: Tile | None = None,
        splits: int | None = None,
    ):
        self.max_rows = max_rows
        self.heads = heads
        self.rope_dim = rope_dim
        self.topk_width = topk_width
        self.device = torch.device(device)
        self._refuse(
            f"{type(self).__name__} can't be built",
            [
                (max_rows >= 1, f"max_rows is {max_rows}; give at least 1"),
                (
                    1 <= heads <= MAX_HEADS,
                    f"heads is {heads}; 1 to {MAX_HEADS} local heads are supported",
                ),
                (
                    rope_dim in (0, ROPE),
                    f"rope_dim is {rope_dim}; 0 or {ROPE} is supported",
                ),
                (topk_width >= 1, f"topk_width is {topk_width}; give at least 1"),
                (
                    splits is None or 1 <= splits <= MAX_SPLITS,
                    f"splits is {splits}; 1 to {MAX_SPLITS}, or None to choose",
                ),
            ],
        )
        self._forced_tile = tile
        self.tile = tile or self._choose_tile(heads)
        self._forced_splits = splits
        self._sms = 132
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._sms = properties.multi_processor_count
        self._per_sm = self.tile.blocks_per_sm(rope_dim)
        self._head_blocks = cdiv(heads, self.tile.heads)
        self._tiles = cdiv(topk_width, self.tile.tokens)
        counts = (self.num_splits(rows) * rows for rows in range(1, max_rows + 1))
        pieces = max((n for r, n in enumerate(counts, 1) if n > r), default=1)
        self._part = torch.empty(
            pieces * heads * LATENT, dtype=torch.float32, device=self.device
        )
        self._part_lse = torch.empty(
            pieces * heads, dtype=torch.float32, device=self.device
        )

    @staticmethod
    def _choose_tile(heads: int) -> Tile:
        """The measured tile for a number of heads."""
        raise NotImplementedError

    def tile_of(self, rows: int) -> Tile:
        """The tile of a call of ``rows`` rows."""
        return self.tile

    @staticmethod
    def _kernel():
        """The decode kernel, of ``_decode_kernel``'s arguments."""
        raise NotImplementedError

    @staticmethod
    def _refuse(what: str, checks: list[tuple[bool, str]]) -> None:
        """Raise ValueError with the reason of every check that failed."""
        reasons = [reason for passed, reason in checks if not passed]
        if reasons:
            raise ValueError(f"{what}: {'; '.join(reasons)}.")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch for the partial results of splits."""
        return 4 * (self._part.numel() + self._part_lse.numel())

    def num_splits(self, rows: int) -> int:
        """Splits of each row's KV in a call of ``rows`` rows; never the lengths."""
        if self._forced_splits is not None:
            return self._forced_splits
        return choose_splits(
            rows * self._head_blocks,
            self._tiles,
            self._sms,
            self._per_sm,
            self.tile.heads,
        )

    def _check(self, q_nope, q_pe, cache, slots, lens, out, lse) -> None:
        rows, heads, rope = q_nope.shape[0], self.heads, self.rope_dim

        def fits(name, x, dtype, shape, strides=1):
            """Dtype, shape, and strides that are multiples but for the last, 1."""
            good = x.dtype == dtype and tuple(x.shape) == shape and x.stride(-1) == 1
            good &= all(s % strides == 0 for s in x.stride()[:-1])
            good &= x.storage_offset() % strides == 0
            return good, (
                f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; "
                f"{dtype} {shape} is needed, the last stride 1"
                + (f" and all others multiples of {strides}" if strides > 1 else "")
            )

        bf16, dtype = torch.bfloat16, self.cache_dtype
        checks = [
            (rows <= self.max_rows, f"{rows} rows exceed max_rows {self.max_rows}"),
            fits("q_nope", q_nope, bf16, (rows, heads, LATENT), 2),
            fits("out", out, bf16, (rows, heads, LATENT), 2),
            fits("slots", slots, torch.int32, (rows, self.topk_width)),
            fits("lens", lens, torch.int32, (rows,)),
            fits(
                "cache",
                cache,
                dtype,
                (cache.shape[0], LATENT + rope),
                16 // dtype.itemsize,
            ),
            (
                cache.data_ptr() % 16 == 0,
                "the cache's address is not a multiple of 16 bytes: align the pool",
            ),
        ]
        if rope:
            if q_pe is None:
                checks.append((False, f"q_pe is None; rope_dim {rope} needs it"))
            else:
                checks.append(fits("q_pe", q_pe, bf16, (rows, heads, rope), 2))
        if lse is not None:
            good = lse.dtype == torch.float32 and tuple(lse.shape) == (rows, heads)
            checks.append(
                (
                    good,
                    f"lse is {lse.dtype} {tuple(lse.shape)}; torch.float32 "
                    f"{(rows, heads)} is needed",
                )
            )
        self._refuse(f"{type(self).__name__} can't run", checks)

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        cache: torch.Tensor,
        slots: torch.Tensor,
        lens: torch.Tensor,
        softmax_scale: float,
        k_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Attend each row to its slots; captures into a CUDA graph.

        Args:
            q_nope: ``[rows, heads, 512]`` bf16; with an FP8 cache up to 65504 in
                magnitude (f16).
            q_pe: ``[rows, heads, 64]`` bf16, or None with rope_dim 0.
            cache: ``[num_slots, 512 + rope_dim]``, 16-byte aligned rows.
            slots: ``[rows, topk_width]`` int32, of which each row's first ``lens`` are
                read.
            lens: ``[rows]`` int32 on the device; 0 gives output 0 and LSE -inf.
            softmax_scale: Multiplies the scores of the dequantised keys.
            k_scale: What one unit of the cache is worth, latent and rope part alike.
            out: ``[rows, heads, 512]`` bf16, written.
            lse: ``[rows, heads]`` fp32, written with the log2 of the softmax's sum.

        Raises:
            ValueError: Tensors that don't fit; all reasons at once.

        """
        self._check(q_nope, q_pe, cache, slots, lens, out, lse)
        rows, heads = q_nope.shape[0], self.heads
        if rows == 0:
            return
        tile, splits = self.tile_of(rows), self.num_splits(rows)
        q32 = q_nope.view(torch.int32)
        pe32 = q32 if q_pe is None else q_pe.view(torch.int32)
        out32 = out.view(torch.int32)
        words = cache if cache.element_size() == 2 else cache.view(torch.int16)
        has_lse = int(lse is not None)
        lse_to = self._part_lse if lse is None else lse
        lse_row, lse_head = lse.stride() if lse is not None else (0, 0)
        self._kernel()[(rows * self._head_blocks, splits)](
            q32, pe32, words, slots, lens, out32, lse_to,
            self._part, self._part_lse,
            q32.stride(0), q32.stride(1), pe32.stride(0), pe32.stride(1),
            words.stride(0) // 8, slots.stride(0),
            out32.stride(0), out32.stride(1), lse_row, lse_head,
            slots.shape[1], heads, splits, has_lse,
            float(softmax_scale) * float(k_scale) * LOG2E, float(k_scale),
            HB=tile.heads, ROPE_PAIRS=self.rope_dim // 2, BN=tile.tokens,
            NS=tile.stages, NW=tile.warps, DS=tile.pair_step, TS=tile.token_step,
            LANES=tile.lanes, SPLIT=splits > 1, num_warps=tile.warps,
        )  # fmt: skip
        if splits > 1:
            most = max(next_power_of_2(splits), 4)
            pairs = min(MERGE_VALUES // most, 128)
            _merge_kernel[(rows * heads, LATENT // 2 // pairs)](
                self._part, self._part_lse, out32, lse_to, heads, splits,
                out32.stride(0), out32.stride(1), lse_row, lse_head, has_lse,
                MAX=most, PAIRS=pairs, num_warps=1, launch_pdl=True,
            )  # fmt: skip

    def warm_up(self) -> None:
        """Compile all that ``decode`` may launch, by running each kernel once."""
        splits = {r: self.num_splits(r) for r in range(self.max_rows, 0, -1)}
        # For each tile one binary for unsplit rows and one for all others; a merge for
        # each power.
        merges = {r: next_power_of_2(max(n, 4)) * (n > 1) for r, n in splits.items()}
        rows = {(self.tile_of(r), n): r for r, n in merges.items()}
        for n in rows.values():
            make = dict(device=self.device)
            q = torch.zeros(n, self.heads, LATENT, dtype=torch.bfloat16, **make)
            pe = q[..., : self.rope_dim] if self.rope_dim else None
            cache = torch.zeros(1, LATENT + self.rope_dim, **make)
            slots = torch.zeros(n, self.topk_width, dtype=torch.int32, **make)
            self.decode(
                q,
                pe,
                cache.to(self.cache_dtype),
                slots,
                torch.ones(n, dtype=torch.int32, **make),
                1.0,
                1.0,
                torch.empty_like(q),
            )
