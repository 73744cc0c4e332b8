#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a Kimi K3-shaped model through vLLM's engine and compare its attention backends.

Each run is one engine in its own process with the same seeded random weights. Every
engine generates for the same prompts in one batch (chunked prefill, mixed batches),
once with a fixed token trace forced on it, so that log-probabilities are compared on
the same history, and once greedily. Needs vLLM 0.33.0, patched, on PYTHONPATH or
installed, and one Hopper GPU.

    python scripts/engine_check.py --out DIR [--only ref,ours-eager,...] [--dspark]

Writes DIR/<run>.json per run and DIR/engine_check.jsonl; ends with a table and exits
with 1 if a run failed or a limit was passed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_models  # noqa: E402

OURS = "KIMI_K3_KV_BALANCED_MLA"
PROMPT_TOKENS = (5, 100, 1000, 3000, 64, 65, 17, 1, 640, 129, 2048, 333)
DRAFT_LAYERS = 2
START = time.time()

# name -> engine options; `ours` runs also report their plans.
RUNS: dict[str, dict] = {
    "ref-bf16": dict(kv_cache_dtype="auto", enforce_eager=True),
    "fp8-triton": dict(
        kv_cache_dtype="fp8", attention_backend="TRITON_MLA", enforce_eager=True
    ),
    "fp8-flashmla": dict(
        kv_cache_dtype="fp8", attention_backend="FLASHMLA", enforce_eager=True
    ),
    "ours-eager": dict(
        kv_cache_dtype="fp8", attention_backend=OURS, enforce_eager=True
    ),
    "ours-graph": dict(kv_cache_dtype="fp8", attention_backend=OURS),
    "ours-scaled": dict(
        kv_cache_dtype="fp8",
        attention_backend=OURS,
        enforce_eager=True,
        scales=(0.5, 0.25),
    ),
    "ours-dspark": dict(
        kv_cache_dtype="fp8",
        attention_backend=OURS,
        enforce_eager=True,
        dspark=dict(attention_backend=OURS),
    ),
    "ours-dspark-graph": dict(
        kv_cache_dtype="fp8",
        attention_backend=OURS,
        dspark=dict(attention_backend=OURS),
    ),
    "ours-dspark-bf16-draft": dict(
        kv_cache_dtype="fp8",
        attention_backend=OURS,
        enforce_eager=True,
        dspark=dict(kv_cache_dtype="bfloat16"),
    ),
}
DEFAULT_RUNS = ("ref-bf16", "fp8-triton", "ours-eager", "ours-graph")
DSPARK_RUNS = ("ours-dspark",)


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.time() - START:6.1f} s] {text}", flush=True)


def prompts(vocab: int) -> list[list[int]]:
    """Return the prompts, as token ids: the same in every engine."""
    rng = random.Random(7)
    return [[rng.randrange(4, vocab) for _ in range(n)] for n in PROMPT_TOKENS]


def trace(vocab: int, index: int, tokens: int) -> list[int]:
    """Return the tokens that prompt `index` is made to generate."""
    rng = random.Random(1000 + index)
    return [rng.randrange(4, vocab) for _ in range(tokens)]


def probe_ids(vocab: int) -> list[int]:
    """Return the token ids whose log-probabilities are compared at each step."""
    return sorted(random.Random(3).sample(range(4, vocab), 100))


def engine_options(name: str, args: argparse.Namespace) -> dict:
    """Return the keyword arguments of `vllm.LLM` for a run."""
    options = dict(RUNS[name])
    scales = options.pop("scales", None)
    dspark = options.pop("dspark", None)
    work = Path(args.out) / "models"
    target = engine_models.write_model(
        work / f"target-{args.layers}-{args.heads}",
        engine_models.target_config(args.layers, args.heads),
    )
    options.update(
        model=str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        # A fixed size: engines that share the GPU can't measure what is free.
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30),
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
    )
    if dspark is None:
        options["enable_trace_replay"] = True
    else:
        draft = engine_models.write_model(
            work / f"draft-{args.layers}-{args.heads}",
            engine_models.draft_config(DRAFT_LAYERS, args.heads, args.layers),
        )
        options["speculative_config"] = dict(
            method="dspark", model=str(draft), num_speculative_tokens=7, **dspark
        )
    engine_models.install_seeded_weights(args.seed)
    if scales is not None:
        engine_models.install_scales(*scales)
    return options


def plan_counts() -> list[dict]:
    """Return how often each plan buffer of this process was planned and reused."""
    from vllm.v1.worker.workspace import current_workspace_manager

    manager = current_workspace_manager()
    return [
        dict(
            slot=slot,
            heads=key[2],
            max_q=key[3],
            planned=resource.plan.planned,
            reused=resource.plan.reused,
        )
        for slot, resources in enumerate(manager._persistent_resources)
        for key, resource in resources.items()
        if hasattr(resource, "plan")
    ]


