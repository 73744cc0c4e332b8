#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the K3-shaped model on two GPUs: TP 2, with and without DCP 2, against one GPU.

All engines load one checkpoint, so that the ranks hold shards of the model that one
GPU holds whole. Held to: log-probabilities on the same history within FP8 noise of
one GPU's, prompts of 1, 2 and 3 tokens included (ranks with an empty shard); greedy
tokens that part at near ties only, with and without the DSpark draft, eager and in
CUDA graphs; one plan a forward on each rank. The timed runs decode 32 requests of 32k
tokens, 12 heads a rank and 8 query tokens, with DCP 2 and with TP 2 alone.

    python scripts/two_gpu_check.py --out DIR [--gpus 0,1] [--budget 560]

Engines start together and generate two at a time (see `engine_jobs.turn`).
Timed runs measure last and alone; what still runs when their time comes is killed once
one of them is warm, and everything ends within 20 s after --budget. NVLink multicast
stays off: NCCL's, PyTorch's and vLLM's. Writes DIR/<run>.json, DIR/two_gpu_check.json
and DIR/two_gpu_check.md; exits with 1 if a run failed or a limit was passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_models  # noqa: E402
import engine_timing  # noqa: E402
import engine_work  # noqa: E402
from engine_jobs import (  # noqa: E402
    Gate,
    Job,
    Jobs,
    begin,
    child_command,
    compile_bytecode,
    say,
    turn,
)
from engine_report import table  # noqa: E402

OURS = "KIMI_K3_KV_BALANCED_MLA"
LAYERS, HEADS, DRAFT_LAYERS = 4, 12, 2
TIMED_REQUESTS, TIMED_HEADS, TIMED_QUERIES = 32, 24, 8
ONE = "one-gpu"

# No multicast: on a shared host a program that uses it can take all GPUs down.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "VLLM_USE_DIRECT_DCP_A2A": "0",
    "VLLM_USE_DIRECT_DCP_Q_GATHER": "0",
    "VLLM_USE_DIRECT_DCP_KV_GATHER": "0",
}


def run_of(
    dcp: int = 1,
    interleave: int = 1,
    draft: bool = False,
    graph: bool = False,
    timed: bool = False,
    tp: int = 2,
) -> dict[str, Any]:
    """Return a run's description."""
    return dict(
        tp=tp, dcp=dcp, interleave=interleave, draft=draft, graph=graph, timed=timed
    )


# In the order in which they start: what matters most first, the timed ones last.
RUNS: dict[str, dict[str, Any]] = {
    ONE: run_of(tp=1),
    "dcp2-i1": run_of(dcp=2),
    "dcp2-i64-graph": run_of(dcp=2, interleave=64, graph=True),
    "dcp2-i1-dspark": run_of(dcp=2, draft=True),
    "dcp2-i64-dspark-graph": run_of(dcp=2, interleave=64, draft=True, graph=True),
    "tp2-graph": run_of(graph=True),
    "tp2": run_of(),
    "dcp2-i64": run_of(dcp=2, interleave=64),
    "dcp2-i1-graph": run_of(dcp=2, graph=True),
    "tp2-dspark": run_of(draft=True),
    "tp2-dspark-graph": run_of(draft=True, graph=True),
    "dcp2-i1-dspark-graph": run_of(dcp=2, draft=True, graph=True),
    "dcp2-i64-dspark": run_of(dcp=2, interleave=64, draft=True),
    "time-tp2": run_of(graph=True, timed=True),
    "time-dcp2-i64": run_of(dcp=2, interleave=64, graph=True, timed=True),
    "time-dcp2-i1": run_of(dcp=2, graph=True, timed=True),
}
# For the start of a batch, 2 x 50 steps of 20 to 60 ms, and the end of the engine.
TIMED_SHARE_SECONDS = 15.0


