# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FLASHINFER_MLA_SPARSE_SM90 on a Hopper GPU, against float64.

Under pytest: what the backend promises. As a script it runs the same checks part by
part, each with a time limit, and measures:

    python test_flashinfer_mla_sparse_sm90_gpu.py OUT_DIR [--stock FILE] [--only a,b]

``--stock`` names a copy of upstream's ``flashinfer_mla_sparse_sm90.py``, which is then
timed in the same process. Every cache is NaN but for the selected slots, so a kernel
that reads past a row's valid slots, or row 0, gives NaN.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 as ours

try:
    from tests.v1.attention import flashinfer_mla_sparse_sm90_utils as utils
except ImportError:  # as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).parent))
    import flashinfer_mla_sparse_sm90_utils as utils  # type: ignore[no-redef]

TOPK, WIDTH = 2048, 2176
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
DEVICE = torch.device("cuda:0")
# Output and LSE against float64 on the stored cache. Partial outputs are bf16.
MAX_ERROR, MAX_LSE_ERROR = 0.006, 5e-3


@contextlib.contextmanager
def reader(own):
    """A bf16 cache is read by our kernel (True), FlashInfer's (False), or as chosen."""
    chosen = ours.own_rows
    if own is not None:
        ours.own_rows = lambda heads: 4096 if own else 0
    try:
        yield
    finally:
        ours.own_rows = chosen


class Step:
    """One forward of one layer: builder, batch, selection, cache and query."""

    def __init__(
        self,
        query_lens,
        seq_lens,
        *,
        heads=16,
        rope=64,
        fp8=False,
        kpool=None,
        padded=0,
        k_scale=1.0,
        return_lse=False,
        max_tokens=None,
        module=ours,
        seed=0,
        own=None,
    ):
        rows = sum(query_lens) + padded
        self.kpool, self.fp8, self.rope = kpool or 1, fp8, rope
        self.k_scale = k_scale if fp8 else 1.0
        with reader(own):
            self.builder, self.layer = utils.make_builder(
                module,
                DEVICE,
                heads,
                rope,
                fp8=fp8,
                max_tokens=max_tokens or max(rows, 8),
                topk=TOPK,
                kpool=kpool,
                width=WIDTH,
                k_scale=k_scale,
                return_lse=return_lse,
            )
        self.random = torch.Generator().manual_seed(seed)
        self.device_random = torch.Generator(DEVICE).manual_seed(seed)
        q = torch.randn(rows, heads, utils.LATENT + rope, generator=self.random)
        self.q = q.to(DEVICE, torch.bfloat16)
        self.cache = None
        self.set_batch(query_lens, seq_lens)

    def set_batch(self, query_lens, seq_lens):
        """Another batch of at most as many rows; the rest is padding."""
        rows = self.q.shape[0]
        cam = utils.common_metadata(
            query_lens, seq_lens, rows - sum(query_lens), device=DEVICE
        )
        chosen, self.lengths = utils.select(
            cam, rows, WIDTH, TOPK, self.kpool, self.random
        )
        self.cam, self.chosen = cam, chosen.to(DEVICE)
        cache, slots = utils.make_cache(
            cam, self.chosen, self.rope, self.fp8, self.device_random, stride=2
        )
        self.slots = slots * self.k_scale
        nan = 0x7F if self.fp8 else float("nan")
        if self.cache is None:
            # A graph keeps the address, so leave room for later batches.
            blocks = max(cache.shape[0], 48 * rows if rows <= 256 else 0)
            shape = (blocks, 2, *cache.shape[1:])
            self.cache = cache.new_empty(shape)[:, 0]
        self.cache.fill_(nan)
        self.cache[: cache.shape[0]] = cache
        self.layer.impl.topk_indices_buffer.fill_(-1)
        self.layer.impl.topk_indices_buffer[:rows] = self.chosen

    def build(self):
        self.metadata = self.builder.build(0, self.cam)
        return self.metadata

    def forward(self):
        q = self.q[: self.metadata.num_mqa_rows]
        query = (q[..., : utils.LATENT], q[..., utils.LATENT :])
        impl = self.layer.impl
        return impl.forward_mqa(query, self.cache, self.metadata, self.layer)

    def planned(self):
        """The planned lengths, or None: only FlashInfer's kernel has a plan."""
        state = self.builder.state
        if self.fp8 or len(self.lengths) <= state.own_rows:
            return None
        return state.flashinfer.planner.row_lengths[: len(self.lengths)].tolist()

    def error(self, out, lse=None):
        """Largest error against float64, relative to the output's largest value."""
        want, want_lse = utils.reference(
            self.q, self.slots, self.chosen, self.cam, self.layer.impl.scale, 128
        )
        empty = torch.tensor(self.lengths, device=DEVICE) == 0
        assert bool((out[empty] == 0).all()), "a row without slots isn't 0"
        assert not bool(out.isnan().any()), "NaN: something unselected was read"
        if lse is not None:
            assert bool((lse[empty] == -torch.inf).all())
            assert (lse - want_lse)[~empty].abs().max().item() < MAX_LSE_ERROR
        return ((out.double() - want).abs().max() / want.abs().max()).item()


