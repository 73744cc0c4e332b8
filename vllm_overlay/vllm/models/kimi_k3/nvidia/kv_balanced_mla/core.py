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
    NUM_WARPGROUPS,
    TILE_TOKENS,
    DecodeGeometry,
    choose_geometry,
)

LOG2_E = math.log2(math.e)
MAX_HEADS = 1024
MAX_QLEN = 128
_SM90 = (9, 0)


def check_shape(heads: int, qlen: int, device: torch.device | None = None) -> str | None:
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
    return _clusters_of(torch.cuda.current_device() if index is None else index)


def worker_groups(geometry: DecodeGeometry, clusters: int) -> int:
    """Groups that the plan balances: clusters (or single blocks) per row chunk."""
    workers = clusters * (2 if geometry.cluster == 1 else 1)
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
    rows = 2 * groups * geometry.rows
    return rows * LATENT * 4, -(-rows * 4 // 128) * 128


def workspace_bytes(
    heads: int, qlen: int, max_requests: int, device: torch.device | None = None
) -> int:
    """Bytes of split-KV scratch in the worst case.

    Two partial slots a worker group, ``rows x (512 + 1)`` fp32 each: bounded by the
    device, not by the batch or its lengths (groups x row chunks never exceeds the
    workers).

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


def _pointer(dtype, address: int, align: int):
    from cutlass.cute import AddressSpace
    from cutlass.cute.runtime import make_ptr

    return make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)


@functools.cache
def compile_decode(geometry: DecodeGeometry, causal: bool):
    """Compile one shape's main kernel (cached by its hashable facts)."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64, Uint32
    from cutlass.cute.runtime import make_fake_stream

    from .sm90.decode_kernel import FP8, DecodeKernel

    assert cutlass  # imported for its side effects on the DSL's state
    p = functools.partial(_pointer, address=4096)
    return cute.compile(
        DecodeKernel(geometry, causal),
        p(Uint32, align=16), p(FP8, align=16),
        p(Int32, align=4), p(Int32, align=4), p(Int32, align=4), p(Int32, align=8),
        p(Float32, align=16), p(Float32, align=4), p(Uint32, align=16),
        p(Float32, align=4),
        Int32(1), Int32(64), Int64(64 * HEAD_DIM), Int32(1), Int32(1), Int32(0),
        Int32(1), Int32(0), Int32(1), Float32(1.0), Float32(1.0), make_fake_stream(),
    )  # fmt: skip
