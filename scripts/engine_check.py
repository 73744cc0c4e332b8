#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a Kimi K3-shaped model through vLLM's engine and compare its attention backends.

Each run is one engine in its own process with the same seeded random weights; what it
generates stands in engine_work.py. Needs vLLM 0.33.0, patched, on PYTHONPATH or
installed, and a Hopper GPU.

    python scripts/engine_check.py --out DIR [--only ref-bf16,ours-eager,...] [--dspark]

Writes DIR/<run>.json per run and DIR/engine_check.jsonl; ends with tables and exits
with 1 if a run failed or a limit was passed. Held to: log-probabilities near the
reference's; graphs and speculation change no token but at near ties; one plan a
forward; no workspace allocated once they are locked; no host-device synchronisation in
this backend's code (runs with vLLM's sync check on).
"""

from __future__ import annotations

import argparse
import json
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
    Job,
    Jobs,
    begin,
    child_command,
    compile_bytecode,
    say,
)

OURS = "KIMI_K3_KV_BALANCED_MLA"
DRAFT_LAYERS = 2
SPECULATIVE_TOKENS = 7
OURS_FP8 = dict(kv_cache_dtype="fp8", attention_backend=OURS)
DSPARK = dict(method="dspark", num_speculative_tokens=SPECULATIVE_TOKENS)
# Batches of at most 8 draft 7 tokens, larger ones none: steps with and without drafts.
DRAFTS_BY_BATCH = [(1, 8, SPECULATIVE_TOKENS), (9, 16, 0)]

# name -> engine options. What is no option of vllm.LLM: `scales` (q, k), `spec` (the
# speculative config; `draft` says which model), `k3_kda` (a model with Kimi K3's own
# KDA layers, loaded from a checkpoint), `sync` (vLLM's sync check is on), `layers` and
# `mla_every` (another target), `groups` (KV-cache groups that the engine must have).
RUNS: dict[str, dict[str, Any]] = {
    "ref-bf16": dict(kv_cache_dtype="auto", enforce_eager=True),
    "fp8-triton": dict(
        kv_cache_dtype="fp8", attention_backend="TRITON_MLA", enforce_eager=True
    ),
    "fp8-flashmla": dict(
        kv_cache_dtype="fp8", attention_backend="FLASHMLA", enforce_eager=True
    ),
    "ours-eager": dict(OURS_FP8, enforce_eager=True),
    # FULL graphs where a batch decodes only, padded to the captured sizes.
    "ours-graph": dict(OURS_FP8),
    "ours-sync-check": dict(OURS_FP8, sync=True),
    "ours-piecewise": dict(
        OURS_FP8, compilation_config=dict(cudagraph_mode="PIECEWISE")
    ),
    "ours-scaled": dict(OURS_FP8, enforce_eager=True, scales=(0.5, 0.25)),
    "ours-dspark": dict(
        OURS_FP8, enforce_eager=True, spec=dict(DSPARK, attention_backend=OURS)
    ),
    "ours-dspark-graph": dict(
        OURS_FP8, sync=True, spec=dict(DSPARK, attention_backend=OURS)
    ),
    "ours-dspark-bf16-draft": dict(
        OURS_FP8, enforce_eager=True, spec=dict(DSPARK, kv_cache_dtype="bfloat16")
    ),
    "ours-dspark-by-batch": dict(
        OURS_FP8,
        enforce_eager=True,
        spec=dict(
            DSPARK,
            attention_backend=OURS,
            num_speculative_tokens_per_batch_size=DRAFTS_BY_BATCH,
        ),
    ),
    # Adaptive verification needs full graphs, and KDA layers that take any lengths.
    "ours-k3": dict(OURS_FP8, enforce_eager=True, k3_kda=True),
    "ours-dspark-adaptive": dict(
        OURS_FP8,
        k3_kda=True,
        compilation_config=dict(cudagraph_mode="FULL_DECODE_ONLY"),
        spec=dict(DSPARK, attention_backend=OURS, enable_adaptive_verification=True),
    ),
    # 4 MLA layers and the draft's 2 against 8 KDA layers: seven groups of two, where
    # vLLM itself would make two of 8. The MLA layers lie in three groups.
    "ours-mixed": dict(OURS_FP8, enforce_eager=True, layers=12, mla_every=3, groups=3),
    "ours-dspark-groups": dict(
        OURS_FP8,
        enforce_eager=True,
        layers=12,
        mla_every=3,
        groups=7,
        spec=dict(DSPARK, attention_backend=OURS),
    ),
    # 8 query tokens without a draft model.
    "ours-ngram-graph": dict(
        OURS_FP8,
        spec=engine_work.ngram_drafts(SPECULATIVE_TOKENS),
    ),
}
# Right drafts: fewest tokens a verify. 7 drafts of which 0 to 7 are right accept more
# than 2 where all of them are verified; a draft that is never accepted gives 1.
MIN_ACCEPTED = 2.0
MIN_ACCEPTED_OF = {
    # Without drafts while more than 8 of the 12 prompts live: most of its steps.
    "ours-dspark-by-batch": 1.05,
    # Rows that the draft itself holds for unlikely are cut before they are verified.
    "ours-dspark-adaptive": 1.3,
}
DEFAULT_RUNS = ("ref-bf16", "fp8-triton", "ours-eager", "ours-graph")
DSPARK_RUNS = ("ours-dspark", "ours-dspark-graph")

# (reference, run, limit on tokens): "same" allows differences at near ties only.
PAIRS: tuple[tuple[str, str, str], ...] = (
    ("ref-bf16", "fp8-triton", ""),
    ("ref-bf16", "fp8-flashmla", ""),
    ("ref-bf16", "ours-eager", ""),
    ("fp8-triton", "ours-eager", ""),
    ("ref-bf16", "ours-scaled", ""),
    ("ours-eager", "ours-graph", "same"),
    ("ours-eager", "ours-sync-check", "same"),
    ("ours-eager", "ours-piecewise", "same"),
    ("ours-eager", "ours-ngram-graph", "same"),
    ("ours-eager", "ours-dspark", "same"),
    ("ours-eager", "ours-dspark-graph", "same"),
    ("ours-dspark", "ours-dspark-graph", ""),
    ("ours-eager", "ours-dspark-bf16-draft", "same"),
    ("ours-eager", "ours-dspark-by-batch", "same"),
    ("ours-k3", "ours-dspark-adaptive", "same"),
    ("ours-mixed", "ours-dspark-groups", "same"),
)


def reference_of(name: str) -> str | None:
    """Return the run whose tokens a run must give."""
    return next((a for a, b, limit in PAIRS if b == name and limit), None)


def layers_of(name: str, args: argparse.Namespace) -> tuple[int, int]:
    """Return a run's target layers, and every how many of them one is MLA."""
    return RUNS[name].get("layers", args.layers), RUNS[name].get("mla_every", 2)