def engine_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` for a run."""
    from engine_hooks import FILLED_CACHE, WORKER_EXTENSION

    run = RUNS[name]
    models = Path(args.out) / "models"
    options: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        tensor_parallel_size=run["tp"],
        attention_backend=OURS,
        kv_cache_dtype="fp8",
        worker_extension_cls=WORKER_EXTENSION,
        disable_custom_all_reduce=True,
        # Free memory that must be there at the start: all engines share the GPUs.
        gpu_memory_utilization=0.02,
        enable_prefix_caching=False,
        enable_flashinfer_autotune=False,
    )
    if run["tp"] > 1:
        options["distributed_executor_backend"] = "mp"
    if run["dcp"] > 1:
        options.update(
            decode_context_parallel_size=run["dcp"],
            cp_kv_cache_interleave_size=run["interleave"],
        )
    if run["timed"]:
        longest = 32768 + engine_timing.ROOM_TOKENS
        config = engine_models.target_config(
            args.timed_layers, TIMED_HEADS, max_tokens=longest
        )
        options.update(
            model=str(engine_models.write_model(models / "timed", config)),
            load_format="dummy",
            max_model_len=longest,
            max_num_seqs=TIMED_REQUESTS,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=int(args.timed_kv_gib * 2**30),
            kv_transfer_config=dict(FILLED_CACHE),
            compilation_config=dict(
                mode=3 if args.compile else 0,
                cudagraph_mode="FULL_DECODE_ONLY",
                cudagraph_capture_sizes=[TIMED_REQUESTS * TIMED_QUERIES],
            ),
            speculative_config=engine_work.ngram_drafts(TIMED_QUERIES - 1),
        )
        return options
    options.update(
        model=str(models / "target"),
        max_model_len=4096,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30),
        enforce_eager=not run["graph"],
    )
    if run["graph"]:
        # Graphs without torch.compile: the same kernels as eagerly, a faster start.
        options["compilation_config"] = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
    if run["draft"]:
        options["speculative_config"] = dict(
            method="dspark",
            model=str(models / "draft"),
            num_speculative_tokens=7,
            attention_backend=OURS,
        )
    else:
        options["enable_trace_replay"] = True
    return options


def write_models(args: argparse.Namespace) -> None:
    """Write the checkpoints that all engines load; before the engines start."""
    models = Path(args.out) / "models"
    engine_models.write_checkpoint(
        models / "target", engine_models.target_config(LAYERS, HEADS), args.seed
    )
    engine_models.write_checkpoint(
        models / "draft",
        engine_models.draft_config(DRAFT_LAYERS, HEADS, LAYERS),
        args.seed,
    )


def measure(llm: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Time decode steps at 32k tokens and at 128 (what a step costs without)."""
    steps = engine_timing.Steps(llm, TIMED_REQUESTS)
    result["capacity"] = engine_timing.capacity(llm)
    result["mixes"] = {}
    for mix in ("32k", "short"):
        steps.start(mix)
        for _ in range(10):
            steps.step()
        result["mixes"][mix] = steps.measure(args.timed_steps)
        steps.stop()


def generate(llm: Any, run: dict[str, Any], result: dict[str, Any], steps: int) -> None:
    """Run the workloads."""
    vocab = engine_models.VOCAB
    lengths = engine_work.SHORT_PROMPT_TOKENS + engine_work.PROMPT_TOKENS[2:4]
    requests = engine_work.prompts(vocab, lengths)
    if not run["draft"]:
        result["forced"] = engine_work.forced(llm, requests, vocab, steps)
    result["greedy"], result["greedy_best"] = engine_work.greedy(
        llm, requests, [steps + i % 5 for i in range(len(requests))], not run["draft"]
    )


def run_child(name: str, args: argparse.Namespace) -> None:
    """Start one engine, generate or measure, and write DIR/<name>.json."""
    t0 = time.time()
    run = RUNS[name]
    options = engine_options(name, args)
    from vllm import LLM

    say(f"{name}: imports took {time.time() - t0:.0f} s")
    llm = LLM(**options)
    result: dict[str, Any] = dict(run=name, start_seconds=round(time.time() - t0, 1))
    say(f"{name}: engine is up after {result['start_seconds']} s")
    before = llm.collective_rpc("check_plans")
    if run["timed"]:
        Gate(Path(args.out), name).wait(args.timeout)
        measure(llm, args, result)
    else:
        with turn(Path(args.out), args.turns):
            t1 = time.time()
            generate(llm, run, result, args.steps)
            say(f"{name}: generated in {time.time() - t1:.1f} s")
    layers = {0: args.timed_layers // 2 if run["timed"] else LAYERS // 2}
    result["ranks"] = []
    for old_rank, new_rank in zip(
        before, llm.collective_rpc("check_plans"), strict=True
    ):
        for old, new in zip(old_rank, new_rank, strict=True):
            new["planned"] -= old["planned"]
            new["reused"] -= old["reused"]
            new["layers"] = layers.get(new["slot"], DRAFT_LAYERS)
        result["ranks"].append(new_rank)
    result["workspaces"] = llm.collective_rpc("check_workspace")
    result["memory"] = llm.collective_rpc("check_memory")
    # Renamed into place: a cut-off file must not pass for a result.
    part = Path(args.out) / f"{name}.new"
    part.write_text(json.dumps(result))
    part.replace(Path(args.out) / f"{name}.json")
    say(f"{name}: done")


def pairs(runs: dict[str, dict]) -> list[tuple[str, str]]:
    """Return what is compared: every run with one GPU, graphs with their eager run."""
    untimed = [n for n in runs if n != ONE and not RUNS[n]["timed"]]
    found = [(ONE, n) for n in untimed] if ONE in runs else []
    for name in untimed:
        eager = name.removesuffix("-graph")
        if RUNS[name]["graph"] and eager in runs:
            found.append((eager, name))
    return found


def plan_faults(name: str, run: dict) -> list[str]:
    """Return which ranks of a run planned more than once a forward, or never."""
    eager = not RUNS[name]["graph"]
    idle = [
        f"{name} rank {rank}: no plan was counted, so no decode ran on this backend"
        for rank, plans in enumerate(run["ranks"])
        # Graph replays run no Python.
        if eager and not any(p["planned"] for p in plans)
    ]
    return idle + [
        f"{name} rank {rank}: {p['planned']} plans, {p['reused']} uses of one again, "
        f"{p['layers']} layers"
        for rank, plans in enumerate(run["ranks"])
        for p in plans
        if p["reused"] != p["planned"] * (p["layers"] - 1)
    ]


def time_rows(runs: dict[str, dict]) -> list[list[Any]]:
    """Return the rows of the table of decode step times."""
    base = runs.get("time-tp2", {}).get("mixes", {}).get("32k", {}).get("median_us")
    rows = []
    for name, run in runs.items():
        for mix, entry in run.get("mixes", {}).items():
            ratio = f"{base / entry['median_us']:.2f}" if base and mix == "32k" else "-"
            rows.append(
                [
                    name,
                    f"{TIMED_REQUESTS} x {'32k' if mix == '32k' else '128'}",
                    f"{entry['median_us']:.0f}",
                    f"{entry['p10_us']:.0f} - {entry['p90_us']:.0f}",
                    entry["steps"],
                    run["capacity"]["num_blocks"],
                    run["capacity"]["vllm_says_tokens"],
                    ratio,
                ]
            )
    return rows


def report(
    out: Path, names: list[str], left_out: list[str], args: argparse.Namespace
) -> int:
    """Print the tables, write them, and return the exit status."""
    runs = {
        n: json.loads(p.read_text()) for n in RUNS if (p := out / f"{n}.json").exists()
    }
    bad = [f"{n}: no result" for n in names if n not in runs and n not in left_out]
    bad += [f"{n}: not run, the time was over" for n in left_out]
    rows, compared = [], []
    for a, b in pairs(runs):
        row = engine_work.compare(runs[a], runs[b])
        compared.append(row)
        faults = engine_work.unexplained(row["parts"], args.tie)
        gaps = [str(p.get("gap", "?")) for p in row["parts"]]
        rows.append(
            [
                f"{a} : {b}",
                row.get("prefill_mean", "-"),
                row.get("decode_mean", "-"),
                row.get("decode_max", "-"),
                f"{row['greedy_same']}/{row['greedy_total']}",
                ", ".join(gaps) or "none",
            ]
        )
        for kind in ("prefill", "decode"):
            mean = row.get(f"{kind}_mean", 0.0)
            if not mean <= args.limit:
                bad.append(f"{a}:{b} {kind} mean {mean} > {args.limit}")
        bad += [
            f"{a}:{b} prompt {p['prompt']} step {p['step']} differs, {p.get('gap')} "
            f"nats behind the best{'' if p.get('among_best', True) else ' at least'}"
            for p in faults
        ]
    for name, run in runs.items():
        bad += plan_faults(name, run)
    parts = [
        table(
            [
                "runs",
                "prefill mean, nats",
                "decode mean",
                "decode max",
                "greedy tokens up to the first difference",
                "nats behind the best there",
            ],
            rows,
        ),
        table(
            [
                "run",
                "batch",
                "step, us",
                "p10 - p90",
                "steps",
                "KV blocks",
                "KV cache, tokens",
                "TP 2 alone / this",
            ],
            time_rows(runs),
        ),
        table(
            ["run", "start, s", "plans (planned/reused) a rank and lane"],
            [
                [
                    n,
                    r["start_seconds"],
                    "; ".join(
                        ", ".join(
                            f"{p['heads']}h q{p['max_q']} {p['planned']}/{p['reused']}"
                            for p in plans
                        )
                        for plans in r["ranks"]
                    ),
                ]
                for n, r in runs.items()
            ],
        ),
    ]
    text = "\n\n".join(parts)
    print("\n" + text)
    (out / "two_gpu_check.md").write_text(text + "\n")
    long = ("forced", "greedy_best")
    short = {n: {k: v for k, v in r.items() if k not in long} for n, r in runs.items()}
    (out / "two_gpu_check.json").write_text(
        json.dumps(dict(runs=short, pairs=compared), indent=1)
    )
    print("\nFAILED: " + "; ".join(bad) if bad else "\nall runs and limits passed")
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    made.add_argument("--out", default="build/two_gpu_check", help="result folder")
    made.add_argument("--only", help="runs, comma separated: " + ", ".join(RUNS))
    made.add_argument("--gpus", default="0,1", help="the two GPUs")
    # All at once: waves would pay for the start, two minutes and more, each time.
    made.add_argument("--parallel", type=int, default=16, help="engines at a time")
    made.add_argument(
        "--turns", type=int, default=2, help="engines that generate at a time"
    )
    made.add_argument(
        "--budget", type=float, default=560, help="every run ends by then, s"
    )
    made.add_argument("--timeout", type=float, default=600, help="seconds a run")
    made.add_argument("--steps", type=int, default=16, help="forced steps")
    made.add_argument("--seed", type=int, default=1, help="weights")
    made.add_argument("--kv-gib", type=float, default=1, help="KV cache, GiB")
    made.add_argument(
        "--timed-kv-gib", type=float, default=24, help="KV cache of a timed run, GiB"
    )
    made.add_argument(
        "--timed-layers", type=int, default=48, help="layers of a timed run's model"
    )
    made.add_argument("--timed-steps", type=int, default=40, help="timed steps a mix")
    made.add_argument(
        "--compile", action="store_true", help="torch.compile in the timed runs"
    )
    made.add_argument("--limit", type=float, default=0.15, help="most mean, nats")
    made.add_argument("--tie", type=float, default=0.5, help="a near tie, nats")
    made.add_argument("--report", action="store_true", help="compare only")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the chosen engines and compare them."""
    made = parser()
    begun = begin(made, RUNS, RUNS, run_child)
    if begun is None:
        return 0
    args, out, names = begun
    gpus = tuple(args.gpus.split(","))
    if len(gpus) != 2:
        made.error(f"--gpus takes two GPUs, got {args.gpus!r}")
    left_out: list[str] = []
    if not args.report:
        compile_bytecode()
        for name in RUNS:
            (out / f"{name}.json").unlink(missing_ok=True)
        write_models(args)
        jobs = []
        for place, name in enumerate(names):
            env = dict(NO_MULTICAST, VLLM_PORT=str(20100 + 300 * place))
            if RUNS[name]["timed"]:
                env["ENGINE_CHECK_SEED"] = str(args.seed)
            jobs.append(
                Job(
                    name,
                    child_command(__file__, name),
                    gpus=gpus[: RUNS[name]["tp"]],
                    timed=RUNS[name]["timed"],
                    env=env,
                )
            )
        slots = {gpus: args.parallel, gpus[:1]: 1}
        runner = Jobs(
            out,
            args.timeout,
            budget=args.budget,
            end=args.budget,
            share=TIMED_SHARE_SECONDS,
        )
        left_out = runner.run(jobs, slots)
    return report(out, names, left_out, args)


if __name__ == "__main__":
    sys.exit(main())
