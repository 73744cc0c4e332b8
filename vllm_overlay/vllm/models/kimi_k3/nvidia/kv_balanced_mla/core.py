# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernel's surface: which shapes run, what they need, and one compiled shape.

Importing this module needs torch only. The CuTe DSL is imported when a kernel is built.
Shapes: ``rows = heads x qlen`` query rows of one request; a cache row is 512 latent and
64 rope values in FP8 e4m3.
"""

import functools
import math

import torch

from . import plan
from .config import (
    HEAD_DIM,
    LATENT,
    PARTIAL_BYTES,
    QUERY_ALIGNMENT,
    TILE_TOKENS,
    DecodeGeometry,
    DecodeTile,
    choose_geometry,
)

LOG2_E = math.log2(math.e)
MAX_HEADS = 1024
MAX_QLEN = 128
_SM90 = (9, 0)


def check_shape(
    heads: int, qlen: int, device: torch.device | None = None
) -> str | None:
    """Why the kernel can't run a shape on a device, or None if it can.

    Args:
        heads: Query heads of one token (under DCP: of all ranks together).
        qlen: Query tokens of one request.
        device: A CUDA device; None checks the shape alone.

    """
    if not 1 <= heads <= MAX_HEADS:
        return f"{heads} heads; allowed are 1 to {MAX_HEADS}"
    if not 1 <= qlen <= MAX_QLEN:
        return f"{qlen} query tokens; allowed are 1 to {MAX_QLEN}"
    if device is None:
        return None
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"device {device}; the kernel needs a CUDA device of capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != _SM90:
        return (
            f"compute capability {capability[0]}.{capability[1]}; the kernel is "
            "written for 9.0 (H100, H200)"
        )
    chunks = choose_geometry(heads, qlen).row_chunks
    clusters = max_active_clusters(device)
    if chunks > clusters:
        return (
            f"{heads} heads x {qlen} query tokens need {chunks} clusters for one "
            f"request; the device runs {clusters}"
        )
    return None


def supports(heads: int, qlen: int, device: torch.device | None = None) -> bool:
    """Whether the kernel can run ``heads`` x ``qlen`` rows on ``device``."""
    return check_shape(heads, qlen, device) is None


def max_planned_requests(heads: int, qlen: int) -> int:
    """The most requests that one plan can hold, at any lengths."""
    del heads, qlen  # the planner's limit alone
    return plan.MAX_REQUESTS


@functools.cache
def _clusters_of(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count // 2


def max_active_clusters(device: torch.device) -> int:
    """Two-block clusters that run at once on ``device`` (66 on a full H100 or H200)."""
    index = torch.device(device).index
    if index is None:
        index = torch.accelerator.current_device_index()
    return _clusters_of(index)


def worker_groups(geometry: DecodeGeometry, clusters: int) -> int:
    """Groups that the plan balances: clusters (or single blocks) per row chunk."""
    workers = clusters * (2 if geometry.tile.cluster == 1 else 1)
    return max(workers // geometry.row_chunks, 1)


def counts_len() -> int:
    """Length of ``counts`` (int32)."""
    return plan.COUNTS_LEN


def work_list_len(heads: int, qlen: int, max_requests: int, clusters: int) -> int:
    """Length of ``work`` (int32), whatever the lengths of the requests.

    Args:
        heads: Query heads of one token.
        qlen: Query tokens of one request.
        max_requests: Not used: the list is as long as the workers, not the batch.
        clusters: Value of ``max_active_clusters``.

    """
    del max_requests
    return plan.work_len(worker_groups(choose_geometry(heads, qlen), clusters))


def _partial_sizes(geometry: DecodeGeometry, groups: int) -> tuple[int, int]:
    rows = plan.partial_slots(groups) * geometry.rows
    return rows * LATENT * PARTIAL_BYTES, -(-rows * 4 // 128) * 128


def workspace_bytes(
    heads: int, qlen: int, max_requests: int, device: torch.device | None = None
) -> int:
    """Bytes of split-KV scratch in the worst case.

    Two partial slots a worker group, ``rows x 512`` fp16 and ``rows`` fp32 each:
    bounded by the device, not by the batch or its lengths (groups x row chunks never
    exceeds the workers).

    Args:
        heads: Query heads of one token.
        qlen: Query tokens of one request.
        max_requests: Not used.
        device: The CUDA device; default the current one.

    """
    del max_requests
    geometry = choose_geometry(heads, qlen)
    clusters = max_active_clusters(device if device is not None else "cuda")
    return sum(_partial_sizes(geometry, worker_groups(geometry, clusters)))


@functools.cache
def compile_decode(tile: DecodeTile, causal: bool, device_index: int = 0):
    """Compile one tile's main kernel (cached by its hashable facts).

    Args:
        tile: The tile; it serves every number of heads and query tokens.
        causal: Whether later query tokens see more keys.
        device_index: Device that the compiled function is loaded on.

    Returns:
        The DSL's compiled function; ``DECODE_KINDS`` gives its argument types.

    """
    del device_index  # a loaded function belongs to one device: part of the key only
    import cutlass  # noqa: F401  (the DSL registers itself on import)
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64, Uint32
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    from .sm90.decode_kernel import FP8, DecodeKernel

    def pointer(dtype, align):
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=align)

    return cute.compile(
        DecodeKernel(tile, causal),
        pointer(Uint32, 16),
        pointer(FP8, 16),
        pointer(Int32, 4),
        pointer(Int32, 4),
        pointer(Int32, 4),
        pointer(Int32, 8),
        pointer(Uint32, 16),
        pointer(Float32, 4),
        pointer(Uint32, 16),
        pointer(Float32, 4),
        Int32(1),
        Int32(TILE_TOKENS),
        Int64(TILE_TOKENS * HEAD_DIM),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(0),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(0),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(),
    )


DECODE_KINDS = "p" * 10 + "iiliii" + "iii" + "i" + "iii" + "ff" + "p"
"""``Launcher`` types of ``compile_decode``'s arguments."""