def around_topk():
    """Contexts at every edge: empty tile bounds, and all remainders of a pool of 4."""
    return [1, 2, 63, 64, 65, 128, 1000, *range(TOPK - 2, TOPK + 6), 2500, 4093, 4095]


def check_contexts(heads, rope, kpool, fp8=False, own=None):
    seq_lens = around_topk()
    step = Step([1] * len(seq_lens), seq_lens, heads=heads, rope=rope, kpool=kpool,
                fp8=fp8, padded=3, return_lse=True, own=own)  # fmt: skip
    step.build()
    error = step.error(*step.forward())
    assert error < MAX_ERROR, error
    assert step.planned() in (None, step.lengths)
    shape = {"heads": heads, "rope": rope, "kpool": kpool}
    return shape | {"fp8": fp8, "own": own, "error": error}


def check_speculative(fp8=False, own=None):
    """Rows of several tokens a request, straddling topk, and a long extend."""
    query_lens = [6] * 16 + [1, 3, 40]
    seq_lens = [TOPK - 4 + i for i in range(16)] + [7, 3, 2071]
    step = Step(query_lens, seq_lens, kpool=4, fp8=fp8, own=own)
    step.build()
    error = step.error(step.forward()[0])
    assert error < MAX_ERROR, error
    return {"fp8": fp8, "own": own, "rows": sum(query_lens), "error": error}


def check_many_rows(rows=1500):
    """Several planner programs; rows beyond a cluster each."""
    step = Step([1] * rows, [(i * 37) % 700 for i in range(rows)], heads=8)
    step.build()
    error = step.error(step.forward()[0])
    assert error < MAX_ERROR, error
    return {"rows": rows, "error": error}


def check_replay(heads, fp8=False, own=None, rows=200):
    """One captured forward serves other contexts and fewer live rows."""
    first = [(i * 131) % 3000 + 1 for i in range(rows)]
    step = Step([1] * rows, first, heads=heads, kpool=4, fp8=fp8, own=own)
    step.build()
    step.forward()
    torch.accelerator.synchronize()
    # The graph reads buffers that the runner refills.
    metadata = step.metadata
    blocks = torch.zeros(rows, 128, dtype=torch.int32, device=DEVICE)
    metadata.block_table = blocks
    requests = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    metadata.req_id_per_token = requests

    def refresh():
        table = step.cam.block_table_tensor
        blocks.zero_()
        blocks[: table.shape[0], : table.shape[1]] = table
        requests.copy_(step.builder.req_id_per_token_buffer[:rows])

    refresh()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = step.forward()
    errors = []
    for live in (rows, rows - 1, *(n for n in (133, 127, 64, 5, 1) if n < rows)):
        step.set_batch([1] * live, [(i * 97 + live) % 2600 for i in range(live)])
        step.build()
        refresh()
        out.fill_(float("nan"))
        graph.replay()
        errors.append(step.error(out))
    assert max(errors) < MAX_ERROR, errors
    return {"heads": heads, "fp8": fp8, "own": own, "rows": rows, "error": max(errors)}


def check_scale(k_scale, rope):
    """FP8 with a scale: latent and rope part are both multiplied by it."""
    step = Step([1] * 24, [500 + 100 * i for i in range(24)], heads=8, rope=rope,
                fp8=True, k_scale=k_scale)  # fmt: skip
    step.build()
    error = step.error(step.forward()[0])
    assert error < MAX_ERROR, error
    return {"k_scale": k_scale, "rope": rope, "error": error}


