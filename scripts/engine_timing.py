#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time decode steps of vLLM's engine: this backend with an FP8 cache against stock.

One rank of Kimi K3 under TP8: 12 heads, 24 MLA layers, a small hidden size, random
weights, CUDA graphs. 64 requests decode at 32k tokens, at a lognormal(9.3, 1.2) mix
of lengths, and at 128 tokens (what a step costs without attention). A KV connector
counts the prompts as computed and fills the cache with random values, so nothing is
prefilled. `-8` runs verify 8 query tokens a step: vLLM's n-gram speculator, which
always drafts 7 tokens and needs no model. Needs vLLM 0.33.0, patched, and a Hopper GPU.

    python scripts/engine_timing.py --out DIR [--only ours-1,flash_attn-1] [--gpus 0,1]

Every engine measures alone on its GPU; engines that fit into its memory start at the
same time. Writes DIR/<run>.json and DIR/engine_timing.json, prints the tables and
exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_models  # noqa: E402
import engine_report  # noqa: E402
import engine_work  # noqa: E402
from engine_jobs import (  # noqa: E402
    Gate,
    Job,
    Jobs,
    begin,
    child_command,
    compile_bytecode,
    say,
)

OURS = "KIMI_K3_KV_BALANCED_MLA"
REQUESTS = 64
SPECULATIVE_TOKENS = 7
# Room for the steps of one measurement after the prompt.
ROOM_TOKENS = 1024

STOCK = {"flash_attn": "FLASH_ATTN_MLA", "flashmla": "FLASHMLA", "triton": "TRITON_MLA"}
RUNS: dict[str, dict[str, Any]] = {}
for _queries in (1, 8):
    RUNS[f"ours-{_queries}"] = dict(backend=OURS, cache="fp8", queries=_queries)
    for _name, _backend in STOCK.items():
        RUNS[f"{_name}-{_queries}"] = dict(
            backend=_backend, cache="auto", queries=_queries
        )
    # Not stock: the FP8 decode of vLLM behind this project's prefill.
    RUNS[f"flashmla-fp8-{_queries}"] = dict(
        backend="FLASHMLA", cache="fp8", queries=_queries
    )
DEFAULT_RUNS = ("ours-8", "flash_attn-8", "ours-1", "flash_attn-1", "flashmla-8")


def lengths(mix: str, requests: int = REQUESTS) -> list[int]:
    """Return the prompt lengths of a mix, in tokens."""
    if mix == "lognormal":
        rng = random.Random(1)
        return [max(256, int(rng.lognormvariate(9.3, 1.2))) for _ in range(requests)]
    return [{"32k": 32768, "short": 128}[mix]] * requests


MIXES = ("32k", "lognormal", "short")