class KvBalancedMla:
    """One compiled shape: planner, split-KV decode and combine.

    Args:
        heads: Query heads of one token.
        qlen: Query tokens of one request.
        max_requests: Most requests of one call.
        causal: Whether query token j sees the KV of earlier query tokens and itself
            only; False: every token sees all of it.
        device: The CUDA device.

    Raises:
        ValueError: The shape does not run on the device, or ``max_requests`` does not
            fit one plan.

    """

    def __init__(
        self,
        heads: int,
        qlen: int,
        max_requests: int,
        causal: bool,
        device: torch.device,
    ) -> None:
        reason = check_shape(heads, qlen, device)
        if reason is not None:
            raise ValueError(f"The KV-balanced MLA kernel does not run here: {reason}.")
        most = max_planned_requests(heads, qlen)
        if not 1 <= max_requests <= most:
            raise ValueError(
                f"max_requests is {max_requests}; one plan holds 1 to {most}."
            )
        device = torch.device(device)
        index = device.index
        if index is None:
            index = torch.accelerator.current_device_index()
        self.heads = heads
        self.qlen = qlen
        self.rows = heads * qlen
        self.max_requests = max_requests
        self.causal = causal
        self.device = torch.device("cuda", index)
        self.geometry = choose_geometry(heads, qlen)
        self.groups = worker_groups(self.geometry, max_active_clusters(self.device))
        self._partial_bytes, lse_bytes = _partial_sizes(self.geometry, self.groups)
        self.workspace_bytes = self._partial_bytes + lse_bytes

        from .sm90.combine import compile_combine_kernel
        from .sm90.launcher import Launcher
        from .sm90.planner import compile_plan_kernel

        sms = torch.cuda.get_device_properties(index).multi_processor_count
        with torch.accelerator.device_index(index):
            self._decode = Launcher(
                compile_decode(self.geometry.tile, causal, index), DECODE_KINDS
            )
            self._planner = compile_plan_kernel(self.groups, plan.MAX_REQUESTS)
            self._combine = compile_combine_kernel(self.groups, sms, use_pdl=True)

    def plan(
        self, seq_lens: torch.Tensor, counts: torch.Tensor, work: torch.Tensor
    ) -> None:
        """Split the KV over the workers; on the device, one launch.

        Args:
            seq_lens: KV lengths of this rank in tokens, int32 ``[requests]``.
            counts: int32 ``[counts_len()]``, written.
            work: int32, at least ``work_list_len(...)`` entries, written.

        """
        self._planner.launch(seq_lens, counts, work, _stream(self.device))

    def decode(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        output_scale: float,
        counts: torch.Tensor,
        work: torch.Tensor,
        workspace: torch.Tensor,
        lse: torch.Tensor | None = None,
        causal_lens: torch.Tensor | None = None,
        cp: tuple[int, int, int] = (1, 0, 1),
    ) -> torch.Tensor:
        """Run the decode over a plan of the same lengths.

        Args:
            q: ``[requests * qlen, heads, 576]`` FP8 e4m3, contiguous, 16-byte
                aligned.
            cache: ``[num_blocks, block_size, 576]`` FP8; block_size a multiple of 64,
                the block stride a multiple of 16 bytes.
            block_table: int32 ``[requests, max_blocks]``, rows may be strided.
            seq_lens: int32 ``[requests]``, KV lengths of this rank in tokens.
            softmax_scale: Factor of the scores (with the query's and cache's scales).
            output_scale: Factor of the output (the scale of V).
            counts: The plan's counts.
            work: The plan's work list.
            workspace: Scratch, at least ``workspace_bytes``, 128-byte aligned.
            lse: fp32 ``[requests * qlen, heads]``, written with the log2 LSE.
            causal_lens: int32 ``[requests]``, lengths over all ranks; needed under
                DCP with a causal mask, else ``seq_lens``.
            cp: DCP world size, rank and interleave in tokens.

        Returns:
            ``[requests * qlen, heads, 512]`` bf16.

        """
        world, rank, interleave = cp
        assert world == 1 or not self.causal or causal_lens is not None, cp
        self._check_tensors(q, cache, block_table, seq_lens, workspace)
        bounds = seq_lens if causal_lens is None else causal_lens

        out = torch.empty(
            (q.shape[0], self.heads, LATENT), dtype=torch.bfloat16, device=q.device
        )
        partials = workspace.data_ptr()
        partial_lse = partials + self._partial_bytes
        lse_ptr = None if lse is None else lse.data_ptr()
        stream = _stream(self.device)
        self._decode(
            q.data_ptr(), cache.data_ptr(), block_table.data_ptr(), seq_lens.data_ptr(),
            bounds.data_ptr(), work.data_ptr(), partials, partial_lse, out.data_ptr(),
            lse_ptr or 0, cache.shape[0], cache.shape[1], cache.stride(0),
            block_table.stride(0), block_table.shape[1], self.groups, self.heads,
            self.qlen, self.geometry.row_chunks, lse_ptr is not None, world, rank,
            interleave, softmax_scale * LOG2_E, output_scale, stream,
        )  # fmt: skip
        self._combine(
            partials,
            partial_lse,
            counts.data_ptr(),
            work.data_ptr(),
            out.data_ptr(),
            lse_ptr,
            self.rows,
            output_scale,
            stream,
        )
        return out

    def _check_tensors(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """Assert what ``decode`` says of its tensors."""
        requests = block_table.shape[0]
        _, block_size, width = cache.shape
        assert q.shape == (requests * self.qlen, self.heads, HEAD_DIM), q.shape
        assert q.is_contiguous() and q.element_size() == 1, (q.stride(), q.dtype)
        assert q.data_ptr() % QUERY_ALIGNMENT == 0, q.data_ptr()
        assert cache.element_size() == 1 and width == HEAD_DIM, (cache.dtype, width)
        assert cache.stride()[1:] == (HEAD_DIM, 1), cache.stride()
        assert block_size % TILE_TOKENS == 0, block_size
        assert cache.stride(0) % 16 == 0, cache.stride()
        assert block_table.stride(1) == 1, block_table.stride()
        assert block_table.dtype == seq_lens.dtype == torch.int32
        assert seq_lens.shape[0] == requests, (seq_lens.shape, requests)
        scratch_bytes = workspace.numel() * workspace.element_size()
        assert scratch_bytes >= self.workspace_bytes, scratch_bytes


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream
