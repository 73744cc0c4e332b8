# SPDX-License-Identifier: Apache-2.0
"""The main job: one Kimi K3 decode step, planned, run and compared with float64.

On a Hopper GPU the kernel runs it, with its time. Elsewhere the same plan and work list
go through a CPU reference: each worker's segments alone, then the merge.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "build" / "kv_balance.png"
# A float32 CPU run must be this close to float64.
CPU_TOLERANCE = 1e-5
# The kernel rounds the output and its weights; the gain is the contract's bound.
GPU_TOLERANCE, GPU_GAIN = 0.05, 0.002


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    sys.path.insert(0, str(HERE))
    from kvdemo.batch import parse_lengths

    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument(
        "--lengths",
        type=parse_lengths,
        default=parse_lengths("131072,2048x63"),
        help="KV tokens of each request, TIMESx for repeats: 524288,2048x63 "
        "(default: 131072,2048x63)",
    )
    made.add_argument("--heads", type=int, default=12, help="query heads (default: 12)")
    made.add_argument(
        "--query-tokens", type=int, default=8, help="of each request (default: 8)"
    )
    made.add_argument(
        "--non-causal", action="store_true", help="every query token sees all KV"
    )
    made.add_argument(
        "--clusters",
        type=int,
        default=66,
        help="clusters of the GPU to plan for, where there is none (default: 66, a "
        "full H100 or H200)",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--picture", type=Path, default=PICTURE, help="PNG to write")
    made.add_argument(
        "--plan-only", action="store_true", help="plan and draw, don't decode"
    )
    made.add_argument("--cpu", action="store_true", help="don't use the GPU")
    return made


def _cpu_run(batch, work) -> bool:
    from kvdemo.work import decode

    print("decoding by the work list on the CPU, against float64 without a split")
    last = begin = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"  {done / max(total, 1):4.0%} of the KV", flush=True)

    errors, partials = decode(batch, work, progress)
    found = errors.result()
    print(f"  {partials} partials merged, {time.monotonic() - begin:.1f} s")
    print(f"  relative error {found.out:.1e} (allowed {CPU_TOLERANCE:.0e})")
    print(f"  log-sum-exp: at most {found.lse_log2:.1e} off (base 2)")
    return found.out <= CPU_TOLERANCE and found.lse_log2 <= 1e-4


def _gpu_run(batch) -> bool:
    from kvdemo import gpu
    from kvdemo.batch import HEAD_DIM, LATENT

    print("compiling and running the kernel on the GPU", flush=True)
    done = gpu.run(batch)
    kv_bytes = sum(batch.lengths) * HEAD_DIM
    flops = 2 * batch.rows * sum(batch.lengths) * (HEAD_DIM + LATENT)
    low, high = done.spread_us
    print(f"  {done.name}, {done.clusters} clusters")
    print(f"  plan    {done.plan_us:9.1f} us")
    print(
        f"  decode  {done.decode_us:9.1f} us ({low:.1f} to {high:.1f}): "
        f"{kv_bytes / done.decode_us / 1e6:.2f} TB/s, "
        f"{flops / done.decode_us / 1e6:.0f} TFLOP/s"
    )
    error = done.error
    print(
        f"  relative error {error.out:.4f} (allowed {GPU_TOLERANCE}), "
        f"gain {error.gain:+.4%} (allowed {GPU_GAIN:.1%}), "
        f"log-sum-exp at most {error.lse_log2:.1e} off (base 2)"
    )
    return error.out <= GPU_TOLERANCE and abs(error.gain) <= GPU_GAIN


def main() -> int:
    """Run the main job; return 0 when the result is as close as it must be."""
    made = parser()
    args = made.parse_args()
    for name, value, most in (
        ("--heads", args.heads, 1024),
        ("--query-tokens", args.query_tokens, 128),
        ("--clusters", args.clusters, 127),
    ):
        if not 1 <= value <= most:
            made.error(f"{name} is {value}; allowed are 1 to {most}")
    from kvdemo import gpu, picture
    from kvdemo.batch import Batch
    from kvdemo.work import check_cover, plan_batch

    why_not = "--cpu was given" if args.cpu else gpu.hopper()
    batch = Batch(
        args.lengths, args.heads, args.query_tokens, not args.non_causal, args.seed
    )
    print(
        f"{len(batch.lengths)} requests, {sum(batch.lengths)} KV tokens, "
        f"{batch.rows} rows a request ({batch.heads} heads x {batch.qlen} tokens)",
        flush=True,
    )
    print("importing vLLM", flush=True)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if why_not is not None:
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    work = plan_batch(batch, args.clusters)
    check_cover(work, batch.lengths)
    print(f"the plan: {work.groups} workers, {len(work.splits)} requests split")
    print(picture.bar_chart(work))
    unsplit = picture.whole_request_loads(batch.lengths, work.groups)
    print(
        f"  mean / largest load: {picture.evenness(work.loads):.3f} by this plan, "
        f"{picture.evenness(unsplit):.3f} with unsplit requests"
    )
    title = f"{len(batch.lengths)} requests, {sum(batch.lengths)} KV tokens"
    try:
        picture.save_png(work, batch.lengths, title, args.picture)
        print(f"  picture: {args.picture}")
    except ImportError:
        print("  no picture: matplotlib isn't installed")
    if args.plan_only:
        return 0
    if why_not is None:
        good = _gpu_run(batch)
    else:
        print(f"no kernel run: {why_not}")
        good = _cpu_run(batch, work)
    print("OK" if good else "FAILED: the result is too far from float64")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
