# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Geometry of the Hopper decode kernel: tiles, warp roles, registers, shared memory.

Pure Python: importable without a GPU and without the CuTe DSL.
"""

from dataclasses import dataclass

LATENT = 512
"""Latent width (values); V is this part of a cache row."""
ROPE = 64
"""Width of the rotated part (values)."""
HEAD_DIM = LATENT + ROPE
"""Values (bytes in FP8) of one cache row."""
TILE_TOKENS = 64
"""KV tokens of one shared-memory stage."""
UNIT_TOKENS = 128
"""KV tokens between two promotions of the FP8 accumulator to fp32."""
UNIT_TILES = UNIT_TOKENS // TILE_TOKENS
QUERY_ALIGNMENT = 16
"""Bytes that the query's address is a multiple of: one load of the kernel."""
PARTIAL_BYTES = 2
"""Bytes of one value of a partial output: fp16, normalised, times PARTIAL_SCALE."""
PARTIAL_SCALE = 128.0
"""448, the largest e4m3 value, becomes 57344 of fp16's 65504; outputs down to 2 ** -21
keep fp16's 11 bits."""

WARPGROUP_THREADS = 128
NUM_WARPGROUPS = 4
"""Producer, softmax, and two output warpgroups (256 latent columns each)."""
NUM_THREADS = NUM_WARPGROUPS * WARPGROUP_THREADS
REGISTER_POOL = 65536 // NUM_THREADS // 8 * 8 * NUM_WARPGROUPS
"""Registers per thread, summed over the warpgroups, that setmaxnreg shares out."""
PRODUCER_REGISTERS = 24
MAX_SHARED_MEMORY_BYTES = 232448
"""Dynamic shared memory of one block on SM90 (227 KiB)."""
OUTPUT_M_TILES = LATENT // 2 // 64
"""64-column tiles of the latent that one output warpgroup holds."""

# Registers of one output warpgroup's thread: R / 2 * 4 accumulators, a temporary for
# the FP8 partial sums, 16 words of V and about 32 for addresses and loop state.
_OUTPUT_REGISTERS = {16: 104, 32: 136, 48: 160, 64: 176}
MAX_SOFTMAX_REGISTERS = 216


@dataclass(frozen=True)
class DecodeTile:
    """What the decode kernel is compiled for, besides causality.

    Heads and query tokens are run-time values: one tile serves every shape that fits.

    Attributes:
        rows_per_cta: Query rows of one thread block (16, 32, 48 or 64).
        cluster: Thread blocks that share one KV stream (1 or 2).
        kv_stages: Shared-memory stages of ``TILE_TOKENS`` tokens' latents.
        rope_stages: Stages of their rope parts, which only Q K^T reads.
        p_stages: Buffers for the probabilities of one tile; an even number.

    """

    rows_per_cta: int
    cluster: int
    kv_stages: int = 6
    rope_stages: int = 4
    p_stages: int = 4

    @property
    def rows_per_cluster(self) -> int:
        return self.rows_per_cta * self.cluster

    @property
    def interleaved(self) -> bool:
        """Whether the next tile's Q K^T is issued inside this tile's softmax.

        It needs a second score fragment in registers, which 64 rows leave no room for.
        """
        return self.rows_per_cta < 64

    @property
    def output_registers(self) -> int:
        return _OUTPUT_REGISTERS[self.rows_per_cta]

    @property
    def softmax_registers(self) -> int:
        left = REGISTER_POOL - PRODUCER_REGISTERS - 2 * self.output_registers
        return min(left // 8 * 8, MAX_SOFTMAX_REGISTERS)

    @property
    def p_units(self) -> int:
        """Units whose probabilities fit the buffers at once."""
        return self.p_stages // UNIT_TILES

    @property
    def n_split(self) -> int:
        """Column groups of the fp32 promotion: 2 halves the temporary at 64 rows."""
        return 2 if self.rows_per_cta == 64 else 1

    @property
    def kv_stage_bytes(self) -> int:
        return TILE_TOKENS * HEAD_DIM

    @property
    def shared_memory_bytes(self) -> int:
        """Upper bound of the dynamic shared memory that the kernel asks for."""
        kv = TILE_TOKENS * (self.kv_stages * LATENT + self.rope_stages * ROPE)
        p = self.p_stages * self.rows_per_cta * TILE_TOKENS
        # Alpha of every P stage and two buffers of inverse sums, for 64 rows; flags.
        row_state = (self.p_stages + 2) * 64 * 4 + self.p_stages * 16
        barriers = 8 * (2 * self.kv_stages + self.rope_stages + 2 * self.p_units + 2)
        # P, latents and rope parts are multiples of their alignment, 1 KiB.
        return -(-(row_state + barriers) // 1024) * 1024 + p + kv

    def __post_init__(self) -> None:
        if self.rows_per_cta not in _OUTPUT_REGISTERS:
            raise ValueError(
                f"rows_per_cta is {self.rows_per_cta}; allowed are "
                f"{sorted(_OUTPUT_REGISTERS)}."
            )
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster is {self.cluster}; allowed are 1 and 2.")
        if self.p_stages < 2 or self.p_stages % 2:
            raise ValueError(
                f"p_stages is {self.p_stages}; a unit takes two, so an even number."
            )
        if self.shared_memory_bytes > MAX_SHARED_MEMORY_BYTES:
            raise ValueError(
                f"The tile needs {self.shared_memory_bytes} bytes of shared memory; "
                f"SM90 gives a block {MAX_SHARED_MEMORY_BYTES}. Use fewer stages."
            )


@dataclass(frozen=True)
class DecodeGeometry:
    """A shape on a tile.

    Attributes:
        heads: Query heads of one token.
        qlen: Query tokens of one request.
        tile: The compiled tile.

    """

    heads: int
    qlen: int
    tile: DecodeTile

    @property
    def rows(self) -> int:
        """Query rows of one request."""
        return self.heads * self.qlen

    @property
    def row_chunks(self) -> int:
        """Clusters that walk the same KV for different rows of a request."""
        return -(-self.rows // self.tile.rows_per_cluster)


SMALL_TILES = tuple(DecodeTile(rows, 1) for rows in (16, 32, 48, 64))
"""Up to 64 rows: one block, its own KV stream."""
LARGE_TILES = ((DecodeTile(48, 2), 1.0), (DecodeTile(64, 2), 1.13))
"""More rows: a cluster of two, with the relative time of one pass over the KV, as
measured on an H200. It decides between more chunks of 96 and fewer of 128."""
TILES = SMALL_TILES + tuple(tile for tile, _ in LARGE_TILES)
"""Every tile that a shape can choose."""


def choose_geometry(heads: int, qlen: int) -> DecodeGeometry:
    """Pick the tile for ``heads x qlen`` query rows."""
    rows = heads * qlen
    for tile in SMALL_TILES:
        if rows <= tile.rows_per_cta:
            return DecodeGeometry(heads, qlen, tile)
    shapes = [(DecodeGeometry(heads, qlen, tile), cost) for tile, cost in LARGE_TILES]
    return min(shapes, key=lambda shape: shape[0].row_chunks * shape[1])[0]
