#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare sparse MLA backends for Hopper through vLLM's engine: tokens and step times.

Two small models with random weights (DeepSeek-V3.2-shaped with rope, GLM-5.3-shaped
without), each served by FLASHINFER_MLA_SPARSE_SM90 as installed here (ours), by vLLM's
own file of that name (stock), and by FLASH_ATTN_MLA_SPARSE (fa3). Every run is an
engine in its own process with the same weights. All generate for the same prompts, once
with a fixed token trace forced on them and once greedily; then decode steps are timed
at 1, 8 and 64 requests, with CUDA graphs, one engine at a time while the others wait.
A host's speed changes from second to second, and steps of models so small follow it, so
the judged cases are timed in many rounds, in which all engines take turns, and what is
compared are the turns of one round.

    python scripts/sparse_check.py --out DIR --stock FILE [--only RUN,...] [--gpus 0,1]

Needs vLLM 0.33.0 with this patch set, DeepGEMM (part of vLLM's wheel), and a Hopper
GPU. Writes DIR/<run>.json and DIR/<run>.log per run, whatever time allows, and
DIR/sparse_check.jsonl; ends with tables and a verdict, and exits with 1 if a run
failed, a limit was passed, or ours is not the fastest (see --tolerance).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import engine_jobs  # noqa: E402
import engine_work  # noqa: E402
import sparse_models  # noqa: E402
import sparse_report  # noqa: E402
import sparse_turns  # noqa: E402
from engine_jobs import (  # noqa: E402
    begin,
    compile_bytecode,
    say,
)

FA3 = "FLASH_ATTN_MLA_SPARSE"
UPSTREAM_TOML = Path(__file__).resolve().parents[1] / "UPSTREAM.toml"
# Around top-k 2048 (decode crosses it), one token, less than a block, and long.
PROMPT_TOKENS = (1, 17, 64, 333, 2040, 2047, 2048, 2049, 2500, 3000, 4096, 5000)
BATCHED_TOKENS = 8192
MAX_REQUESTS = 64
TIMED_STEPS, PROFILED_STEPS = 48, 12
# What the judged cases of one run take at least.
TURN_SECONDS = 6.0
# Cores that all engines share while they are timed, one at a time.
TIMING_CORES = 4
# name -> requests, context (tokens), and whether one request leaves at every step.
CASES: dict[str, dict[str, Any]] = {
    "1 x 4096": dict(requests=1, context=4096),
    "8 x 4096": dict(requests=8, context=4096),
    "64 x 4096": dict(requests=64, context=4096),
    "8 x 1000": dict(requests=8, context=1000),
    "64 x 2304, leaving": dict(requests=64, context=2304, leaving=True),
}


def all_runs() -> dict[str, dict[str, Any]]:
    """Return the runs by name: model, backend, cache type, and whose file."""
    runs: dict[str, dict[str, Any]] = {}
    for model in sparse_models.MODELS:
        for who, backend in (
            ("ours", sparse_models.BACKEND),
            ("stock", sparse_models.BACKEND),
            ("fa3", FA3),
        ):
            runs[f"{model}-{who}"] = dict(
                model=model, who=who, backend=backend, cache="auto"
            )
    for model in sparse_models.MODELS:
        for who in ("ours", "stock"):
            runs[f"{model}-{who}-fp8"] = dict(
                model=model, who=who, backend=sparse_models.BACKEND, cache="fp8"
            )
    runs["dsv32-ours-fp8-scaled"] = dict(
        runs["dsv32-ours-fp8"], k_scale=0.25, timed=False
    )
    return runs


RUNS = all_runs()
DEFAULT_RUNS = tuple(name for name in RUNS if "scaled" not in name)


def engine_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` for a run; write its model."""
    run = RUNS[name]
    path = sparse_models.write_model(
        Path(args.out) / "models", run["model"], args.layers
    )
    graphs = dict(
        # Without torch.compile, which takes two minutes a start with ten at a time.
        mode=3 if args.compile else 0,
        cudagraph_mode="FULL_DECODE_ONLY",
        cudagraph_capture_sizes=[1, 2, 4, *range(8, MAX_REQUESTS + 1, 8)],
    )
    return dict(
        model=str(path),
        hf_overrides=sparse_models.attention_only,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=run["backend"],
        kv_cache_dtype=run["cache"],
        max_model_len=8192,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=BATCHED_TOKENS,
        # A fixed size: engines that share the GPU can't measure what is free.
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30),
        enable_prefix_caching=False,
        enable_trace_replay=True,
        # Neither is what is compared, and both can cost minutes at start-up.
        moe_backend="triton",
        enable_flashinfer_autotune=False,
        enforce_eager=args.eager,
        compilation_config=None if args.eager else graphs,
    )


def install(name: str, args: argparse.Namespace) -> dict[str, str]:
    """Prepare this process for a run; return the backend's file and its sha256.

    Raises:
        RuntimeError: The files of ours and stock aren't what the run's name says.

    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    run = RUNS[name]
    if run["who"] == "stock":
        sparse_models.install_stock(Path(args.stock))
    backend = AttentionBackendEnum[run["backend"]].get_class()
    path = Path(sys.modules[backend.__module__].__file__ or "")
    digest = sparse_models.file_hash(path)
    if run["backend"] == sparse_models.BACKEND:
        stock = sparse_models.pinned_hash(UPSTREAM_TOML)
        if stock is None and args.stock:
            stock = sparse_models.file_hash(Path(args.stock))
        if stock is not None and (digest == stock) != (run["who"] == "stock"):
            raise RuntimeError(
                f"{name} would run {path} with sha256 {digest}, and the stock file has "
                f"{stock}; patch the installed vLLM for ours, and pass vLLM's own "
                "file with --stock for stock"
            )
    sparse_models.install_weights(args.seed)
    if "k_scale" in run:
        sparse_models.install_scales(run["k_scale"])
    return dict(file=str(path), sha256=digest)


def random_prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt of random token ids: the same in every engine."""
    rng = random.Random(seed)
    return [rng.randrange(4, sparse_models.VOCAB) for _ in range(tokens)]


def check_tokens(llm: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Generate for the prompts, forced and greedily; add both to `result`."""
    requests = [random_prompt(i, n) for i, n in enumerate(PROMPT_TOKENS)]
    result["forced"] = engine_work.forced(
        llm, requests, sparse_models.VOCAB, args.steps
    )
    result["greedy"], result["greedy_best"] = engine_work.greedy(
        llm, requests, [args.steps] * len(requests), top=True
    )


def answer_lengths(case: dict[str, Any], timed: int) -> list[int]:
    """Return how many tokens each request of a case generates.

    The prompts are prefilled in order, some every step, while earlier requests decode
    already. Steady cases need `timed` steps in which all decode, after the last
    prefill; in a leaving case one request ends at every step after it.
    """
    requests, context = case["requests"], case["context"]
    budget = BATCHED_TOKENS - requests
    prefill_steps = -(-requests * context // budget) + 2
    if not case.get("leaving"):
        return [prefill_steps + timed + 8] * requests
    joins = [(i + 1) * context // budget for i in range(requests)]
    return [prefill_steps - join + 8 + i for i, join in enumerate(joins)]


def time_case(llm: Any, recorder: Any, case: dict[str, Any], profile: bool) -> dict:
    """Run a case and return its times."""
    from vllm import SamplingParams

    profiled = PROFILED_STEPS if profile and not case.get("leaving") else 0
    lengths = answer_lengths(case, TIMED_STEPS + profiled)
    requests = [
        {"prompt_token_ids": random_prompt(1000 + i, case["context"])}
        for i in range(len(lengths))
    ]
    params = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    recorder.reset(len(lengths), TIMED_STEPS, profiled)
    begin = time.time()
    try:
        llm.generate(requests, params, use_tqdm=False)
    finally:
        recorder.stop()
    summary = recorder.summary(changing=case.get("leaving", False))
    summary["seconds"] = round(time.time() - begin, 2)
    return summary


def time_turn(
    llm: Any,
    recorder: Any,
    args: argparse.Namespace,
    result: dict[str, Any],
    *,
    first: bool,
    save: Callable[[], None],
) -> None:
    """Time the cases of a turn: all in the first one, the judged ones in the others.

    Of a case that was timed before, the turn with the smaller median is kept, and
    `rounds` has the medians of all.
    """
    names = [name for name in args.cases.split(";") if name]
    if not first:
        names = [name for name in names if name in sparse_report.JUDGED]
    if not names:
        return
    time_case(llm, recorder, dict(requests=1, context=256), profile=False)
    kept = result.setdefault("cases", {})
    for case in names:
        profile = first and not args.no_profile
        try:
            times = time_case(llm, recorder, CASES[case], profile)
        except Exception as error:
            times = dict(error=repr(error))
        kept[case] = sparse_report.better_turn(kept.get(case), times)
        save()
        say(f"{result['run']}: {case}: {json.dumps(times)[:300]}")


def run_child(name: str, args: argparse.Namespace) -> None:
    """Start one engine, check tokens, time at every turn; write DIR/<name>.json.

    A line on the standard input is a turn, its end is the end. What is known is written
    after every part, so that an end by force loses little; DIR/<name>.turns counts the
    turns that are over.
    """
    began = time.time()
    out = Path(args.out)
    result: dict[str, Any] = dict(run=name, **RUNS[name])

    def save() -> None:
        part = out / f"{name}.json.part"
        part.write_text(json.dumps(result))
        part.replace(out / f"{name}.json")

    options = engine_options(name, args)
    result.update(install(name, args))
    import sparse_timing
    import torch
    from vllm import LLM
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[RUNS[name]["backend"]].get_class()
    recorder = sparse_timing.StepRecorder(
        backend.get_builder_cls(), torch.cuda.CUDAGraph
    )
    say(f"{name}: imports took {time.time() - began:.0f} s")
    llm = LLM(**options)
    result["start_seconds"] = round(time.time() - began, 1)
    say(f"{name}: engine is up after {result['start_seconds']} s")
    recorder.reset(0)
    check_tokens(llm, args, result)
    recorder.stop()
    if not recorder.steps:
        raise RuntimeError(f"{name}: the engine does not use {backend.get_name()}")
    save()
    say(f"{name}: tokens done, waiting for the turn")
    (out / f"{name}.up").write_text("")
    turns = 0
    while sys.stdin.readline():
        if turns == 0:
            result["cores"] = sparse_turns.share_cores(TIMING_CORES)
        if RUNS[name].get("timed", True):
            time_turn(llm, recorder, args, result, first=turns == 0, save=save)
        turns += 1
        (out / f"{name}.turns").write_text(str(turns))
    say(f"{name}: done")


def run_wave(names: list[str], args: argparse.Namespace, end: float) -> None:
    """Start engines together; time them one by one once all are up or given up.

    With `args.hold`, none is timed before that file exists or the time to start is
    over. Each may take its part of what is left until `end`.
    """
    gpus = args.gpus.split(",")
    out = Path(args.out)
    hold = Path(args.hold) if args.hold else None
    runs = [
        sparse_turns.Run(n, gpus[i % len(gpus)], out, __file__)
        for i, n in enumerate(names)
    ]
    try:
        shortest = TURN_SECONDS * len(runs)
        patience = time.time() + sparse_turns.start_patience(
            shortest, args.start_limit, end
        )
        while time.time() < patience:
            starting = any([r.look() == "starting" for r in runs])
            if not starting and (hold is None or hold.exists()):
                break
            time.sleep(0.2)
        if hold is not None:
            say(f"{hold} {'is there' if hold.exists() else 'never came'}: timing")
        for run in runs:
            if run.look() == "starting":
                run.kill(f"not up after {time.time() - run.begin:.0f} s")
        waiting = [run for run in runs if run.look() == "waiting"]
        sparse_turns.take_turns(waiting, args.rounds, args.time_limit, end)
        sparse_turns.let_go(waiting, min(end, time.time() + 10))
    finally:
        for run in runs:
            run.kill("its time is over")
        limit = time.time() + 5
        for run in runs:
            run.gone(limit)


def positive(text: str) -> int:
    """Return an option's value as an integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def share(text: str) -> float:
    """Return an option's value as a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    made.add_argument("--out", default="build/sparse_check", help="result folder")
    made.add_argument("--stock", help="vLLM's own flashinfer_mla_sparse_sm90.py")
    made.add_argument("--only", help="runs, comma separated: " + ", ".join(RUNS))
    made.add_argument(
        "--cases",
        default=";".join(CASES),
        help="timed cases, separated by `;` (empty for none): " + "; ".join(CASES),
    )
    made.add_argument("--gpus", default="0", help="GPUs that the runs are spread over")
    made.add_argument("--parallel", type=positive, default=6, help="engines at a time")
    made.add_argument("--budget", type=float, default=560, help="seconds in all")
    made.add_argument("--hold", help="a file without which no run is timed yet")
    made.add_argument("--start-limit", type=float, default=300, help="seconds a start")
    made.add_argument("--time-limit", type=float, default=90, help="seconds of a turn")
    made.add_argument(
        "--tolerance", type=share, default=0.0, help="ours may be slower by this share"
    )
    made.add_argument("--rounds", type=positive, default=16, help="turns of an engine")
    made.add_argument(
        "--layers", type=int, default=sparse_models.LAYERS, help="of the models"
    )
    made.add_argument("--steps", type=int, default=16, help="tokens that are compared")
    made.add_argument("--seed", type=int, default=1, help="weights")
    made.add_argument("--kv-gib", type=float, default=3, help="KV cache, GiB")
    made.add_argument("--eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--compile", action="store_true", help="with torch.compile")
    made.add_argument("--no-profile", action="store_true", help="no kernel times")
    made.add_argument("--report", action="store_true", help="tables only")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the engines and report."""
    made = parser()
    begun = begin(made, RUNS, DEFAULT_RUNS, run_child)
    if begun is None:
        return 0
    args, out, names = begun
    if unknown := [c for c in args.cases.split(";") if c and c not in CASES]:
        made.error(f"unknown cases {unknown}; there are {'; '.join(CASES)}")
    if not args.report:
        if any(RUNS[n]["who"] == "stock" for n in names) and not args.stock:
            made.error("stock runs need vLLM's own file: pass --stock FILE")
        if args.stock and not Path(args.stock).is_file():
            made.error(f"--stock: there is no file {args.stock}")
        for name in names:
            (out / f"{name}.json").unlink(missing_ok=True)
        compile_bytecode()
        possible = names
        if gap := sparse_models.transformers_gap():
            possible = [n for n in names if RUNS[n]["model"] != "glm"]
            if len(possible) < len(names):
                say(gap)
        # From the start of this script, imports included.
        end = engine_jobs.START + args.budget
        for first in range(0, len(possible), args.parallel):
            if time.time() < end:
                run_wave(possible[first : first + args.parallel], args, end)
    return sparse_report.report(out, names, list(RUNS), args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