def run_child(name: str, args: argparse.Namespace) -> None:
    """Start one engine, generate, and write DIR/<name>.json."""
    t0 = time.time()
    options = engine_options(name, args)
    from vllm import LLM, SamplingParams

    say(f"{name}: imports took {time.time() - t0:.0f} s")
    t0 = time.time()
    llm = LLM(**options)
    start_seconds = time.time() - t0
    say(f"{name}: engine is up after {start_seconds:.0f} s")
    vocab = engine_models.VOCAB
    ids = probe_ids(vocab)
    requests = [{"prompt_token_ids": p} for p in prompts(vocab)]
    result: dict = dict(run=name, start_seconds=round(start_seconds, 1))

    if "speculative_config" not in options:
        t0 = time.time()
        params = [
            SamplingParams(
                max_tokens=args.steps,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprob_token_ids=ids,
                trace_decode_token_ids=trace(vocab, i, args.steps),
            )
            for i in range(len(requests))
        ]
        outputs = llm.generate(requests, params, use_tqdm=False)
        result["forced_seconds"] = round(time.time() - t0, 2)
        result["forced"] = [
            [[step[t].logprob for t in ids] for step in o.outputs[0].logprobs]
            for o in outputs
        ]
        for i, o in enumerate(outputs):
            forced = trace(vocab, i, args.steps)
            assert list(o.outputs[0].token_ids) == forced, f"prompt {i} not forced"

    before = plan_counts() if options.get("attention_backend") == OURS else []
    t0 = time.time()
    params = SamplingParams(
        max_tokens=args.greedy, temperature=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(requests, params, use_tqdm=False)
    result["greedy_seconds"] = round(time.time() - t0, 2)
    result["greedy"] = [list(o.outputs[0].token_ids) for o in outputs]
    if before:
        for old, new in zip(before, plan_counts(), strict=True):
            new["planned"] -= old["planned"]
            new["reused"] -= old["reused"]
            # Lane 0 has the target's MLA layers, lane 1 the draft's.
            new["layers"] = DRAFT_LAYERS if new["slot"] else args.layers // 2
            result.setdefault("plans", []).append(new)
    (Path(args.out) / f"{name}.json").write_text(json.dumps(result))
    say(f"{name}: done")


def compare(a: dict, b: dict) -> dict:
    """Compare two runs.

    Returns:
        Differences of log-probability at forced steps (nats), first steps (prefill)
        and later steps (decode) apart, and the greedy tokens that agree.

    """
    diffs: dict[str, list[float]] = {"prefill": [], "decode": []}
    if "forced" in a and "forced" in b:
        for steps_a, steps_b in zip(a["forced"], b["forced"], strict=True):
            for i, (x, y) in enumerate(zip(steps_a, steps_b, strict=True)):
                d = [abs(p - q) for p, q in zip(x, y, strict=True)]
                diffs["decode" if i else "prefill"] += d
    same = total = whole = 0
    for x, y in zip(a["greedy"], b["greedy"], strict=True):
        total += len(x)
        first = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), len(x))
        same += first
        whole += first == len(x)
    row = dict(a=a["run"], b=b["run"], greedy_same=same, greedy_total=total)
    row["greedy_whole"] = f"{whole}/{len(a['greedy'])}"
    for kind, d in diffs.items():
        if d:
            finite = all(v == v and v != float("inf") for v in d)
            row[f"{kind}_max"] = round(max(d), 4) if finite else float("nan")
            row[f"{kind}_mean"] = round(sum(d) / len(d), 5) if finite else float("nan")
    return row


def spread(run: dict) -> float:
    """Return the standard deviation of a run's forced log-probabilities (nats)."""
    values = [v for prompt in run["forced"] for step in prompt for v in step]
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5


PAIRS = (
    ("ref-bf16", "fp8-triton"),
    ("ref-bf16", "fp8-flashmla"),
    ("ref-bf16", "ours-eager"),
    ("fp8-triton", "ours-eager"),
    ("ours-eager", "ours-graph"),
    ("ref-bf16", "ours-scaled"),
    ("ours-eager", "ours-dspark"),
    ("ours-dspark", "ours-dspark-graph"),
    ("ours-eager", "ours-dspark-bf16-draft"),
)