def check_short_rows(fp8=False, own=None):
    """A selection shorter than the lengths say: the counts decide, layer by layer."""
    step = Step([1] * 8, [2500] * 8, heads=8, fp8=fp8, own=own)
    step.build()
    full = step.error(step.forward()[0])
    whole = step.chosen
    step.chosen = whole.clone()
    step.chosen[:5, 40:] = -1
    step.chosen[5] = -1
    step.chosen[6, : WIDTH // 2] = -1
    step.lengths[5] = 0
    step.layer.impl.topk_indices_buffer[:8] = step.chosen
    error = step.error(step.forward()[0])
    # The next layer selects all again.
    step.chosen = whole
    step.lengths[5] = TOPK
    step.layer.impl.topk_indices_buffer[:8] = whole
    error = max(error, full, step.error(step.forward()[0]))
    assert error < MAX_ERROR, error
    return {"fp8": fp8, "own": own, "error": error}


def check_no_sync(kind, fp8=False, own=None):
    """``build`` waits for nothing, whatever decides the lengths."""
    query_lens = [1] * 64 if kind == "plain" else [6] * 32
    seq_lens = [900 + 37 * i for i in range(len(query_lens))]
    step = Step(query_lens, seq_lens, heads=8, kpool=4, fp8=fp8, own=own)
    device_lens = query_lens
    if kind == "adaptive":
        # The device split differs from the host's; the total is the same.
        device_lens = [11, 1] * 16
        starts = [0, *itertools.accumulate(device_lens)]
        step.cam.query_start_loc.copy_(torch.tensor(starts, dtype=torch.int32))
    if kind == "async":
        step.cam.seq_lens_cpu_upper_bound = step.cam.seq_lens_cpu_upper_bound + 60
    step.build()
    step.cam._token_to_req_indices_cache = None
    torch.accelerator.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.build()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chosen, step.lengths = utils.select(
        step.cam, step.q.shape[0], WIDTH, TOPK, step.kpool, step.random
    )
    assert step.planned() in (None, step.lengths)
    return {"kind": kind, "fp8": fp8, "own": own, "rows": step.q.shape[0]}


def check_zero_rows(own=None):
    step = Step([1] * 4, [9] * 4, heads=8, own=own)
    step.cam = utils.common_metadata([], [], device=DEVICE)
    step.build()
    out, _ = step.forward()
    assert out.shape[0] == 0
    return {"own": own}


def check_both_sides(heads=8):
    """One builder on either side of its limit: few rows, many, few again."""
    limit = ours.own_rows(heads)
    errors = []
    step = Step([1] * (limit + 5), [1] * (limit + 5), heads=heads)
    assert step.builder.state.own_rows == limit
    for rows in (limit, limit + 1, 1, limit + 5):
        step.q = step.q.new_empty(rows, *step.q.shape[1:]).normal_()
        step.set_batch([1] * rows, [(i * 97 + rows) % 2600 for i in range(rows)])
        step.build()
        errors.append(step.error(step.forward()[0]))
        assert step.planned() in (None, step.lengths)
    assert max(errors) < MAX_ERROR, errors
    return {"heads": heads, "limit": limit, "error": max(errors)}


# -- pytest ----------------------------------------------------------------------

HEADS_ROPE_KPOOL = [(8, 64, None), (16, 64, 1), (16, 0, 4), (64, 64, 4), (128, 64, 4)]


# (FP8, our own kernel): FlashInfer's on bf16, ours on bf16, ours on FP8.
READERS = {"bf16": (False, False), "bf16-own": (False, True), "fp8": (True, None)}
readers = pytest.mark.parametrize("fp8,own", READERS.values(), ids=READERS)


@readers
@pytest.mark.parametrize("heads,rope,kpool", HEADS_ROPE_KPOOL)
def test_contexts_around_topk(heads, rope, kpool, fp8, own):
    check_contexts(heads, rope, kpool, fp8, own)


@readers
def test_rows_of_one_request_straddle_topk(fp8, own):
    check_speculative(fp8, own)


def test_many_rows():
    check_many_rows()


@readers
@pytest.mark.parametrize("heads,rows", [(8, 200), (8, 8), (128, 200)])
def test_replay_with_other_contexts_and_fewer_rows(heads, rows, fp8, own):
    check_replay(heads, fp8, own, rows)


@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize("k_scale", [0.25, 0.5, 1.0, 4.0])
def test_fp8_scale_covers_latent_and_rope(k_scale, rope):
    check_scale(k_scale, rope)


@readers
def test_selection_shorter_than_its_length(fp8, own):
    check_short_rows(fp8, own)


@readers
@pytest.mark.parametrize("kind", ["plain", "async", "speculative", "adaptive"])
def test_build_does_not_synchronise(kind, fp8, own):
    check_no_sync(kind, fp8, own)


@pytest.mark.parametrize("own", [False, True])
def test_zero_rows(own):
    check_zero_rows(own)


@pytest.mark.parametrize("heads", [8, 16])
def test_both_sides_of_the_limit(heads):
    check_both_sides(heads)


# -- the script ------------------------------------------------------------------


def load_stock(path):
    """Upstream's module under another name."""
    spec = importlib.util.spec_from_file_location("stock_sparse_sm90", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def host_us(call, repeats=50):
    """Median host time of a call, from an idle device, in us."""
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.accelerator.synchronize()
    return statistics.median(times) * 1e6


def graph_us(call, launches=10, repeats=7):
    """Median device time of a captured call, in us."""
    call()
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.accelerator.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


class Timed:
    """A module's builder with a batch of full rows, for timing only."""

    def __init__(self, module, heads, fp8, max_tokens=8192, rope=64):
        begin = time.perf_counter()
        self.builder, self.layer = utils.make_builder(
            module, DEVICE, heads, rope, fp8=fp8, max_tokens=max_tokens, topk=TOPK,
            width=TOPK,
        )  # fmt: skip
        torch.accelerator.synchronize()
        self.start_s = time.perf_counter() - begin
        self.heads, self.rope = heads, rope
        # 1M slots: more than the L2 cache holds.
        pool = torch.randn(1 << 14, 64, utils.LATENT + rope, device=DEVICE)
        pool = pool.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        self.cache = pool.view(torch.uint8) if fp8 else pool

    def set_rows(self, rows):
        seq_len = 16384
        cam = utils.common_metadata([1] * rows, [seq_len] * rows, device=DEVICE)
        cam.block_table_tensor = torch.randint(
            1, 1 << 14, (rows, seq_len // 64), dtype=torch.int32, device=DEVICE
        )
        picks = torch.rand(rows, seq_len, device=DEVICE).argsort(-1)[:, :TOPK]
        buffer = self.layer.impl.topk_indices_buffer
        buffer[:rows] = picks.sort(-1).values.to(torch.int32)
        q = torch.randn(rows, self.heads, utils.LATENT + self.rope, device=DEVICE)
        q = q.to(torch.bfloat16)
        self.query = (q[..., : utils.LATENT], q[..., utils.LATENT :].contiguous())
        self.cam = cam
        self.other = utils.common_metadata(
            [1] * (rows + 1), [seq_len] * (rows + 1), device=DEVICE
        )

    def build(self, cam=None):
        cam = cam or self.cam
        # A fresh step: the mapping of tokens to requests isn't there yet.
        cam._token_to_req_indices_cache = None
        self.metadata = self.builder.build(0, cam)

    def build_both(self):
        """Two steps, the second with one row more: stock plans anew for each."""
        self.build(self.other)
        self.build()

    def forward(self):
        return self.layer.impl.forward_mqa(
            self.query, self.cache, self.metadata, self.layer
        )[0]


def measure(stock, heads, fp8, rows_list):
    """Lines of build and forward times: ours, and stock's if it is given."""
    sides = {"ours": ours} | ({"stock": stock} if stock else {})
    timed = {name: Timed(module, heads, fp8) for name, module in sides.items()}
    lines = []
    for rows in rows_list:
        line = {"heads": heads, "fp8": fp8, "rows": rows}
        for name, side in timed.items():
            torch.manual_seed(0)
            side.set_rows(rows)
            for _ in range(3):
                side.build()
            torch.accelerator.synchronize()
            base = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            line[f"build_us_{name}"] = round(host_us(side.build), 1)
            changed = host_us(side.build_both, 15) / 2
            line[f"build_changed_us_{name}"] = round(changed, 1)
            peak = torch.accelerator.max_memory_allocated() - base
            line[f"build_mib_{name}"] = round(peak / 2**20, 1)
            line[f"start_s_{name}"] = round(side.start_s, 2)
        for turn in range(3):  # in turn, so that a drift of the clock hits both
            for name, side in timed.items():
                line.setdefault(f"run_us_{name}", []).append(graph_us(side.forward))
        for name in timed:
            turns = line[f"run_us_{name}"]
            line[f"run_us_{name}"] = round(statistics.median(turns), 1)
            line[f"run_us_range_{name}"] = [round(min(turns), 1), round(max(turns), 1)]
        state = timed["ours"].builder.state
        if state.flashinfer is not None:
            side = timed["ours"]
            side.build()
            requests = side.metadata.req_id_per_token
            batch = (side.cam.query_start_loc, side.cam.seq_lens, rows, requests)
            plan = functools.partial(state.flashinfer.plan, rows, *batch)
            line["plan_us"] = round(graph_us(plan), 2)
            line["parent_build_us"] = round(parent_build_us(side), 1)
        print("  " + " ".join(f"{k}={v}" for k, v in line.items()), flush=True)
        lines.append(line)
    return lines


def parent_build_us(side):
    parent = ours.FlashInferMLASparseMetadataBuilder

    def build():
        side.cam._token_to_req_indices_cache = None
        parent.build(side.builder, 0, side.cam)

    return host_us(build)


ROWS = (1, 8, 16, 32, 64, 100, 133, 200, 512)
KINDS = ("plain", "async", "speculative", "adaptive")


def parts(stock):
    """Name, time limit in seconds, and what to run: a function and its arguments."""
    for kind, (fp8, own) in READERS.items():
        cases = [(*case, fp8, own) for case in HEADS_ROPE_KPOOL]
        yield f"contexts-{kind}", 150, check_contexts, cases
        yield f"speculative-{kind}", 60, check_speculative, [(fp8, own)]
        shapes = ((8, 200), (8, 8), (128, 200))
        replays = [(heads, fp8, own, rows) for heads, rows in shapes]
        yield f"replay-{kind}", 90, check_replay, replays
        yield f"no-sync-{kind}", 60, check_no_sync, [(k, fp8, own) for k in KINDS]
    yield "both-sides", 60, check_both_sides, [(8,), (16,)]
    for fp8 in (False, True):
        times = [(stock, 8, fp8, ROWS), (stock, 16, fp8, (1, 8, 64, 512))]
        yield f"time-{'fp8' if fp8 else 'bf16'}", 150, measure, times
    yield "many-rows", 40, check_many_rows, [()]
    yield "short-rows", 60, check_short_rows, list(READERS.values())
    yield "zero-rows", 20, check_zero_rows, [(False,), (True,)]
    scales = list(itertools.product((0.25, 0.5, 1.0, 4.0), (0, 64)))
    yield "scales", 120, check_scale, scales


def run_part(check, cases):
    """Run every case, also after one fails: lines and what failed."""
    lines, failures = [], []
    for case in cases:
        try:
            done = check(*case)
        except TimeoutError:
            raise
        except Exception as error:
            traceback.print_exc(limit=-4)
            failures.append(f"{case[-4:]}: {type(error).__name__}: {error}"[:300])
            if "CUDA error" in str(error):
                break
            continue
        lines += done if isinstance(done, list) else [done]
    return lines, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for results.json")
    parser.add_argument("--stock", type=Path, help="upstream's file, to time it too")
    parser.add_argument("--only", default="", help="parts, by prefix, with commas")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    args = parser.parse_args()
    wanted = tuple(filter(None, args.only.split(",")))
    args.out.mkdir(parents=True, exist_ok=True)
    stock = load_stock(args.stock) if args.stock else None
    results = {}

    def too_long(signum, frame):
        raise TimeoutError("the part's time is over")

    signal.signal(signal.SIGALRM, too_long)
    for name, limit, check, cases in parts(stock):
        if wanted and not name.startswith(wanted):
            continue
        if args.list:
            print(name, limit)
            continue
        begin = time.perf_counter()
        signal.alarm(limit)
        try:
            lines, failures = run_part(check, cases)
        except TimeoutError as error:
            lines, failures = [], [str(error)]
        finally:
            signal.alarm(0)
        state = f"FAILED: {'; '.join(failures)}" if failures else "ok"
        seconds = time.perf_counter() - begin
        results[name] = {"state": state, "seconds": round(seconds, 1), "lines": lines}
        errors = [line["error"] for line in lines if "error" in line]
        worst = f" worst error {max(errors):.4f}" if errors else ""
        print(f"{name:18} {seconds:6.1f} s {state}{worst}", flush=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        if "CUDA error" in state:
            # The context is gone: the rest in a fresh process.
            rest = [n for n, *_ in parts(stock) if n not in results]
            rest = [n for n in rest if not wanted or n.startswith(wanted)]
            if rest:
                again = [sys.executable, __file__, str(args.out / "after"), "--only"]
                again.append(",".join(rest))
                if args.stock:
                    again += ["--stock", str(args.stock)]
                sys.stdout.flush()
                os.execv(sys.executable, again)
    failed = [name for name, part in results.items() if part["state"] != "ok"]
    print(f"{len(results)} parts, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