def kv_cache_bytes(run: dict[str, Any], args: argparse.Namespace) -> int:
    """Return a KV cache size that holds the largest mix, rounded up generously.

    A page holds one layer's attention block of 576 values a token, or one KDA state of
    the same size; a request takes a KDA page for each query token.
    """
    value = 1 if run["cache"] == "fp8" else 2
    page = 2**20 * 0.65
    tokens = max(sum(lengths(mix)) for mix in MIXES) + REQUESTS * 2 * ROOM_TOKENS
    per_layer = tokens * 576 * value + REQUESTS * (run["queries"] + 2) * page
    return int(per_layer * (args.layers // 2) * 1.06)


def engine_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` for a run."""
    from engine_hooks import FILLED_CACHE

    run = RUNS[name]
    longest = max(n for mix in MIXES for n in lengths(mix)) + ROOM_TOKENS
    longest = -(-longest // 1024) * 1024
    model = engine_models.write_model(
        Path(args.out) / "models" / f"timing-{args.layers}",
        engine_models.target_config(args.layers, 12, args.k3_kda, longest),
    )
    size = REQUESTS * run["queries"]
    options: dict[str, Any] = dict(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=run["backend"],
        kv_cache_dtype=run["cache"],
        max_model_len=longest,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=kv_cache_bytes(run, args),
        enable_prefix_caching=False,
        kv_transfer_config=dict(FILLED_CACHE),
        compilation_config=dict(
            cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[size]
        ),
        enable_flashinfer_autotune=False,
    )
    if run["queries"] > 1:
        options["speculative_config"] = engine_work.ngram_drafts(run["queries"] - 1)
    return options


def percentile(values: list[float], share: float) -> float:
    """Return a value of the sorted list, nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Steps:
    """Drives an in-process engine step by step.

    Args:
        llm: A `vllm.LLM` whose engine core runs in this process.
        requests: Requests of a batch.

    """

    def __init__(self, llm: Any, requests: int = REQUESTS) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.engine = llm.llm_engine
        self.requests = requests
        self.params = SamplingParams(
            max_tokens=ROOM_TOKENS - 64,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.names: list[str] = []
        self.batches = 0

    def start(self, mix: str) -> int:
        """Add the requests of a mix and step until all of them decode."""
        rng = random.Random(11)
        pool = [rng.randrange(4, engine_models.VOCAB) for _ in range(8192)]
        prompts = [
            [pool[(i * 131 + j) % len(pool)] for j in range(n)]
            for i, n in enumerate(lengths(mix, self.requests))
        ]
        self.batches += 1
        self.names = [f"{mix}-{self.batches}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(self.names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params)
        for step in range(200):
            if len(self.step()[1]) == len(prompts):
                return step
        raise RuntimeError(f"{mix}: the requests never decoded together")

    def step(self) -> tuple[int, set[str]]:
        """Step until the engine returns something: new tokens, and of which requests.

        With asynchronous scheduling the first call only fills the queue.
        """
        for _ in range(4):
            outputs = self.engine.step()
            if outputs:
                break
        live = {o.request_id for o in outputs if o.outputs[0].token_ids}
        if any(o.finished for o in outputs):
            raise RuntimeError("a request ended inside the measurement")
        return sum(len(o.outputs[0].token_ids) for o in outputs), live

    def measure(self, steps: int) -> dict[str, Any]:
        """Time `steps` steps of all requests; seconds are wall-clock."""
        times, tokens = [], 0
        begin = last = time.perf_counter()
        for _ in range(steps):
            new, live = self.step()
            if len(live) != len(self.names):
                raise RuntimeError(f"{len(live)} of {len(self.names)} requests decoded")
            now = time.perf_counter()
            times.append(now - last)
            last, tokens = now, tokens + new
        return dict(
            steps=steps,
            median_us=round(percentile(times, 0.5) * 1e6, 1),
            p10_us=round(percentile(times, 0.1) * 1e6, 1),
            p90_us=round(percentile(times, 0.9) * 1e6, 1),
            mean_us=round((last - begin) / steps * 1e6, 1),
            tokens_per_s=round(tokens / (last - begin), 1),
            tokens_per_step_and_request=round(tokens / steps / len(self.names), 3),
        )

    def profile(self, steps: int) -> dict[str, Any]:
        """Trace `steps` steps; GPU time per step by kernel group, in us."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.accelerator.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                self.step()
            torch.accelerator.synchronize()
        kernels = []
        for event in trace.events():
            if "cuda" not in str(event.device_type).lower():
                continue
            span = event.time_range
            kernels.append((event.name, span.start, span.elapsed_us()))
        return engine_report.kernel_groups(kernels, steps)

    def stop(self) -> None:
        """Abort the requests and drain the engine."""
        self.engine.abort_request(self.names)
        for _ in range(20):
            if not self.engine.has_unfinished_requests():
                break
            self.engine.step()


def capacity(llm: Any) -> dict[str, Any]:
    """Return what vLLM says that its KV cache holds."""
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    cache = core.vllm_config.cache_config
    groups = [
        dict(
            spec=type(group.kv_cache_spec).__name__,
            layers=len(group.layer_names),
            block_tokens=group.kv_cache_spec.block_size,
            page_bytes=group.kv_cache_spec.page_size_bytes,
        )
        for group in config.kv_cache_groups
    ]
    mla = [g for g in groups if "MLA" in g["spec"]]
    cache_bytes = int(cache.kv_cache_memory_bytes)
    tokens = config.num_blocks * min((g["block_tokens"] for g in mla), default=0)
    return dict(
        num_blocks=config.num_blocks,
        groups=groups,
        cache_gib=round(cache_bytes / 2**30, 2),
        block_tokens_total=tokens,
        tokens_per_gib=round(tokens / (cache_bytes / 2**30)),
        vllm_says_tokens=getattr(cache, "kv_cache_size_tokens", None),
        vllm_says_requests=getattr(cache, "kv_cache_max_concurrency", None),
    )


def run_child(name: str, args: argparse.Namespace) -> None:
    """Start one engine, wait for the GPU, measure, and write DIR/<name>.json."""
    t0 = time.time()
    out = Path(args.out)
    options = engine_options(name, args)
    engine_models.install_seeded_weights(args.seed)
    import engine_hooks
    from vllm import LLM

    say(f"{name}: imports took {time.time() - t0:.0f} s")
    llm = LLM(**options)
    result: dict[str, Any] = dict(
        run=name,
        **RUNS[name],
        layers=args.layers,
        start_seconds=round(time.time() - t0, 1),
        capacity=capacity(llm),
        workspace=engine_hooks.workspace_state(),
        memory_start=engine_hooks.memory_state(),
        mixes={},
    )
    say(f"{name}: engine is up after {result['start_seconds']} s; waits for the GPU")
    Gate(out, name).wait(args.timeout)
    steps = Steps(llm)
    mixes = args.mixes.split(",")
    for mix in mixes:
        result["mixes"][mix] = measured = dict(tokens=sum(lengths(mix)))
        measured["first_steps"] = steps.start(mix)
        for _ in range(args.warm):
            steps.step()
        measured.update(steps.measure(args.steps))
        steps.stop()
        say(f"{name}: {mix}: {measured['median_us']} us a step")
        # After every mix: a failure of a later one must not lose this one.
        (out / f"{name}.json").write_text(json.dumps(result))
    result["memory"] = engine_hooks.memory_state()
    result["plans"] = engine_hooks.plan_counts()
    # Last: a profiler that has run once may slow down what follows.
    for mix in mixes if args.trace else []:
        try:
            steps.start(mix)
            for _ in range(args.warm):
                steps.step()
            result["mixes"][mix]["trace"] = steps.profile(args.trace)
            steps.stop()
        except Exception as error:  # noqa: BLE001 - the times stand without it
            traceback.print_exc()
            result["mixes"][mix]["trace_error"] = repr(error)
            break
    after = engine_hooks.workspace_state()
    result["workspace_moved"] = after["addresses"] != result["workspace"]["addresses"]
    (out / f"{name}.json").write_text(json.dumps(result))
    say(f"{name}: done")


def waves(
    names: list[str], gpus: list[str], args: argparse.Namespace
) -> list[list[Job]]:
    """Pack the runs into waves: what of them fits into the GPUs' memory at once.

    In the given order; a run goes to the emptiest GPU.
    """
    left, packed = list(names), []
    while left:
        used = {gpu: 0.0 for gpu in gpus}
        wave = []
        for name in list(left):
            gpu = min(gpus, key=lambda g: used[g])
            size = kv_cache_bytes(RUNS[name], args) / 2**30 + args.extra_gib
            if used[gpu] and used[gpu] + size > args.gpu_gib:
                continue
            used[gpu] += size
            left.remove(name)
            wave.append(
                Job(name, child_command(__file__, name), gpus=(gpu,), timed=True)
            )
        packed.append(wave)
    return packed


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    made.add_argument("--out", default="build/engine_timing", help="result folder")
    made.add_argument("--only", help="runs, comma separated: " + ", ".join(RUNS))
    made.add_argument("--gpus", default="0", help="GPUs, comma separated")
    made.add_argument("--layers", type=int, default=48, help="every second is MLA")
    made.add_argument("--k3-kda", action="store_true", help="Kimi K3's own KDA layers")
    made.add_argument("--mixes", default=",".join(MIXES), help="comma separated")
    made.add_argument("--steps", type=int, default=40, help="timed steps a mix")
    made.add_argument("--warm", type=int, default=10, help="steps before")
    made.add_argument("--trace", type=int, default=3, help="profiled steps, 0: none")
    made.add_argument("--seed", type=int, default=1, help="weights")
    made.add_argument("--gpu-gib", type=float, default=132, help="memory of a GPU")
    made.add_argument("--extra-gib", type=float, default=6, help="beside the KV cache")
    made.add_argument("--timeout", type=float, default=240, help="seconds a run")
    made.add_argument("--budget", type=float, default=1e9, help="no start after, s")
    made.add_argument("--report", action="store_true", help="tables only")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the chosen engines and print the tables."""
    made = parser()
    begun = begin(made, RUNS, DEFAULT_RUNS, run_child)
    if begun is None:
        return 0
    args, out, names = begun
    if unknown := [m for m in args.mixes.split(",") if m not in MIXES]:
        made.error(f"unknown mixes {unknown}; there are {', '.join(MIXES)}")
    left_out: list[str] = []
    if not args.report:
        compile_bytecode()
        gpus = args.gpus.split(",")
        for wave in waves(names, gpus, args):
            jobs = Jobs(out, args.timeout, args.budget)
            left_out += jobs.run(wave, {(gpu,): len(wave) for gpu in gpus})
    return engine_report.timing_report(out, names, left_out, list(RUNS))


if __name__ == "__main__":
    sys.exit(main())
