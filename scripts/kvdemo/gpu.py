# SPDX-License-Identifier: Apache-2.0
"""The batch on a Hopper GPU: the kernel's time and its distance from float64."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from .batch import HEAD_DIM, SOFTMAX_SCALE, Batch
from .reference import Attention, Error, ErrorSum, attend

BLOCK_SIZE = 64
REPEATS, LAUNCHES = 7, 10


@dataclass
class GpuRun:
    """What a run on the GPU gave.

    Attributes:
        name: The GPU.
        clusters: Thread-block clusters that run at once.
        plan_us: Median time of one plan, microseconds.
        decode_us: Median time of one decode (with its combine), microseconds.
        spread_us: Smallest and largest of the repeats of decode.
        error: Against float64 on the same quantised inputs.

    """

    name: str
    clusters: int
    plan_us: float
    decode_us: float
    spread_us: tuple[float, float]
    error: Error


def hopper() -> str | None:
    """Return None where a Hopper GPU can be used, else why not."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {major}.{minor}; the kernel needs 9.0"
    return None


def paged(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Put every request's rows into a paged cache on the GPU, blocks in random order.

    Unused rows hold FP8 NaN and unused table entries a huge id: a kernel that reads
    them can't stay unnoticed.

    Returns:
        Cache `[blocks, 64, 576]` FP8, block table int32 `[requests, width]`, and each
        request's rows `[length, 576]`.

    """
    blocks = [-(-n // BLOCK_SIZE) for n in batch.lengths]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1))
    cache = torch.full(
        (max(sum(blocks), 1), BLOCK_SIZE, HEAD_DIM), 0x7F, dtype=torch.uint8
    ).cuda()
    table = torch.full((len(blocks), max(max(blocks), 1)), 2**31 - 1, dtype=torch.int32)
    rows, at = [], 0
    for r, count in enumerate(blocks):
        ids = order[at : at + count]
        at += count
        table[r, :count] = ids.int()
        rows.append(batch.cache(r).cuda())
        padded = torch.full((count * BLOCK_SIZE, HEAD_DIM), 0x7F, dtype=torch.uint8)
        padded = padded.cuda()
        padded[: batch.lengths[r]] = rows[-1].view(torch.uint8)
        cache[ids.cuda()] = padded.view(count, BLOCK_SIZE, HEAD_DIM)
    return cache.view(torch.float8_e4m3fn), table.cuda(), rows


def _median_us(call) -> tuple[float, tuple[float, float]]:
    """Time a call as replays of a CUDA graph of several launches."""
    call()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    graph.replay()
    times = []
    for _ in range(REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAUNCHES)
    return statistics.median(times), (min(times), max(times))


def run(batch: Batch) -> GpuRun:
    """Plan and decode the batch on the current GPU, and compare with float64."""
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import core

    device = torch.device("cuda", torch.cuda.current_device())
    requests = len(batch.lengths)
    clusters = core.max_active_clusters(device)
    cache, table, rows = paged(batch)
    q = torch.cat([batch.query(r) for r in range(requests)]).cuda()
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=device)
    kernel = core.KvBalancedMla(batch.heads, batch.qlen, requests, batch.causal, device)
    work_len = core.work_list_len(batch.heads, batch.qlen, requests, clusters)
    counts = torch.zeros(core.counts_len(), dtype=torch.int32, device=device)
    work = torch.zeros(work_len, dtype=torch.int32, device=device)
    scratch = torch.empty(
        core.workspace_bytes(batch.heads, batch.qlen, requests),
        dtype=torch.uint8,
        device=device,
    )
    lse = torch.empty(len(q), batch.heads, device=device)

    def plan() -> None:
        kernel.plan(lengths, counts, work)

    def decode() -> torch.Tensor:
        return kernel.decode(
            q, cache, table, lengths, SOFTMAX_SCALE, 1.0, counts, work, scratch, lse=lse
        )

    plan()
    out = decode()
    torch.accelerator.synchronize()
    errors = ErrorSum()
    for r in range(requests):
        span = slice(r * batch.qlen, (r + 1) * batch.qlen)
        got = Attention(out[span].float().cpu(), lse[span].cpu())
        length = batch.lengths[r]
        errors.add(got, attend(batch, r, rows[r], 0, length, torch.float64))
    del rows
    plan_us, _ = _median_us(plan)
    decode_us, spread = _median_us(decode)
    name = torch.cuda.get_device_name()
    return GpuRun(name, clusters, plan_us, decode_us, spread, errors.result())
