# SPDX-License-Identifier: Apache-2.0
"""Tables of the engine checks: runs and pairs, GPU time by kernel, step times."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# First match counts. Names as the profiler gives them; the CuTe DSL's carry the class.
GROUPS: tuple[tuple[str, str], ...] = (
    ("ours: decode", r"kv_balanced.*DecodeKernel"),
    ("ours: combine", r"kv_balanced.*CombineKernel"),
    ("ours: plan", r"kv_balanced.*PlannerKernel"),
    ("copies", r"memcpy|memset|direct_copy|copy_kernel|CatArrayBatched|slice"),
    (
        "MLA decode of stock",
        r"flash_fwd_splitkv_mla|splitkv_mla|mla_combine|get_mla_metadata|"
        r"flash::|flash_attn|FlashAttn|flash_fwd|prepare_varlen_num_blocks|"
        r"_fwd_grouped_kernel|_fwd_kernel_stage|mla_decode",
    ),
    (
        "KDA",
        r"kda|gdn|gated_delta|fused_recurrent|causal_conv1d|chunk_|delta_rule|"
        r"fused_gate|layer_norm_gated|rms_norm_gated",
    ),
    ("MLA around (quant, rope, cache)", r"kimi_k3|mla|rotary|concat_and_cache|fp8"),
    ("collectives", r"nccl|all_reduce|allreduce|cross_device_reduce"),
    ("GEMM", r"gemm|nvjet|cublas|cutlass|xmma|splitKreduce|matmul|gemv"),
    ("norm, activation", r"norm|silu|act_and_mul|elementwise|sigmoid"),
    (
        "sampling, drafts, bookkeeping",
        r"ngram|sample|argmax|topk|top_k|softmax|gumbel|reject|gather|scatter|index|"
        r"prepare|slot_mapping|block_table|post_update|combine_sampled|embedding|"
        r"expand_idx|compute_|zero_",
    ),
)
OTHER = "other"


def group_of(kernel: str) -> str:
    """Return the group of a kernel's name."""
    for group, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return OTHER


