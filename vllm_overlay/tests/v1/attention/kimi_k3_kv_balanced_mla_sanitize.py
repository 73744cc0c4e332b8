# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One tiny step of the KV-balanced MLA decode, to be run under compute-sanitizer.

    compute-sanitizer python kimi_k3_kv_balanced_mla_sanitize.py --tile 0

Planner, decode and combine of one tile, once. Inputs are made on the CPU, so that few
kernels but ours run. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an
allocation of its own and the tool sees accesses just behind it. ``--break`` hands over
an LSE that is too short: a tool that works reports it. ``--every-lane`` is for
racecheck: it follows a barrier only for the threads that arrive at it, and the kernel
lets one lane arrive for its warp, behind a warp barrier.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_kimi_k3_kv_balanced_mla_kernel as kernel_test  # noqa: E402

core = kernel_test.core
HEADS_OF_TILE = (12, 31, 48, 63, 95, 127)
"""One query token's heads on each of ``config.TILES``, most with spare rows."""
LENGTHS = [0, 1, 65, 129, 1500, 4500]
BLOCK = 64


def inputs(heads: int, block_pad: int = 64):
    """Query, strided cache, block table and lengths, made on the CPU."""
    generator = torch.Generator().manual_seed(heads)
    blocks = [-(-n // BLOCK) for n in LENGTHS]
    stride = BLOCK * kernel_test.DIM + block_pad
    pool = torch.full((sum(blocks), stride), kernel_test.NAN_BYTE, dtype=torch.uint8)
    cache = pool[:, : BLOCK * kernel_test.DIM].view(-1, BLOCK, kernel_test.DIM)
    table = torch.full((len(LENGTHS), max(blocks)), kernel_test.HUGE_BLOCK)
    order = torch.randperm(sum(blocks), generator=generator).tolist()
    for r, (n, count) in enumerate(zip(LENGTHS, blocks)):
        for b in range(count):
            page = order.pop()
            table[r, b] = page
            used = min(BLOCK, n - b * BLOCK)
            rows = torch.randn(used, kernel_test.DIM, generator=generator)
            cache[page, :used] = rows.to(kernel_test.FP8).view(torch.uint8)
    shape = (len(LENGTHS), heads, kernel_test.DIM)
    q = torch.randn(shape, generator=generator).to(kernel_test.FP8)
    on_device = pool.to("cuda")
    cache = on_device[:, : BLOCK * kernel_test.DIM].view(-1, BLOCK, kernel_test.DIM)
    lens = torch.tensor(LENGTHS, dtype=torch.int32).to("cuda")
    return q.to("cuda"), cache.view(kernel_test.FP8), table.int().to("cuda"), lens


def step(heads: int, causal: bool, broken: bool) -> int:
    """Plan and decode once; returns the number of split requests."""
    q, cache, table, lens = inputs(heads)
    k = core.KvBalancedMla(heads, 1, len(LENGTHS), causal, torch.device("cuda"))
    clusters = core.max_active_clusters(torch.device("cuda"))
    size = core.work_list_len(heads, 1, len(LENGTHS), clusters)
    counts = torch.empty(core.counts_len(), dtype=torch.int32, device="cuda")
    work = torch.empty(size, dtype=torch.int32, device="cuda")
    workspace = torch.empty(k.workspace_bytes, dtype=torch.uint8, device="cuda")
    rows = 1 if broken else len(LENGTHS)
    lse = torch.empty(rows, heads, dtype=torch.float32, device="cuda")
    k.plan(lens, counts, work)
    out = k.decode(
        q, cache, table, lens, 0.04, 1.0, counts, work, workspace, lse=lse,
        causal_lens=lens, cp=(1, 0, 1),
    )  # fmt: skip
    torch.accelerator.synchronize()
    result = out.cpu()
    assert torch.isfinite(result).all() and (result[0] == 0).all()
    return int(counts.cpu()[0])


def main() -> int:
    """Run one tile."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--tile", type=int, default=0, choices=range(len(HEADS_OF_TILE)))
    made.add_argument("--full", action="store_true", help="without the causal mask")
    made.add_argument("--break", dest="broken", action="store_true")
    made.add_argument("--every-lane", action="store_true", help="see above")
    args = made.parse_args()
    reason = kernel_test.missing()
    if reason is not None:
        print(f"can't run: {reason}")
        return 2
    if args.every_lane:
        package = core.__name__.rpartition(".")[0]
        kernel = importlib.import_module(package + ".sm90.decode_kernel")
        kernel.DecodeKernel.every_lane_arrives = True
    splits = step(HEADS_OF_TILE[args.tile], not args.full, args.broken)
    print(f"ran tile {args.tile}, {splits} requests split")
    return 0 if splits else 3


if __name__ == "__main__":
    sys.exit(main())
