# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time our sparse MLA decodes on Hopper, beside FlashInfer FA3.

    python benchmark_flashinfer_mla_sparse_sm90.py [--cache bf16] [--json FILE]
    python benchmark_flashinfer_mla_sparse_sm90.py --tune [--cache bf16] [--json FILE]

Times are microseconds of a layer: a CUDA graph of 12 launches, which walk 4 copies of
the cache as layers do, median of 7 replays. TB/s counts each gathered byte once. What
our kernel wrote is compared with float64; a wrong result is marked, and the exit status
of a run without ``--tune`` is then 1.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import math
import multiprocessing
import statistics
import sys
import time
import types
from pathlib import Path

import torch

MODULE = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_"


def load_alone(cache: str):
    """Load the kernels' files without vLLM, where only torch and Triton are."""
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    for name in ("vllm", "vllm.triton_utils", "vllm.utils", "vllm.utils.math_utils"):
        sys.modules[name] = types.ModuleType(name)
    parent = sys.modules["vllm.triton_utils"]
    parent.__dict__.update(gl=gl, gluon=gluon, triton=triton, LOG2E=math.log2(math.e))
    parent.__dict__["HAS_TRITON"] = True
    helpers = sys.modules["vllm.utils.math_utils"].__dict__
    helpers["cdiv"] = lambda a, b: -(a // -b)
    helpers["next_power_of_2"] = lambda n: 1 << max(n - 1, 0).bit_length()
    for name in ("decode", cache):
        name = MODULE + name
        path = Path(__file__).parents[2] / (name.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


class Kernel:
    """The decode over one type of cache."""

    def __init__(self, cache: str, alone: bool):
        module = load_alone(cache) if alone else importlib.import_module(MODULE + cache)
        self.decode = getattr(module, f"Sparse{cache.capitalize()}Decode")
        self.dtype = self.decode.cache_dtype
        self._tile = module.Tile

    def tile(self, heads: int, values: tuple):
        """The tile of ``values``, the fields after the heads."""
        bytes_of = dict(value_bytes=self.dtype.itemsize)
        return self._tile(8 if heads <= 8 else 16, *values, **bytes_of)


DEVICE = "cuda"
LATENT, ROPE = 512, 64
WIDTH = 2048
POOL = 1 << 20
COPIES = 4
LAUNCHES = 12
REPLAYS = 7
FP8 = torch.float8_e4m3fn
ROWS = {
    "fp8": (1, 8, 32, 64, 133, 256, 512),
    "bf16": (1, 2, 4, 8, 16, 32, 64, 133),
}
MAX_ERROR = 0.004
"""Of the output's norm, against float64: bf16's rounding is 0.0017."""
TUNE_SPLITS = {
    1: (16, 32, 64),
    2: (32, 64),
    4: (16, 32, 64),
    8: (8, 16, 32, 64),
    16: (8, 16, 32),
    32: (4, 8, 16),
    64: (2, 4, 8),
    133: (1, 2, 3, 4),
    256: (1, 2, 4),
    512: (1, 2),
}
# The fields of Tile after the heads.
FP8_TILES = (
    (64, 2, 4, 64, 16, 4),
    (64, 2, 4, 64, 32, 4),
    (64, 2, 4, 64, 32, 4, 32),
    (64, 2, 4, 64, 64, 4),
    (64, 2, 4, 128, 32, 4),
    (64, 1, 4, 64, 16, 4),
    (32, 2, 2, 64, 16, 4),
    (32, 2, 2, 64, 32, 4, 32),
    (128, 1, 4, 64, 32, 2),
    (128, 2, 8, 64, 32, 2),
)
BF16_TILES = (
    (64, 1, 4, 64, 16, 2),
    (64, 1, 4, 64, 16, 2, 32),
    (64, 1, 4, 64, 32, 2),
    (64, 1, 4, 128, 16, 2),
    (64, 1, 8, 64, 16, 2),
    (64, 2, 4, 64, 16, 1),
    (64, 2, 8, 64, 16, 1),
    (32, 2, 4, 64, 16, 2),
    (32, 4, 4, 64, 16, 1),
    (32, 4, 8, 64, 16, 1),
    (128, 1, 8, 64, 16, 1),
)
TUNE_TILES = dict(fp8=FP8_TILES, bf16=BF16_TILES)


def pools(dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Copies of a cache of random values; slot 0 holds NaN."""
    size = dim * dtype.itemsize
    first = torch.empty(POOL, size, dtype=torch.uint8, device=device).view(dtype)
    for chunk in first.split(1 << 16):
        chunk.copy_(torch.randn(chunk.shape, device=device))
    first.view(torch.uint8)[0] = 0xFF
    return [first] + [first.clone() for _ in range(COPIES - 1)]


class Inputs:
    """Queries and slots of ``rows`` rows, each with ``WIDTH`` valid slots."""

    def __init__(self, rows: int, heads: int, rope: int, device: str):
        shape = dict(dtype=torch.bfloat16, device=device)
        self.q_nope = torch.randn(rows, heads, LATENT, **shape)
        self.q_pe = torch.randn(rows, heads, rope, **shape) if rope else None
        self.slots = torch.randint(
            1, POOL, (rows, WIDTH), dtype=torch.int32, device=device
        )
        self.lens = torch.full((rows,), WIDTH, dtype=torch.int32, device=device)
        self.scale = (LATENT + rope) ** -0.5
        self.out = torch.empty(rows, heads, LATENT, **shape)

    def call(self, decoder, cache: torch.Tensor) -> None:
        """One layer."""
        decoder.decode(
            self.q_nope, self.q_pe, cache, self.slots, self.lens, self.scale, 1.0,
            self.out,
        )  # fmt: skip

    def error(self, cache: torch.Tensor) -> float:
        """Largest relative error of ``out`` over rows and heads (first 8 rows)."""
        worst = 0.0
        for row in range(min(8, len(self.lens))):
            n = int(self.lens[row])
            kv = cache.view(torch.uint8)[self.slots[row, :n].long()]
            kv = kv.view(cache.dtype).double()
            q = self.q_nope[row].double()
            if self.q_pe is not None:
                q = torch.cat([q, self.q_pe[row].double()], 1)
            want = torch.softmax(q @ kv.T * self.scale, -1) @ kv[:, :LATENT]
            difference = (self.out[row].double() - want).norm(dim=-1)
            ratio = (difference / want.norm(dim=-1).clamp_min(1e-30)).max().item()
            worst = math.nan if math.isnan(ratio) else max(worst, ratio)
        return worst


def timed(call, caches: list[torch.Tensor]) -> tuple[float, float]:
    """Median and relative spread of a launch's time, in us, over graph replays."""
    for cache in caches:
        call(cache)
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            call(caches[i % len(caches)])
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.accelerator.synchronize()
        times.append(start.elapsed_time(end) / LAUNCHES * 1e3)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def compile_tile(job: tuple) -> str | None:
    """Compile one variant into Triton's cache; the error's text if it fails."""
    cache, alone, heads, rope, values = job
    try:
        kernel = Kernel(cache, alone)
        tile = kernel.tile(heads, values)
        for splits in (1, 2):
            decoder = kernel.decode(
                2, heads, rope, WIDTH, DEVICE, tile=tile, splits=splits
            )
            decoder.warm_up()
        torch.accelerator.synchronize()
    except Exception as error:  # noqa: BLE001 - one variant must not stop the rest
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def checked(kernel, tile, heads: int, rope: int, cache: torch.Tensor) -> float:
    """Largest error of a variant over ragged lengths, alone and split."""
    worst = 0.0
    for splits in (1, 2, 7, 32):
        inputs = Inputs(6, heads, rope, DEVICE)
        lens = torch.tensor([0, 1, 63, 65, 1000, WIDTH], dtype=torch.int32)
        inputs.lens.copy_(lens)
        for row, n in enumerate(lens.tolist()):
            inputs.slots[row, n:] = -1
        decoder = kernel.decode(6, heads, rope, WIDTH, DEVICE, tile=tile, splits=splits)
        inputs.out.fill_(math.nan)
        inputs.call(decoder, cache)
        if not (inputs.out[0] == 0).all():
            return math.nan
        error = inputs.error(cache)
        worst = math.nan if math.isnan(error) else max(worst, error)
    return worst


def tune(kernel, options, log) -> None:
    """Time every variant with every split count and print the best of each."""
    shapes = [(h, r) for r in options.rope for h in options.heads]
    tiles = TUNE_TILES[options.cache]
    jobs = [(options.cache, options.alone, h, r, t) for h, r in shapes for t in tiles]
    start = time.time()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as executor:
        failed = dict(zip(jobs, executor.map(compile_tile, jobs)))
    print(f"compiled {len(jobs)} variants in {time.time() - start:.0f} s", flush=True)
    columns = "".join(f"{f'{n} rows':>12}" for n in options.rows)
    for rope in options.rope:
        caches = pools(LATENT + rope, kernel.dtype, DEVICE)
        for heads in options.heads:
            print(f"\nheads {heads}, rope {rope}: us (splits)")
            print(f"{'tile':30}{'error':>8}{columns}")
            for values in tiles:
                name = "{} {} {} {}/{} {}".format(*values) + str(values[6:] or "")
                shape = (heads, rope, values)
                reason = failed[(options.cache, options.alone, *shape)]
                if reason is None:
                    try:
                        tune_tile(kernel, *shape, options.rows, caches, name, log)
                    except Exception as error:  # noqa: BLE001 - go on with the next
                        reason = f"{type(error).__name__}: {str(error)[:200]}"
                if reason is not None:
                    print(f"{name:30} {reason}", flush=True)
                    log(dict(heads=heads, rope=rope, tile=values, failed=reason))
        del caches


def tune_tile(kernel, heads, rope, values, rows_to_try, caches, name, log) -> None:
    """Check and time one variant; print its line of the table."""
    tile = kernel.tile(heads, values)
    error = checked(kernel, tile, heads, rope, caches[0])
    line = f"{name:30}{error:8.4f}"
    if not error < MAX_ERROR:
        line += "  WRONG"
    for rows in rows_to_try:
        inputs = Inputs(rows, heads, rope, DEVICE)
        found = []
        for splits in TUNE_SPLITS[rows]:
            decoder = kernel.decode(
                rows, heads, rope, WIDTH, DEVICE, tile=tile, splits=splits
            )
            us, spread = timed(lambda c, d=decoder, x=inputs: x.call(d, c), caches)
            found.append((us, splits))
            log(
                dict(
                    heads=heads, rope=rope, tile=values, rows=rows, splits=splits,
                    us=round(us, 2), spread=round(spread, 3), error=error,
                )
            )  # fmt: skip
        us, splits = min(found)
        line += f"{f'{us:.1f} ({splits})':>12}"
    print(line, flush=True)


class FlashInfer:
    """FlashInfer FA3 with page size 1: a row is a request, its slots the page table."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype):
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        rows, heads = inputs.q_nope.shape[:2]
        self.inputs = inputs
        self.scales = {}
        if dtype == FP8:
            self.scales = dict(ckv_scale=1.0, kpe_scale=1.0)
        make = dict(dtype=torch.int32)
        starts = torch.arange(rows + 1, **make)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        self.wrapper = BatchMLAPagedAttentionWrapper(
            workspace,
            qo_indptr=torch.zeros(rows + 1, device=DEVICE, **make),
            kv_indptr=torch.zeros(rows + 1, device=DEVICE, **make),
            kv_indices=torch.zeros(rows * WIDTH, device=DEVICE, **make),
            kv_len_arr=torch.zeros(rows, device=DEVICE, **make),
            use_cuda_graph=True,
            backend="fa3",
        )
        rope = 0 if inputs.q_pe is None else ROPE
        self.wrapper.plan(
            starts, starts * WIDTH, inputs.slots.flatten(),
            torch.full((rows,), WIDTH, **make), heads, LATENT, rope, 1, False,
            inputs.scale, q_data_type=torch.bfloat16, kv_data_type=dtype,
        )  # fmt: skip

    def call(self, cache: torch.Tensor) -> None:
        """One layer."""
        pool = cache.unsqueeze(1)
        q_pe = self.inputs.q_pe
        if q_pe is None:
            q_pe = self.inputs.q_nope[..., :0]
        self.inputs.out.copy_(
            self.wrapper.run(
                self.inputs.q_nope, q_pe, pool[..., :LATENT], pool[..., LATENT:],
                **self.scales,
            )
        )  # fmt: skip


def compare(kernel, options, log) -> int:
    """Time the chosen kernels, and FlashInfer where it can be imported.

    Returns:
        How many of our results were wrong.

    """
    wrong = 0
    peers = importlib.util.find_spec("flashinfer") is not None and not options.no_peers
    header = f"{'heads':>5}{'rope':>5}{'rows':>6}{'splits':>7}{'us':>9}{'TB/s':>7}"
    header += f"{'error':>8}"
    print(header + (f"{'FlashInfer':>12}" if peers else ""))
    for rope in options.rope:
        caches = pools(LATENT + rope, kernel.dtype, DEVICE)
        pooled = {}
        if peers:
            pooled["bf16"] = [c.to(torch.bfloat16) for c in caches]
        if peers and kernel.dtype == FP8:
            pooled["fp8"] = caches
        for heads in options.heads:
            for rows in options.rows:
                inputs = Inputs(rows, heads, rope, DEVICE)
                decoder = kernel.decode(rows, heads, rope, WIDTH, DEVICE)
                us, spread = timed(lambda c, d=decoder, x=inputs: x.call(d, c), caches)
                error = inputs.error(caches[0])
                rate = rows * WIDTH * caches[0][0].nbytes / us / 1e6
                splits = decoder.num_splits(rows)
                line = f"{heads:5}{rope:5}{rows:6}{splits:7}{us:9.1f}{rate:7.2f}"
                line += f"{error:8.4f}"
                good = error < MAX_ERROR  # False for NaN
                wrong += not good
                result = dict(
                    heads=heads, rope=rope, rows=rows, splits=splits, error=error,
                    us=round(us, 2), spread=round(spread, 3), TBs=round(rate, 3),
                )  # fmt: skip
                for name, pool in pooled.items():
                    try:
                        peer = FlashInfer(inputs, pool[0].dtype)
                        us, _ = timed(peer.call, pool)
                        line += f"{us:9.1f}"
                        result[f"flashinfer_{name}_us"] = round(us, 2)
                    except Exception as reason:  # noqa: BLE001 - a peer may not run
                        line += f"{'failed':>9}"
                        result[f"flashinfer_{name}_failed"] = str(reason)[:300]
                print(line if good else f"{line}  WRONG", flush=True)
                log(result)
        del caches, pooled
    return wrong


def main() -> int:
    """Parse the command line and run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tune", action="store_true", help="time every variant")
    parser.add_argument("--cache", choices=list(ROWS), default="fp8")
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rope", type=int, nargs="+", default=[ROPE, 0])
    parser.add_argument("--json", type=Path, help="write one JSON line a result")
    parser.add_argument("--jobs", type=int, default=8, help="compiling processes")
    parser.add_argument("--no-peers", action="store_true", help="without FlashInfer")
    parser.add_argument("--alone", action="store_true", help="without vLLM installed")
    options = parser.parse_args()
    lines: list[str] = []

    def log(result: dict) -> None:
        lines.append(json.dumps(result))
        if options.json:
            options.json.write_text("\n".join(lines) + "\n")

    options.rows = options.rows or ROWS[options.cache]
    kernel = Kernel(options.cache, options.alone)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if options.tune:
        tune(kernel, options, log)
        return 0
    return 1 if compare(kernel, options, log) else 0


if __name__ == "__main__":
    sys.exit(main())