def model_folder(name: str, args: argparse.Namespace, k3_kda: bool) -> Path:
    """Write the target and return its folder."""
    layers, every = layers_of(name, args)
    config = engine_models.target_config(layers, args.heads, k3_kda, mla_every=every)
    kind = f"{'k3-' if k3_kda else ''}{layers}-{every}-{args.heads}"
    folder = Path(args.out) / "models" / f"target-{kind}"
    if k3_kda:
        return engine_models.write_checkpoint(folder, config, args.seed)
    return engine_models.write_model(folder, config)


def draft_folder(name: str, args: argparse.Namespace, checkpoint: bool) -> Path:
    """Write the DSpark draft and return its folder."""
    layers, _ = layers_of(name, args)
    config = engine_models.draft_config(DRAFT_LAYERS, args.heads, layers)
    kind = "checkpoint-" if checkpoint else ""
    folder = Path(args.out) / "models" / f"draft-{kind}{layers}-{args.heads}"
    if checkpoint:
        return engine_models.write_checkpoint(folder, config, args.seed)
    return engine_models.write_model(folder, config)


def engine_options(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` for a run."""
    options = dict(RUNS[name])
    scales = options.pop("scales", None)
    spec = options.pop("spec", None)
    k3_kda = options.pop("k3_kda", False)
    for own in ("sync", "layers", "mla_every", "groups"):
        options.pop(own, None)
    options.update(
        model=str(model_folder(name, args, k3_kda)),
        load_format="auto" if k3_kda else "dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        # A fixed size: engines that share the GPU can't measure what is free.
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30),
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        enable_flashinfer_autotune=False,
    )
    if spec is None:
        options["enable_trace_replay"] = True
    else:
        options["speculative_config"] = spec = dict(spec)
        if spec["method"] == "dspark":
            spec["model"] = str(draft_folder(name, args, k3_kda))
    engine_models.install_seeded_weights(args.seed)
    if scales is not None:
        engine_models.install_scales(*scales)
    return options


def group_sizes(llm: Any) -> list[int]:
    """Return how many layers each of the engine's KV-cache groups has."""
    core = llm.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return [len(group.layer_names) for group in groups]


def wait_for(path: Path, seconds: float) -> dict | None:
    """Return the JSON of another run once it is there, or None."""
    limit = time.time() + seconds
    while not path.exists():
        if time.time() > limit:
            return None
        time.sleep(0.5)
    return json.loads(path.read_text())


def generate(llm: Any, name: str, args: argparse.Namespace, result: dict) -> None:
    """Run the workloads; `result` is filled as they end."""
    vocab = engine_models.VOCAB
    requests = engine_work.prompts(vocab)
    spec = "spec" in RUNS[name]
    if not spec:
        t0 = time.time()
        result["forced"] = engine_work.forced(llm, requests, vocab, args.steps)
        result["forced_seconds"] = round(time.time() - t0, 2)
    top = not spec
    t0 = time.time()
    result["greedy"], result["greedy_best"] = engine_work.greedy(
        llm, requests, [args.greedy] * len(requests), top
    )
    result["greedy_seconds"] = round(time.time() - t0, 2)
    if args.ragged and name.startswith("ours"):
        t0 = time.time()
        result["ragged"], result["ragged_best"] = engine_work.ragged(llm, vocab, top)
        result["ragged_seconds"] = round(time.time() - t0, 2)


def generate_with_oracle(
    llm: Any, name: str, args: argparse.Namespace, result: dict
) -> None:
    """Verify right drafts too: the tokens of the run without speculation."""
    reference = reference_of(name)
    path = Path(args.out) / f"{reference}.json"
    known = wait_for(path, args.wait) if reference else None
    if known is None:
        result["oracle_error"] = f"{path} never came: run {reference} as well"
        return
    requests = engine_work.prompts(engine_models.VOCAB)
    with engine_work.OracleDrafts(
        llm, requests, known["greedy"], engine_models.VOCAB
    ) as oracle:
        result["oracle"], _ = engine_work.greedy(
            llm, requests, [args.greedy] * len(requests), False
        )
        result["oracle_tokens_per_verify"] = round(oracle.tokens_per_verify(), 2)


def run_child(name: str, args: argparse.Namespace) -> None:
    """Start one engine, generate, and write DIR/<name>.json."""
    t0 = time.time()
    syncs = engine_work.SyncRecorder() if RUNS[name].get("sync") else None
    options = engine_options(name, args)
    import engine_hooks
    from vllm import LLM

    say(f"{name}: imports took {time.time() - t0:.0f} s")
    t0 = time.time()
    llm = LLM(**options)
    result: dict[str, Any] = dict(run=name, start_seconds=round(time.time() - t0, 1))
    say(f"{name}: engine is up after {result['start_seconds']:.0f} s")
    ours = options.get("attention_backend") == OURS
    before = engine_hooks.plan_counts() if ours else []
    result["workspace"] = engine_hooks.workspace_state()
    result["groups"] = group_sizes(llm)
    path = Path(args.out) / f"{name}.json"
    generate(llm, name, args, result)
    if syncs is not None:
        result["syncs"] = syncs.result()
    for old, new in zip(before, engine_hooks.plan_counts() if ours else []):
        new["planned"] -= old["planned"]
        new["reused"] -= old["reused"]
        # Lane 0 has the target's MLA layers, lane 1 the draft's.
        layers, every = layers_of(name, args)
        new["layers"] = DRAFT_LAYERS if new["slot"] else layers // every
        result.setdefault("plans", []).append(new)
    after = engine_hooks.workspace_state()
    result["workspace_moved"] = after["addresses"] != result["workspace"]["addresses"]
    result["memory"] = engine_hooks.memory_state()
    if "spec" in RUNS[name]:
        try:
            generate_with_oracle(llm, name, args, result)
        except Exception as error:  # noqa: BLE001 - reported; the rest stands
            traceback.print_exc()
            result["oracle_error"] = repr(error)
    # Renamed into place: other runs wait for it.
    part = path.with_suffix(".new")
    part.write_text(json.dumps(result))
    part.replace(path)
    say(f"{name}: done")


def failures(name: str, run: dict) -> list[str]:
    """Return what one run broke."""
    min_accepted = MIN_ACCEPTED_OF.get(name, MIN_ACCEPTED)
    bad = [
        f"{name}: {p['planned']} plans and {p['reused']} uses of one again, not one "
        f"plan for {p['layers']} layers"
        for p in run.get("plans", [])
        if p["reused"] != p["planned"] * (p["layers"] - 1)
    ]
    options = RUNS[name]
    ours_eager = options.get("attention_backend") == OURS and "enforce_eager" in options
    # Graph replays run no Python, so only eager runs must have counted.
    if ours_eager and not any(p["planned"] for p in run.get("plans", [])):
        bad.append(f"{name}: no plan was counted, so no decode ran on this backend")
    if run.get("workspace", {}).get("locked") and run["workspace_moved"]:
        bad.append(f"{name}: a workspace was allocated after they were locked")
    graphs = "enforce_eager" not in options
    if graphs and not run.get("workspace", {}).get("locked", True):
        bad.append(f"{name}: the workspaces were never locked")
    bad += [
        f"{name}: {s['times']} synchronisations at {s['place']}"
        for s in run.get("syncs", [])
        if s["kind"] == "ours"
    ]
    groups = run.get("groups", [])
    if len(groups) != (wanted := options.get("groups", len(groups))):
        bad.append(f"{name}: KV-cache groups of {groups} layers, not {wanted} groups")
    if "oracle_error" in run:
        bad.append(f"{name}: {run['oracle_error']}")
    if run.get("oracle_tokens_per_verify", min_accepted) < min_accepted:
        bad.append(
            f"{name}: {run['oracle_tokens_per_verify']} tokens a verify, with right "
            f"drafts it must be {min_accepted} at least"
        )
    return bad


def report(out: Path, names: list[str], args: argparse.Namespace) -> int:
    """Print the tables, write the JSON lines, and return the exit status."""
    runs = {
        n: json.loads(p.read_text()) for n in RUNS if (p := out / f"{n}.json").exists()
    }
    bad = [n for n in names if n not in runs]
    engine_report.print_runs(runs)
    for name, run in runs.items():
        bad += failures(name, run)
    if "ref-bf16" in runs:
        width = engine_work.spread(runs["ref-bf16"])
        print(f"\nspread of the reference's log-probabilities: {width:.2f}")
    rows = []
    for a, b, limit in PAIRS:
        if a not in runs or b not in runs:
            continue
        row = engine_work.compare(runs[a], runs[b])
        rows.append(row)
        mean = row.get("decode_mean", 0.0)
        if not mean <= args.limit:
            bad.append(f"{a}:{b} decode mean {mean} > {args.limit}")
        if limit == "same":
            for part in engine_work.unexplained(row["parts"], args.tie):
                bad.append(
                    f"{a}:{b} {part['work']} prompt {part['prompt']} step "
                    f"{part['step']} differs, {part.get('gap')} nats behind the best"
                    f"{'' if part.get('among_best', True) else ' at least'}"
                )
    engine_report.print_pairs(rows)
    with (out / "engine_check.jsonl").open("w") as f:
        for row in rows:
            f.write(json.dumps(row) + "\n")
        long = ("forced", "greedy_best", "ragged_best")
        for run in runs.values():
            f.write(json.dumps({k: v for k, v in run.items() if k not in long}) + "\n")
    print("\nFAILED: " + "; ".join(bad) if bad else "\nall runs and limits passed")
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    made.add_argument("--out", default="build/engine_check", help="result folder")
    made.add_argument("--only", help="runs, comma separated: " + ", ".join(RUNS))
    made.add_argument("--dspark", action="store_true", help="add the DSpark runs")
    made.add_argument("--layers", type=int, default=4, help="target layers")
    made.add_argument("--heads", type=int, default=12, help="MLA heads")
    made.add_argument("--steps", type=int, default=16, help="forced steps")
    made.add_argument("--greedy", type=int, default=24, help="greedy tokens")
    made.add_argument(
        "--no-ragged", dest="ragged", action="store_false", help="no ragged waves"
    )
    made.add_argument("--seed", type=int, default=1, help="weights")
    made.add_argument("--kv-gib", type=float, default=4, help="KV cache, GiB")
    made.add_argument("--gpus", default="0", help="GPUs, comma separated")
    made.add_argument("--parallel", type=int, default=1, help="engines a GPU")
    made.add_argument("--timeout", type=float, default=420, help="seconds a run")
    made.add_argument("--wait", type=float, default=180, help="for a reference, s")
    made.add_argument("--budget", type=float, default=1e9, help="no start after, s")
    made.add_argument("--limit", type=float, default=0.5, help="most decode mean, nats")
    made.add_argument("--tie", type=float, default=0.3, help="a near tie, nats")
    made.add_argument("--report", action="store_true", help="compare only")
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made


def main() -> int:
    """Run the chosen engines and compare them."""
    made = parser()
    begun = begin(made, RUNS, DEFAULT_RUNS, run_child)
    if begun is None:
        return 0
    args, out, names = begun
    names += [n for n in DSPARK_RUNS if args.dspark and n not in names]
    if not args.report:
        compile_bytecode()
        # References first: runs with right drafts wait for them.
        names.sort(key=lambda n: reference_of(n) is not None)
        for name in names:
            (out / f"{name}.json").unlink(missing_ok=True)
        jobs = [
            Job(
                name,
                child_command(__file__, name),
                env={"VLLM_GPU_SYNC_CHECK": "warn"} if RUNS[name].get("sync") else {},
            )
            for name in names
        ]
        slots: dict[tuple[str, ...], int] = {
            (gpu,): args.parallel for gpu in args.gpus.split(",")
        }
        Jobs(out, args.timeout, args.budget).run(jobs, slots)
    return report(out, names, args)


if __name__ == "__main__":
    sys.exit(main())
