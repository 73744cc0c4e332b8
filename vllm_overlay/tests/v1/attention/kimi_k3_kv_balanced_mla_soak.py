# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Soak of the KV-balanced MLA decode: random batches against float64 until time is up.

    python kimi_k3_kv_balanced_mla_soak.py --tile 3 --seconds 90 --json out.json

Needs torch and the CuTe DSL only. One process takes one compiled tile; several may
share a GPU. Every batch draws heads, query tokens, lengths, mask, DCP rank, pages,
strides, scales, means and sinks anew; its number is its seed.
"""

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import test_kimi_k3_kv_balanced_mla_kernel as kernel_test  # noqa: E402
from kimi_k3_kv_balanced_mla_package import config as tiles  # noqa: E402

# A score of 3 log2 units of spread leaves few keys with weight; in a batch of few
# rows one key's rounding to e4m3 (at most 2**-4) may show undiminished.
MAX_ERROR = 0.04
MAX_ERROR_OF_FEW_ROWS = 2**-4 + 0.005
FEW_ROWS = 256
# The tensor core cuts each product of P V at 2**-13 of the largest one's power of two,
# downwards. About 2**-12 of V's size stays in the output whatever the length, which
# shows where many keys of mean 0 share the weight and the output itself is small.
V_BIAS = 3.5e-4
MAX_ROW_KEYS = 20_000_000  # rows x keys that the reference attends in one piece
MAX_TOKENS = 600_000
CHECKED_REQUESTS = 6
MAX_FAILURES = 5


@dataclasses.dataclass
class Draw:
    """What one batch is made of."""

    seed: int
    heads: int
    qlen: int
    causal: bool
    lens: list[int]
    totals: list[int]
    cp: tuple[int, int, int]
    block_size: int
    block_pad: int
    mean: float
    sink: bool
    score_std: float
    softmax_scale: float
    output_scale: float

    def __str__(self) -> str:
        shown = dataclasses.asdict(self)
        shown["lens"] = f"{len(self.lens)} of {min(self.lens)} to {max(self.lens)}"
        del shown["totals"]
        return ", ".join(f"{key}={value}" for key, value in shown.items())


def shapes_of(tile: Any) -> list[tuple[int, int]]:
    """Every (heads, query tokens) up to 128 x 8 that runs on a tile."""
    return [
        (heads, qlen)
        for heads in range(1, 129)
        for qlen in range(1, 9)
        if tiles.choose_geometry(heads, qlen).tile == tile
    ]


def local_len(total: int, cp: tuple[int, int, int]) -> int:
    """Positions below ``total`` that a rank holds."""
    world, rank, interleave = cp
    rounds, rest = divmod(total, world * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def draw(seed: int, shapes: list[tuple[int, int]]) -> Draw:
    """Draw a batch; the same seed and shapes give the same one."""
    rng = random.Random(seed)
    heads, qlen = rng.choice(shapes)
    causal = rng.random() < 0.7
    cp = (1, 0, 1)
    if rng.random() < 0.4:
        world = rng.choice((2, 3, 4, 8))
        interleave = rng.choice((1, 16, 64, rng.randint(2, 200)))
        cp = (world, rng.randrange(world), interleave)
    top = rng.choice((8, 64, 300, 2000, 2000, 20_000, 100_000))
    top = max(min(top, MAX_ROW_KEYS // (heads * qlen)), 1)
    requests = rng.choice((1, 2, rng.randint(3, 70), rng.randint(3, 300)))
    requests = max(min(requests, MAX_TOKENS // top), 1)
    kind = rng.choice(("uniform", "equal", "skew", "border"))
    totals = []
    for number in range(requests):
        total = rng.randint(0, top)
        if kind == "equal":
            total = top
        elif kind == "skew" and number:
            total = rng.randint(0, max(top // 50, 1))
        elif kind == "border":
            step = rng.choice((64, 128, 512, 1024, cp[0] * cp[2]))
            total = max(rng.randint(0, max(top // step, 1)) * step, 0)
            total = max(min(total, top) + rng.choice((-1, 0, 1, qlen)), 0)
        totals.append(0 if rng.random() < 0.05 else total * cp[0])
    sink = rng.random() < 0.2
    score_std = rng.choice((0.5, 1.5) if sink else (0.5, 1.5, 3.0))
    return Draw(
        seed=seed,
        heads=heads,
        qlen=qlen,
        causal=causal,
        lens=[local_len(total, cp) for total in totals],
        totals=totals,
        cp=cp,
        block_size=rng.choice((64, 64, 128, 192, 1536)),
        block_pad=rng.choice((0, 0, 16, 64, 4096)),
        mean=rng.choice((0.0, 0.3, 2.0)),
        sink=sink,
        score_std=score_std,
        softmax_scale=1.0 if sink else rng.choice((1.0, 1.0, 0.05, 3.0 / score_std)),
        output_scale=10 ** rng.uniform(-3, 3),
    )


def visible(d: Draw, request: int) -> torch.Tensor:
    """Local keys that each row of a request sees, ``[heads * qlen]``."""
    world, rank, interleave = d.cp
    local = torch.arange(d.lens[request], device=kernel_test.DEVICE)
    position = (local // interleave * world + rank) * interleave + local % interleave
    token = torch.arange(d.qlen, device=kernel_test.DEVICE)
    bound = d.totals[request] - d.qlen + 1 + token
    if not d.causal:
        bound = bound * 0 + d.totals[request]
    seen = torch.searchsorted(position, bound.clamp_min(0))
    return seen.repeat_interleave(d.heads)


def run_batch(d: Draw) -> tuple[float, float, float]:
    """Run a batch and hold it to float64.

    Returns:
        Relative error, gain and the largest LSE error (as a multiple of 1 + |score|).

    Raises:
        AssertionError: It does not hold.

    """
    case = kernel_test.make_case(
        d.heads, d.qlen, d.lens, d.block_size, d.block_pad, d.mean, d.sink,
        d.score_std, d.seed,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        causal=d.causal, causal_lens=d.totals, cp=d.cp,
        scales=(d.softmax_scale, d.output_scale),
    )  # fmt: skip
    out, lse = kernel_test.run(case, **options)
    assert torch.isfinite(out).all(), "output not finite"
    assert not lse.isnan().any() and not lse.isposinf().any(), "LSE not a number"
    if d.seed % 8 == 0:
        again, lse_again = kernel_test.run(case, **options)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), "other bits"
    rng = random.Random(~d.seed)
    picked = rng.sample(range(len(d.lens)), min(CHECKED_REQUESTS, len(d.lens)))
    longest = max(range(len(d.lens)), key=d.lens.__getitem__)
    out = out.view(len(d.lens), case.rows, -1)
    lse = lse.view(len(d.lens), case.rows)
    q = case.q.view(len(d.lens), case.rows, -1)
    square = product = error = lse_error = 0.0
    picked = sorted({*picked, longest})
    for r in picked:
        want, want_lse, largest = kernel_test.attend(
            q[r], case.keys(r), visible(d, r), case.scale * d.softmax_scale
        )
        got = out[r].double() / d.output_scale
        empty = want_lse.isinf()
        assert torch.equal(lse[r].isinf(), empty), f"request {r}: LSE of empty rows"
        assert (got[empty] == 0).all(), f"request {r}: output of empty rows"
        if not empty.all():
            gap = (lse[r].double() - want_lse).abs() / (1 + largest)
            lse_error = max(lse_error, gap[~empty].max().item())
        error += (got - want).square().sum().item()
        square += want.square().sum().item()
        product += (got * want).sum().item()
    assert lse_error <= kernel_test.MAX_LSE_ERROR, f"LSE error {lse_error:.5f}"
    if square == 0:
        return 0.0, 0.0, lse_error
    relative = math.sqrt(error / square)
    few = case.rows * len(picked) < FEW_ROWS
    most = MAX_ERROR_OF_FEW_ROWS if few else MAX_ERROR
    values = len(picked) * case.rows * kernel_test.LATENT
    v_size = math.sqrt(1 + d.mean**2)
    most += V_BIAS * v_size / math.sqrt(square / values)
    assert relative <= most, f"error {relative:.5f}, allowed {most:.5f}"
    return relative, product / square - 1, lse_error


def soak(number: int, seconds: float, first_seed: int) -> dict[str, Any]:
    """Soak one tile; returns what came out."""
    tile = tiles.TILES[number]
    shapes = shapes_of(tile)
    found: dict[str, Any] = dict(
        tile=f"{tile.rows_per_cta}x{tile.cluster}", shapes=len(shapes), batches=0,
        requests=0, tokens=0, error=0.0, gain=0.0, lse_error=0.0, failures=[],
    )  # fmt: skip
    began = time.time()
    for causal in (True, False):
        kernel_test.kernel(*shapes[0], causal)
    found["compile_s"] = round(time.time() - began, 1)
    seed = first_seed
    while time.time() - began < seconds:
        d = draw(seed, shapes)
        seed += 1
        try:
            error, gain, lse_error = run_batch(d)
        except Exception as problem:
            found["failures"].append(f"{type(problem).__name__}: {problem} ({d})")
            print("FAILED", found["failures"][-1], flush=True)
            fatal = "CUDA" in str(problem) and "memory" not in str(problem)
            if fatal or len(found["failures"]) >= MAX_FAILURES:
                break
            continue
        found["batches"] += 1
        found["requests"] += len(d.lens)
        found["tokens"] += sum(d.lens)
        found["error"] = max(found["error"], error)
        found["gain"] = max(found["gain"], abs(gain))
        found["lse_error"] = max(found["lse_error"], lse_error)
    found["seconds"] = round(time.time() - began, 1)
    return found


def main() -> int:
    """Soak one tile; returns the number of failures."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--tile", type=int, default=0, choices=range(len(tiles.TILES)))
    made.add_argument("--seconds", type=float, default=120.0)
    made.add_argument("--seed", type=int, default=0, help="seed of the first batch")
    made.add_argument("--json", type=Path, help="where the result goes")
    args = made.parse_args()
    reason = kernel_test.missing()
    if reason is not None:
        print(f"can't run: {reason}")
        return 2
    found = soak(args.tile, args.seconds, args.seed + 1_000_000 * args.tile)
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    print(json.dumps({**found, "failures": len(found["failures"])}))
    return 1 if found["failures"] or not found["batches"] else 0


if __name__ == "__main__":
    sys.exit(main())
