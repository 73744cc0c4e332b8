# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV-balanced MLA decode on Hopper against float64 (planner, decode and combine).

The reference attends in float64 over the same quantised query and cache, so what is
left is the kernel's own arithmetic: P in e4m3 and Hopper's FP8 accumulator. Cache
bytes that no request owns are NaN patterns, unused block-table entries huge ids.

Also a script, for a host with torch and the CuTe DSL only: it runs the same checks
without pytest.
"""

import functools
import inspect
import math
import random
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

try:
    from tests.v1.attention.kimi_k3_kv_balanced_mla_package import (
        core,
        hopper_missing,
    )
except ImportError:  # as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).parent))
    from kimi_k3_kv_balanced_mla_package import (  # type: ignore[no-redef]
        core,
        hopper_missing,
    )

try:
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

missing = hopper_missing
LATENT, ROPE = 512, 64
DIM = LATENT + ROPE
FP8 = torch.float8_e4m3fn
NAN_BYTE = 0x7F
HUGE_BLOCK = 1 << 30
DEVICE = "cuda"
# P in e4m3 has 3 mantissa bits: up to 6 % of one key's weight, 2 to 3 % on average,
# and less the more keys share the weight.
MAX_ERROR = 0.03
MAX_GAIN = 0.002
# Hopper keeps 13 bits while it sums a score in 18 steps: an error that grows with
# the largest score s of a row, as a multiple of 1 + |s|.
MAX_LSE_ERROR = 18 * 2**-13
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 500, 1023, 1024, 1025]

if pytest is not None:
    pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@functools.cache
def kernel(heads: int, qlen: int, causal: bool = True) -> "core.KvBalancedMla":
    return core.KvBalancedMla(heads, qlen, 1024, causal, torch.device(DEVICE))


@dataclass
class Case:
    """A batch: its query, its paged cache and where each request's rows are."""

    heads: int
    qlen: int
    lens: list[int]
    q: torch.Tensor  # [requests * qlen, heads, 576] FP8
    cache: torch.Tensor  # [blocks, block_size, 576] FP8, maybe strided
    table: torch.Tensor  # int32 [requests, max_blocks]
    scale: float

    @property
    def rows(self) -> int:
        return self.heads * self.qlen

    def keys(self, request: int, kv_len: int | None = None) -> torch.Tensor:
        """``[kv_len, 576]`` float64 rows of a request."""
        kv_len = self.lens[request] if kv_len is None else kv_len
        blocks = -(-kv_len // self.cache.shape[1])
        rows = self.cache[self.table[request, :blocks].long()]
        return rows.reshape(-1, DIM)[:kv_len].view(FP8).double()


def make_case(
    heads: int,
    qlen: int,
    lens: list[int],
    block_size: int = 64,
    block_pad: int = 0,
    mean: float = 0.3,
    sink: bool = False,
    score_std: float = 1.5,
    seed: int = 0,
) -> Case:
    """Random latents of std 1 and the given mean; scores of ``score_std`` log2 units.

    Args:
        heads: Query heads of one token.
        qlen: Query tokens of one request.
        lens: KV lengths.
        block_size: Tokens of one block.
        block_pad: Bytes between a block's end and the next one's start.
        mean: Mean of the latent.
        sink: Give request's key 0 half of the weight of every row.
        score_std: Standard deviation of the scores in log2 units.
        seed: Seed of everything drawn.

    """
    gen = torch.Generator(DEVICE).manual_seed(seed)
    blocks = [max(-(-n // block_size), 1) for n in lens]
    total = sum(blocks) + 1
    stride = block_size * DIM + block_pad
    pool = torch.full((total, stride), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    cache = pool[:, : block_size * DIM].view(total, block_size, DIM)
    step = max(1, (1 << 28) // (block_size * DIM))
    for i in range(0, total, step):
        part = cache[i : i + step]
        value = torch.randn(part.shape, device=DEVICE, generator=gen)
        value[..., :LATENT] += mean
        part.copy_(value.to(FP8).view(torch.uint8))
    order = torch.randperm(total - 1, device=DEVICE, generator=gen) + 1
    table = torch.full(
        (len(lens), max(blocks)), HUGE_BLOCK, dtype=torch.int32, device=DEVICE
    )
    cache[0] = NAN_BYTE
    used = 0
    for r, (n, count) in enumerate(zip(lens, blocks)):
        table[r, :count] = order[used : used + count].int()
        used += count
        if n % block_size or n == 0:
            cache[table[r, count - 1].long(), n % block_size :] = NAN_BYTE
        if n == 0:
            table[r] = HUGE_BLOCK
    q = torch.randn(len(lens) * qlen, heads, DIM, device=DEVICE, generator=gen)
    norm = math.sqrt(DIM)
    scale = score_std / (norm * math.log2(math.e))
    if sink:
        # Key 0 lies along a direction that every query row has in the rope part.
        for r, n in enumerate(lens):
            if n < 2:
                continue
            share = math.log2(n) + 0.5 * score_std**2 * math.log(2)
            value = torch.zeros(DIM, device=DEVICE)
            value[:LATENT] = (
                torch.randn(LATENT, device=DEVICE, generator=gen) + mean
            ) * 0.25
            value[LATENT] = 32.0
            q[r * qlen : (r + 1) * qlen, :, LATENT] = min(
                share / (scale * math.log2(math.e) * 32.0), 400.0
            )
            cache[table[r, 0].long(), 0] = value.to(FP8).view(torch.uint8)
            rows = cache[table[r, : blocks[r]].long()]
            rows[:, :, LATENT] = rows[:, :, LATENT] * 0
            rows[0, 0, LATENT] = torch.tensor(32.0).to(FP8).view(torch.uint8).item()
            cache[table[r, : blocks[r]].long()] = rows
            if n % block_size:
                cache[table[r, blocks[r] - 1].long(), n % block_size :] = NAN_BYTE
    return Case(heads, qlen, lens, q.to(FP8), cache.view(FP8), table, scale)


def bounds_of(case: Case, request: int, causal: bool, kv_len: int) -> torch.Tensor:
    """Visible keys of each row, ``[rows]``, without DCP."""
    token = torch.arange(case.rows, device=DEVICE) // case.heads
    bound = kv_len - case.qlen + 1 + token if causal else token * 0 + kv_len
    return bound.clamp(0, kv_len)


def attend(q, keys, bound, scale):
    """float64 attention of ``[rows, 576]`` over ``keys``.

    Returns:
        Output, log2 LSE and the largest score (log2 units, absolute) of each row.

    """
    rows = q.shape[0]
    if keys.shape[0] == 0:
        out = torch.zeros(rows, LATENT, dtype=torch.float64, device=DEVICE)
        none = torch.full((rows,), -math.inf, dtype=torch.float64, device=DEVICE)
        return out, none, torch.zeros_like(none)
    score = q.double() @ keys.T * (scale * math.log2(math.e))
    index = torch.arange(keys.shape[0], device=DEVICE)
    # Partial sums of q k walk farther than their end: three standard deviations.
    walk = (q.double().square() @ keys.T.square()).sqrt() * (
        3 * scale * math.log2(math.e)
    )
    largest = torch.maximum(score.abs(), walk).amax(1)
    score.masked_fill_(index[None] >= bound[:, None], -math.inf)
    lse = torch.logsumexp(score * math.log(2), 1) / math.log(2)
    p = torch.exp2(score - torch.where(lse.isinf(), 0.0, lse)[:, None])
    return p @ keys[:, :LATENT], lse, largest


def run(
    case: Case, causal=True, lens=None, causal_lens=None, cp=(1, 0, 1), scales=(1, 1)
):
    """Plan and decode with every buffer poisoned first: output and log2 LSE."""
    k = kernel(case.heads, case.qlen, causal)
    lens = torch.tensor(case.lens if lens is None else lens, dtype=torch.int32).to(
        DEVICE
    )
    clusters = core.max_active_clusters(torch.device(DEVICE))
    counts = torch.full((core.counts_len(),), -7, dtype=torch.int32, device=DEVICE)
    size = core.work_list_len(case.heads, case.qlen, 1024, clusters)
    work = torch.full((size,), -7, dtype=torch.int32, device=DEVICE)
    scratch = core.workspace_bytes(case.heads, case.qlen, 1024)
    workspace = torch.full((scratch,), 0xFF, dtype=torch.uint8, device=DEVICE)
    lse = torch.full((case.q.shape[0], case.heads), math.nan, device=DEVICE)
    # The output's memory is taken from a block that was just filled with NaN.
    poison = torch.full((case.q.shape[0], case.heads, LATENT), math.nan, device=DEVICE)
    poison = poison.to(torch.bfloat16)
    del poison
    k.plan(lens, counts, work)
    out = k.decode(
        case.q, case.cache, case.table, lens, case.scale * scales[0], scales[1],
        counts, work, workspace, lse=lse,
        causal_lens=None if causal_lens is None
        else torch.tensor(causal_lens, dtype=torch.int32).to(DEVICE),
        cp=cp,
    )  # fmt: skip
    return out, lse


def compare(case: Case, out, lse, causal=True, requests=None):
    """Hold output and LSE against float64; returns (error, gain, LSE error)."""
    square = product = error = 0.0
    lse_error = 0.0
    out = out.view(len(case.lens), case.rows, LATENT)
    lse = lse.view(len(case.lens), case.rows)
    q = case.q.view(len(case.lens), case.rows, DIM)
    for r in range(len(case.lens)) if requests is None else requests:
        n = case.lens[r]
        want, want_lse, largest = attend(
            q[r], case.keys(r), bounds_of(case, r, causal, n), case.scale
        )
        got = out[r].double()
        assert torch.isfinite(got).all(), f"request {r} of length {n}: not finite"
        empty = want_lse.isinf()
        assert (lse[r].isinf() == empty).all(), f"request {r}: LSE of empty rows"
        assert (got[empty] == 0).all(), f"request {r}: output of empty rows"
        if not empty.all():
            gap = (lse[r].double() - want_lse).abs() / (1 + largest)
            lse_error = max(lse_error, gap[~empty].max().item())
        error += (got - want).square().sum().item()
        square += want.square().sum().item()
        product += (got * want).sum().item()
    if square == 0:
        return 0.0, 0.0, lse_error
    return math.sqrt(error / square), product / square - 1, lse_error


def check(case: Case, causal=True, requests=None, max_error=MAX_ERROR):
    out, lse = run(case, causal)
    error, gain, lse_error = compare(case, out, lse, causal, requests)
    text = (
        f"error {error:.5f}, gain {gain:+.5f}, lse {lse_error:.5f} "
        f"({case.heads} x {case.qlen}, {len(case.lens)} requests, causal {causal})"
    )
    assert error <= max_error, text
    assert lse_error <= MAX_LSE_ERROR, text
    return error, gain, lse_error


def test_lengths_around_every_border():
    for heads, qlen in [(12, 8), (12, 5), (12, 1), (16, 8), (3, 5), (1, 1), (7, 4)]:
        for causal in (True, False):
            check(make_case(heads, qlen, LENGTHS, seed=heads), causal)


def test_many_rows_take_several_chunks():
    for heads, qlen in [(96, 1), (96, 8), (128, 3), (48, 4)]:
        check(make_case(heads, qlen, [0, 5, 700, 4097]))


def test_odd_head_counts():
    for heads in (1, 2, 5, 17, 33, 47, 49, 63, 65, 97, 127, 128):
        check(make_case(heads, 1, [3, 130, 1000], seed=heads))


def test_batches_up_to_the_planner_limit():
    for requests in (1, 2, 65, 67, 133, 512, 1024):
        rng = random.Random(requests)
        lens = [rng.choice((0, 1, 64, 129, 300)) for _ in range(requests)]
        step = max(1, requests // 16)
        check(make_case(12, 8, lens), requests=range(0, requests, step))


def test_long_and_short_together():
    lens = [100_000] + [60 + 31 * i for i in range(40)] + [0, 0]
    check(make_case(12, 8, lens))


def test_block_sizes_and_padded_strides():
    for block_size, pad in [(64, 0), (64, 4096), (128, 16), (1536, 2048), (192, 64)]:
        case = make_case(12, 8, [0, 1, 65, 1500, 1537, 4000], block_size, pad)
        assert case.cache.stride(0) == block_size * DIM + pad
        check(case)


def test_repeated_blocks():
    case = make_case(12, 8, [640, 640, 320])
    case.table[1] = case.table[0]  # a shared prefix
    case.table[2, :5] = case.table[0, 3]  # one block, five times
    check(case)


def test_accuracy_at_any_length_and_mean():
    worst = 0.0
    for mean in (0.0, 0.25, 0.5, 2.0):
        for sink in (False, True):
            for lens in ([1] * 66, [2] * 66, [17] * 66, [300] * 66, [4096] * 66,
                         [32768] * 8, [131072], [1 << 20]):  # fmt: skip
                case = make_case(12, 8, lens, mean=mean, sink=sink)
                picked = None if len(lens) < 9 else range(0, 66, 3)
                _, gain, _ = check(case, requests=picked)
                worst = max(worst, abs(gain))
                text = f"gain {gain:+.5f}: mean {mean}, sink {sink}, lens {lens[:2]}"
                if "-v" in sys.argv:
                    print("   ", text, flush=True)
                # Neighbours of a sink under e4m3's smallest value would be 0.16 %.
                assert abs(gain) <= 0.75 * MAX_GAIN, text
    return f"largest gain {worst:.5f}"


def test_nearly_equal_scores():
    """e4m3 rounds equal probabilities alike; the divisor must be rounded with them."""
    worst = 0.0
    for score_std in (1e-4, 0.01, 0.05, 0.2, 0.5):
        for lens in ([100] * 66, [4096] * 66, [131072]):
            case = make_case(12, 8, lens, mean=0.5, score_std=score_std)
            picked = None if len(lens) < 9 else range(0, 66, 3)
            _, gain, _ = check(case, requests=picked, max_error=0.04)
            worst = max(worst, abs(gain))
            text = f"gain {gain:+.5f}: score_std {score_std}, lens {lens[:2]}"
            if "-v" in sys.argv:
                print("   ", text, flush=True)
            assert abs(gain) <= MAX_GAIN, text
    return f"largest gain {worst:.5f}"


def test_the_split_does_not_change_the_answer():
    alone = make_case(12, 8, [20_000], mean=0.5)
    out_alone, lse_alone = run(alone)
    full = make_case(12, 8, [20_000] * 66, mean=0.5, seed=3)
    full.q[:8] = alone.q.view(torch.uint8).view(FP8)
    blocks = -(-20_000 // 64)
    full.cache[full.table[0, :blocks].long()] = alone.cache[
        alone.table[0, :blocks].long()
    ]
    out_full, lse_full = run(full)
    gap = (
        out_full[:8].double() - out_alone.double()
    ).norm() / out_alone.double().norm()
    assert gap < 0.005, gap
    assert (lse_full[:8] - lse_alone).abs().max() < 0.002


def test_bit_equal_reruns_and_permuted_batch():
    lens = [5000, 0, 77, 20_000, 640, 3, 129, 9000]
    case = make_case(12, 8, lens)
    out, lse = run(case)
    for _ in range(20):
        again, lse_again = run(case)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16))
        assert torch.equal(lse, lse_again)
    # Requests that are not split anywhere (one piece each) can't depend on the order.
    lens = [640 + 64 * i for i in range(66)]
    case = make_case(12, 8, lens)
    order = torch.randperm(66, device=DEVICE)
    swapped = Case(
        12, 8, [lens[i] for i in order.tolist()],
        case.q.view(66, 8, 12, DIM)[order].reshape(-1, 12, DIM), case.cache,
        case.table[order], case.scale,
    )  # fmt: skip
    error, _, _ = compare(swapped, *run(swapped))
    assert error < MAX_ERROR


def shard(case: Case, world: int, rank: int, interleave: int) -> tuple[Case, list[int]]:
    """The cache of one DCP rank: positions p with (p // interleave) % world == rank."""
    lens = []
    kept = []
    for r, n in enumerate(case.lens):
        position = torch.arange(n, device=DEVICE)
        mine = position[(position // interleave) % world == rank]
        kept.append(case.keys(r)[mine].to(FP8))
        lens.append(len(mine))
    blocks = [max(-(-n // 64), 1) for n in lens]
    cache = torch.full((sum(blocks), 64, DIM), NAN_BYTE, dtype=torch.uint8).to(DEVICE)
    table = torch.full((len(lens), max(blocks)), HUGE_BLOCK, dtype=torch.int32)
    first = 0
    for r, (n, count) in enumerate(zip(lens, blocks)):
        flat = cache[first : first + count].view(-1, DIM)
        flat[:n] = kept[r].view(torch.uint8)
        if n:
            table[r, :count] = torch.arange(first, first + count)
        first += count
    part = Case(
        case.heads,
        case.qlen,
        lens,
        case.q,
        cache.view(FP8),
        table.to(DEVICE),
        case.scale,
    )
    return part, lens


def merge(outs, lses):
    """Merge shards by their log2 LSE, in float64."""
    lse = torch.stack(lses).double()
    top = lse.max(0).values
    weight = torch.exp2(lse - torch.where(top.isinf(), 0.0, top))
    total = weight.sum(0)
    out = (torch.stack(outs).double() * weight[..., None]).sum(0)
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    return out, torch.log2(total) + top


def test_dcp_shards_merge_to_the_whole():
    lens = [
        0,
        1,
        2,
        3,
        7,
        8,
        9,
        15,
        16,
        17,
        63,
        64,
        65,
        127,
        129,
        511,
        515,
        1024,
        4095,
        4097,
    ]
    for world in (2, 4, 8):
        for interleave in (1, 16, 64):
            for qlen in (1, 5, 8):
                case = make_case(12, qlen, lens, seed=world + interleave)
                outs, lses = [], []
                for rank in range(world):
                    part, local = shard(case, world, rank, interleave)
                    out, lse = run(
                        part, lens=local, causal_lens=lens, cp=(world, rank, interleave)
                    )
                    assert torch.isfinite(out).all()
                    assert (out[lse.isinf()] == 0).all()
                    outs.append(out)
                    lses.append(lse)
                out, lse = merge(outs, lses)
                error, gain, lse_error = compare(case, out, lse)
                text = f"world {world}, interleave {interleave}, q {qlen}: {error}"
                assert error < MAX_ERROR and lse_error < MAX_LSE_ERROR, text


def test_dcp_without_a_mask():
    lens = [0, 5, 64, 700]
    case = make_case(12, 5, lens)
    outs, lses = [], []
    for rank in range(4):
        part, local = shard(case, 4, rank, 1)
        out, lse = run(
            part, causal=False, lens=local, causal_lens=lens, cp=(4, rank, 1)
        )
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    error, _, lse_error = compare(case, out, lse, causal=False)
    assert error < MAX_ERROR and lse_error < MAX_LSE_ERROR


def test_scales():
    for softmax, output in ((0.25, 4.0), (4.0, 0.25), (1e-4, 1000.0)):
        case = make_case(12, 8, [5, 700, 3000])
        out, lse = run(case, scales=(softmax, output))
        case.scale *= softmax
        error, _, lse_error = compare(case, out.double() / output, lse)
        assert error < MAX_ERROR and lse_error < MAX_LSE_ERROR


def test_saturated_values_and_dominant_keys():
    case = make_case(12, 8, [64, 1000, 5000])
    case.cache.view(torch.uint8)[case.table[1, 3].long(), 5] = 0x7E  # 448 everywhere
    case.cache.view(torch.uint8)[case.table[2, 70].long(), 9] = 0xFE  # -448
    check(case, max_error=0.05)
    for score_std in (0.01, 6.0, 20.0):
        check(
            make_case(12, 8, [1, 64, 1000, 9000], score_std=score_std), max_error=0.05
        )


def test_latents_of_any_size_in_split_requests():
    """Partial outputs are fp16: e4m3's largest and smallest values pass through."""
    for size in (448.0, -448.0, 1.0, 2.0**-6, 2.0**-9):
        case = make_case(12, 8, [40_000, 131_072])
        byte = torch.tensor(size).to(FP8).view(torch.uint8).item()
        case.cache.view(torch.uint8)[..., :LATENT] = byte
        out, _ = run(case)
        # The mean of equal values, rounded to bf16.
        gap = (out.double() / size - 1).abs().max().item()
        assert gap <= 2**-8, (size, gap)


def test_graph_follows_lengths_and_live_requests():
    slots, longest = 16, 8192
    case = make_case(12, 8, [longest] * slots)
    k = kernel(12, 8)
    clusters = core.max_active_clusters(torch.device(DEVICE))
    lens = torch.zeros(slots, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(core.counts_len(), dtype=torch.int32, device=DEVICE)
    size = core.work_list_len(12, 8, 1024, clusters)
    work = torch.zeros(size, dtype=torch.int32, device=DEVICE)
    scratch = core.workspace_bytes(12, 8, 1024)
    workspace = torch.zeros(scratch, dtype=torch.uint8, device=DEVICE)
    lse = torch.empty(slots * 8, 12, device=DEVICE)
    table = case.table.clone()

    def step():
        k.plan(lens, counts, work)
        return k.decode(
            case.q,
            case.cache,
            table,
            lens,
            case.scale,
            1.0,
            counts,
            work,
            workspace,
            lse,
        )

    step()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for live, length in (
        (1, 64),
        (2, 8192),
        (15, 500),
        (16, 8191),
        (16, 1),
        (0, 0),
        (3, 64),
    ):
        now = [max(length - 37 * i, 1) for i in range(live)] + [0] * (slots - live)
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(case.table)
        for r, n in enumerate(now):
            table[r, -(-n // 64) :] = HUGE_BLOCK
        out.fill_(math.nan)
        lse.fill_(math.nan)
        workspace.fill_(0xFF)
        graph.replay()
        view = Case(12, 8, now, case.q, case.cache, table, case.scale)
        error, _, lse_error = compare(view, out, lse)
        assert error < MAX_ERROR and lse_error < MAX_LSE_ERROR, (live, length, error)


def test_caches_beyond_2_and_4_gib():
    for block_size, gib in ((64, 2), (64, 4), (1536, 2), (1536, 4)):
        stride = block_size * DIM
        first_beyond = (gib << 30) // stride + 1
        pool = torch.empty(
            (first_beyond + 3) * stride, dtype=torch.uint8, device=DEVICE
        )
        cache = pool.view(-1, block_size, DIM)
        small = make_case(12, 8, [block_size * 3 - 5], block_size)
        where = torch.tensor([first_beyond - 1, first_beyond, first_beyond + 2])
        cache[where.to(DEVICE)] = small.cache.view(torch.uint8)[
            small.table[0, :3].long()
        ]
        out, lse = run(small)
        table = where.int().view(1, 3).to(DEVICE)
        far = Case(12, 8, small.lens, small.q, cache.view(FP8), table, small.scale)
        out_far, lse_far = run(far)
        assert torch.equal(out, out_far) and torch.equal(lse, lse_far), (
            block_size,
            gib,
        )
        del pool, cache, far


def test_random_batches(seconds: float = 10.0):
    """As many random batches as fit: shapes, lengths, masks, blocks, means."""
    rng = random.Random(1)
    shapes = [(12, 8), (12, 5), (12, 1), (16, 8), (96, 1), (5, 3)]
    end = time.time() + seconds
    count, worst = 0, 0.0
    while time.time() < end or count < 6:
        heads, qlen = rng.choice(shapes)
        top = rng.choice((64, 300, 2000, 20_000))
        lens = [rng.randrange(top + 1) for _ in range(rng.randrange(1, 40))]
        case = make_case(
            heads, qlen, lens, rng.choice((64, 128, 1536)), rng.choice((0, 64)),
            rng.choice((0.0, 0.5)), score_std=rng.choice((0.5, 1.5, 3.0)), seed=count,
        )  # fmt: skip
        picked = rng.sample(range(len(lens)), min(6, len(lens)))
        error, _, _ = check(case, rng.random() < 0.7, picked, max_error=0.04)
        count, worst = count + 1, max(worst, error)
    return f"{count} batches, largest error {worst:.5f}"


def main() -> int:
    """Run the tests named on the command line, or all; returns the failures."""
    tests = {n: f for n, f in globals().items() if n.startswith("test_")}
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or list(tests)
    failed = 0
    for name in names:
        began = time.time()
        try:
            note = tests[name](
                *(
                    [60.0]
                    if "--soak" in sys.argv
                    and inspect.signature(tests[name]).parameters
                    else []
                )
            )
            print(f"PASSED {name} {time.time() - began:.1f} s {note or ''}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-2)
            if "CUDA" in str(error):
                break
    print(f"{len(names) - failed} passed, {failed} failed", flush=True)
    return failed


if __name__ == "__main__":
    reason = missing()
    sys.exit(f"can't run: {reason}" if reason else main())