def report(out: Path, names: list[str], limit: float) -> int:
    """Print the tables, write the JSON lines, and return the exit status."""
    runs = {
        n: json.loads(p.read_text()) for n in RUNS if (p := out / f"{n}.json").exists()
    }
    bad = [n for n in names if n not in runs]
    rows = [compare(runs[a], runs[b]) for a, b in PAIRS if a in runs and b in runs]
    print(
        "\nrun                     start s  forced s  greedy s  plans (planned/reused)"
    )
    for name, run in runs.items():
        plans = ", ".join(
            f"slot {p['slot']} {p['heads']}h q{p['max_q']}: "
            f"{p['planned']}/{p['reused']}"
            for p in run.get("plans", [])
        )
        print(
            f"{name:<24}{run['start_seconds']:>7}{run.get('forced_seconds', '-'):>10}"
            f"{run['greedy_seconds']:>10}  {plans}"
        )
        bad += [
            f"{name}: {p['planned']} plans and {p['reused']} uses of one again, not "
            f"one plan for {p['layers']} layers"
            for p in run.get("plans", [])
            if p["reused"] != p["planned"] * (p["layers"] - 1)
        ]
    if "ref-bf16" in runs:
        width = spread(runs["ref-bf16"])
        print(f"\nspread of the reference's log-probabilities: {width:.2f}")
    print(
        "\n|difference| in nats                prefill max   mean  decode max   mean"
        "   greedy"
    )
    for r in rows:
        print(
            f"{r['a'] + ' : ' + r['b']:<36}{r.get('prefill_max', '-')!s:>8}"
            f"{r.get('prefill_mean', '-')!s:>9}{r.get('decode_max', '-')!s:>9}"
            f"{r.get('decode_mean', '-')!s:>9}   {r['greedy_same']}/"
            f"{r['greedy_total']} tokens, {r['greedy_whole']} prompts whole"
        )
        mean = r.get("decode_mean", 0.0)
        if not mean <= limit:
            bad.append(f"{r['a']}:{r['b']} decode mean {mean} > {limit}")
        graph_pair = (r["a"], r["b"]) == ("ours-eager", "ours-graph")
        if graph_pair and r["greedy_same"] != r["greedy_total"]:
            bad.append("eager and graph differ")
    with (out / "engine_check.jsonl").open("w") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
        for name, run in runs.items():
            f.write(json.dumps({k: v for k, v in run.items() if k != "forced"}) + "\n")
    print("\nFAILED: " + "; ".join(bad) if bad else "\nall runs and limits passed")
    return 1 if bad else 0


def run_one(name: str, out: Path, timeout: float, env: dict[str, str]) -> None:
    """Run one engine in a process of its own; its output goes to a log."""
    log_path = out / f"{name}.log"
    say(f"{name}: starting (log: {log_path})")
    (out / f"{name}.json").unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", name, *sys.argv[1:]]
    code: int | str
    with log_path.open("w") as log:
        try:
            code = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"time limit of {timeout:.0f} s"
    say(f"{name}: ended with {code}")
    if code:
        lines = log_path.read_text(errors="replace").splitlines()
        errors = [i for i, line in enumerate(lines) if "Error" in line]
        first = max(errors[0] - 12, 0) if errors else len(lines) - 25
        print("\n".join("    " + line for line in lines[first:][:40]), flush=True)


def main() -> int:
    """Run the chosen engines one after another and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="build/engine_check", help="result folder")
    parser.add_argument("--only", help="runs, comma separated: " + ", ".join(RUNS))
    parser.add_argument("--dspark", action="store_true", help="add the DSpark run")
    parser.add_argument("--layers", type=int, default=4, help="target layers")
    parser.add_argument("--heads", type=int, default=12, help="MLA heads")
    parser.add_argument("--steps", type=int, default=16, help="forced steps")
    parser.add_argument("--greedy", type=int, default=16, help="greedy tokens")
    parser.add_argument("--seed", type=int, default=1, help="weights")
    parser.add_argument("--kv-gib", type=float, default=4, help="KV cache, GiB")
    parser.add_argument("--parallel", type=int, default=1, help="engines at a time")
    parser.add_argument("--timeout", type=float, default=420, help="seconds a run")
    parser.add_argument("--limit", type=float, default=0.5, help="decode mean, nats")
    parser.add_argument("--report", action="store_true", help="compare only")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = str(Path(args.out).resolve())
    if args.child:
        run_child(args.child, args)
        return 0
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else list(DEFAULT_RUNS)
    names += [n for n in DSPARK_RUNS if args.dspark and n not in names]
    unknown = [n for n in names if n not in RUNS]
    if unknown:
        parser.error(f"unknown runs {unknown}; there are {', '.join(RUNS)}")
    # In-process engines: the seeded weights and the plan counters live there.
    env = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not args.report:
        with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
            list(pool.map(lambda name: run_one(name, out, args.timeout, env), names))
    return report(out, names, args.limit)


if __name__ == "__main__":
    sys.exit(main())