def busy_us(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the (start, length) spans ran, in us."""
    total, end = 0.0, float("-inf")
    for start, length in sorted(spans):
        stop = start + length
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def kernel_groups(
    kernels: list[tuple[str, float, float]], steps: int
) -> dict[str, Any]:
    """Sum a trace by kernel group.

    Args:
        kernels: Name, start and length of every GPU event, in us.
        steps: Steps that the trace covers.

    Returns:
        Per step: `groups` (us), `busy_us` (at least one kernel ran), `span_us` (first
        start to last end) and the longest kernels with calls and us.

    """
    if not kernels:
        raise ValueError("the trace has no GPU events: is CUPTI usable here?")
    groups: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    for name, _, length in kernels:
        group = group_of(name)
        groups[group] = groups.get(group, 0.0) + length / steps
        names.setdefault(name, []).append(length)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:14]
    first = min(start for _, start, _ in kernels)
    last = max(start + length for _, start, length in kernels)
    return dict(
        steps=steps,
        busy_us=round(busy_us([(s, d) for _, s, d in kernels]) / steps, 1),
        span_us=round((last - first) / steps, 1),
        groups={g: round(v, 1) for g, v in sorted(groups.items(), key=lambda i: -i[1])},
        longest=[
            dict(
                name=name[:110],
                group=group_of(name),
                calls=round(len(d) / steps, 2),
                us=round(sum(d) / steps, 1),
            )
            for name, d in longest
        ],
    )


def print_runs(runs: dict[str, dict]) -> None:
    """Print times, plans, memory and synchronisations of the runs."""
    print(
        "\nrun                     start s  forced s  greedy s  ragged s  peak MiB "
        "less scratch  scratch MiB a lane  plans (planned/reused)"
    )
    for name, run in runs.items():
        plans = ", ".join(
            f"slot {p['slot']} {p['heads']}h q{p['max_q']}: "
            f"{p['planned']}/{p['reused']}"
            for p in run.get("plans", [])
        )
        state, peak = run.get("workspace", {}), run.get("memory", {}).get("peak_mib")
        scratch = state.get("scratch_mib", [])
        own = sum(scratch) + state.get("persistent_mib", 0.0)
        less = "-" if peak is None else f"{peak - own:.0f}"
        print(
            f"{name:<24}{run['start_seconds']:>7}{run.get('forced_seconds', '-'):>10}"
            f"{run['greedy_seconds']:>10}{run.get('ragged_seconds', '-'):>10}"
            f"{peak or '-':>10} {less:>12}  {scratch!s:<19} {plans}"
        )
        if "oracle_tokens_per_verify" in run:
            print(
                f"    right drafts: {run['oracle_tokens_per_verify']} tokens a verify"
            )
        if "syncs" in run:
            print(f"    host-device synchronisations: {len(run['syncs'])} places")
        for sync in run.get("syncs", [])[:12]:
            print(f"      {sync['times']:>5} x {sync['kind']}: {sync['place']}")


def print_pairs(rows: list[dict]) -> None:
    """Print the comparison of the runs."""
    print(
        "\n|difference| in nats                     prefill max    mean  decode max"
        "    mean   tokens up to the first difference"
    )
    for r in rows:
        tokens = ", ".join(
            f"{work} {r[f'{work}_same']}/{r[f'{work}_total']}"
            for work in ("greedy", "ragged", "oracle")
            if f"{work}_same" in r
        )
        print(
            f"{r['a'] + ' : ' + r['b']:<41}{r.get('prefill_max', '-')!s:>10}"
            f"{r.get('prefill_mean', '-')!s:>9}{r.get('decode_max', '-')!s:>11}"
            f"{r.get('decode_mean', '-')!s:>9}   {tokens}"
        )
        for part in r["parts"][:8]:
            print(
                f"      {part['work']} prompt {part['prompt']} step {part['step']}: "
                f"{part['a']} or {part['b']}, {part.get('gap', 'unknown')} nats "
                "behind the best"
                f"{'' if part.get('among_best', True) else ' at least'}"
            )


def table(header: list[str], rows: list[list[Any]]) -> str:
    """Return a markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def step_rows(runs: dict[str, dict], mix: str) -> list[list[Any]]:
    """Return the rows of one mix: each run beside the best stock one of its kind."""
    rows = []
    for name, run in runs.items():
        entry = run["mixes"].get(mix, {})
        if "median_us" not in entry:
            continue
        rivals = [
            other["mixes"][mix]["median_us"]
            for other in runs.values()
            if other["queries"] == run["queries"]
            and other["cache"] == "auto"
            and "median_us" in other["mixes"].get(mix, {})
        ]
        best = f"{min(rivals) / entry['median_us']:.2f}" if rivals else "-"
        short = run["mixes"].get("short", {}).get("median_us")
        beyond = "-"
        if short is not None and mix != "short":
            beyond = f"{entry['median_us'] - short:.0f}"
        busy = entry.get("trace", {}).get("busy_us")
        rows.append(
            [
                name,
                f"{run['backend']} {run['cache']}",
                f"12 x {run['queries']}",
                mix,
                f"{entry['median_us']:.0f}",
                f"{entry['p10_us']:.0f} - {entry['p90_us']:.0f}",
                f"{entry['tokens_per_s']:.0f}",
                beyond,
                "-" if busy is None else f"{busy:.0f}",
                best,
            ]
        )
    return rows


STEP_HEADER = [
    "run",
    "backend and cache",
    "rows",
    "batch",
    "step, us",
    "p10 - p90",
    "tokens/s",
    "over 64 x 128, us",
    "GPU busy, us",
    "best bf16 / this",
]


def timing_tables(runs: dict[str, dict]) -> str:
    """Return the tables of engine_timing as markdown."""
    mixes = list(dict.fromkeys(mix for run in runs.values() for mix in run["mixes"]))
    parts = [table(STEP_HEADER, [row for mix in mixes for row in step_rows(runs, mix)])]
    parts.append(
        table(
            [
                "run",
                "cache, GiB",
                "blocks",
                "tokens a block",
                "tokens a GiB",
                "vLLM's own figure for this cache, tokens",
                "peak, MiB",
                "scratch, MiB",
                "plans (planned/reused)",
            ],
            [
                [
                    name,
                    run["capacity"]["cache_gib"],
                    run["capacity"]["num_blocks"],
                    "/".join(
                        str(g["block_tokens"])
                        for g in run["capacity"]["groups"]
                        if "MLA" in g["spec"]
                    ),
                    run["capacity"]["tokens_per_gib"],
                    run["capacity"]["vllm_says_tokens"],
                    run.get("memory", {}).get("peak_mib", "-"),
                    run["workspace"]["scratch_mib"],
                    ", ".join(
                        f"{p['planned']}/{p['reused']}" for p in run.get("plans", [])
                    )
                    or "-",
                ]
                for name, run in runs.items()
            ],
        )
    )
    for mix in mixes:
        traced = {
            n: r["mixes"][mix]["trace"]
            for n, r in runs.items()
            if "trace" in r["mixes"].get(mix, {})
        }
        if not traced:
            continue
        groups = list(dict.fromkeys(g for t in traced.values() for g in t["groups"]))
        rows = [
            [g, *(f"{t['groups'].get(g, 0.0):.0f}" for t in traced.values())]
            for g in groups
        ]
        rows += [
            ["GPU busy", *(f"{t['busy_us']:.0f}" for t in traced.values())],
            ["first to last kernel", *(f"{t['span_us']:.0f}" for t in traced.values())],
        ]
        parts.append(table([f"{mix}: GPU us a step", *traced], rows))
    return "\n\n".join(parts)


def timing_report(
    out: Path, names: list[str], left_out: list[str], order: list[str]
) -> int:
    """Print the tables of engine_timing, write them, and return the exit status."""
    runs = {
        n: json.loads(p.read_text()) for n in order if (p := out / f"{n}.json").exists()
    }
    bad = [f"{n}: no result" for n in names if n not in runs and n not in left_out]
    for name, run in runs.items():
        bad += [
            f"{name}: {mix}: {entry['trace_error']}"
            for mix, entry in run["mixes"].items()
            if "trace_error" in entry
        ]
        bad += [
            f"{name}: {mix} has no time"
            for mix, entry in run["mixes"].items()
            if "median_us" not in entry
        ]
        if run.get("workspace_moved"):
            bad.append(f"{name}: a workspace was allocated after the start")
        if run["backend"].startswith("KIMI") and not run["workspace"]["locked"]:
            bad.append(f"{name}: the workspaces are not locked")
    text = timing_tables(runs) if runs else "no results"
    print("\n" + text)
    for name in left_out:
        print(f"not run: {name}")
    (out / "engine_timing.md").write_text(text + "\n")
    (out / "engine_timing.json").write_text(json.dumps(runs, indent=1))
    print("\nFAILED: " + "; ".join(bad) if bad else "\nall runs measured")
    return 1 if bad else 0
