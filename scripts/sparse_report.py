# SPDX-License-Identifier: Apache-2.0
"""Tables and verdict of scripts/sparse_check.py, from the files that its runs wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_work import compare, spread

# Mean difference of log-probability (nats) that two runs may have. For the dsv32 model
# in float32 on the CPU (dense attention, 2300 tokens): rounding to bf16 moves it by
# 0.03, an FP8 cache by 0.10, keys with a rope part that is scaled by 0.25 by 1.0, an
# attention without output by 1.5.
SAME_CACHE_LIMIT, FP8_LIMIT = 0.15, 0.5
# Requests at which ours has to be the fastest.
JUDGED = ("1 x 4096", "8 x 4096")
# Of a model: reference, compared run, limit.
PAIRS = (
    ("fa3", "stock", SAME_CACHE_LIMIT),
    ("fa3", "ours", SAME_CACHE_LIMIT),
    ("stock", "ours", SAME_CACHE_LIMIT),
    ("fa3", "stock-fp8", FP8_LIMIT),
    ("fa3", "ours-fp8", FP8_LIMIT),
    ("stock-fp8", "ours-fp8", FP8_LIMIT),
    ("ours-fp8", "ours-fp8-scaled", FP8_LIMIT),
)


ROUND_KEYS = ("step_us", "build_us", "graph_us")


def better_turn(before: dict[str, Any] | None, times: dict[str, Any]) -> dict[str, Any]:
    """Return the times of the turn with the smaller median, with all turns' medians.

    Args:
        before: What was kept of the turns before, or None.
        times: The last turn's times; an error if it has no `step_us`.

    Returns:
        The turn's times, and `rounds`: for step, build and graph the median of every
        turn, None where a turn has none.

    """
    rounds = {
        key: [*(before["rounds"][key] if before else ()), _median(times, key)]
        for key in ROUND_KEYS
    }
    kept = before or times
    least, median = _median(kept, "step_us"), _median(times, "step_us")
    if before and median is not None and (least is None or median < least):
        # A later turn has no profile: keep the first one's.
        profile = {k: before[k] for k in ("busy_us", "kernels") if k in before}
        kept = dict(profile, **times)
    return dict(kept, rounds=rounds)


def _median(times: dict[str, Any], key: str) -> float | None:
    return times.get(key, {}).get("median")


def load(out: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results that exist, by run."""
    return {
        n: json.loads(p.read_text()) for n in names if (p := out / f"{n}.json").exists()
    }


def models_of(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return the models of the runs, each once."""
    return list(dict.fromkeys(run["model"] for run in runs.values()))


def token_rows(runs: dict[str, dict[str, Any]]) -> Iterator[tuple[dict, float]]:
    """Yield a comparison of tokens and its limit, for every pair that has run."""
    for model in models_of(runs):
        for a, b, limit in PAIRS:
            first, second = runs.get(f"{model}-{a}"), runs.get(f"{model}-{b}")
            if first and second and "greedy" in first and "greedy" in second:
                yield compare(first, second), limit


def gaps_of(row: dict[str, Any]) -> list[float]:
    """Return how far behind the best token (nats) the other was where two runs part."""
    return [part["gap"] for part in row["parts"] if part.get("among_best")]


def print_tokens(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Print the table of tokens and log-probabilities; return what is out of limits."""
    bad = []
    for model in models_of(runs):
        for who in ("fa3", "stock", "ours"):
            run = runs.get(f"{model}-{who}")
            if run and "forced" in run:
                print(f"{run['run']}: log-probabilities spread over {spread(run):.2f}")
                break
    print(
        f"\n{'|difference| in nats':<38}{'prefill max':>12}{'mean':>9}"
        f"{'decode max':>12}{'mean':>9}{'limit':>7}  greedy"
    )
    for row, limit in token_rows(runs):
        pair = f"{row['a']} : {row['b']}"
        print(
            f"{pair:<38}{row.get('prefill_max', '-')!s:>12}"
            f"{row.get('prefill_mean', '-')!s:>9}{row.get('decode_max', '-')!s:>12}"
            f"{row.get('decode_mean', '-')!s:>9}{limit:>7}  "
            f"{row['greedy_same']}/{row['greedy_total']}"
            + (f", gap <= {max(gaps):.2f}" if (gaps := gaps_of(row)) else "")
            + (f", {n} not near" if (n := len(row["parts"]) - len(gaps)) else "")
        )
        for kind in ("prefill", "decode"):
            mean = row.get(f"{kind}_mean")
            if mean is None or not mean <= limit:
                bad.append(f"{pair}: {kind} mean {mean}, limit {limit}")
    print(
        "greedy: tokens alike up to the first difference of each prompt; gap: how far "
        "the other token was\nbehind the best one there, at most; not near: prompts "
        "where it wasn't among the best 5"
    )
    return bad


def _cell(times: dict[str, Any], key: str) -> str:
    values = times.get(key, {})
    return f"{values['median']:.0f}" if values.get("n") else "-"


def _rounds_cell(times: dict[str, Any]) -> str:
    medians = [us for us in times.get("rounds", {}).get("step_us", []) if us]
    return f"{statistics.median(medians):.0f}" if medians else "-"


def print_times(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Print the table of step times; return the cases that failed."""
    bad = []
    print(
        f"\n{'us a decode step':<20}{'run':<18}{'n':>4}{'median':>9}{'p10':>8}"
        f"{'p90':>8}{'mean':>9}{'max':>9}{'build':>8}{'b.max':>8}{'graph':>8}{'busy':>8}"
        f"{'rounds':>9}"
    )
    cases = dict.fromkeys(c for run in runs.values() for c in run.get("cases", {}))
    for case in cases:
        for name, run in runs.items():
            times = run.get("cases", {}).get(case)
            if times is None:
                continue
            step = times.get("step_us", {})
            if not step.get("n"):
                bad.append(f"{name}, {case}: {times.get('error', 'no steady steps')}")
                continue
            print(
                f"{case:<20}{name:<18}{step['n']:>4}{step['median']:>9.0f}"
                f"{step['p10']:>8.0f}{step['p90']:>8.0f}{step['mean']:>9.0f}"
                f"{step['max']:>9.0f}{_cell(times, 'build_us'):>8}"
                f"{times['build_us']['max']:>8.0f}{_cell(times, 'graph_us'):>8}"
                f"{times.get('busy_us', '-')!s:>8}{_rounds_cell(times):>9}"
            )
    print(
        "step: from one call of the metadata builder to the next; build: its host time;"
        "\ngraph: CUDA graph replays on the GPU; busy: all kernels there (profile);"
        "\nrounds: median of the step's medians of all rounds, the rest: least round"
    )
    return bad


def lost_turns(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each judged case of a run that lacks turns which others had.

    A run lacks them if a turn failed, or if its engine ended before the last round.
    """
    bad = []
    for case in JUDGED:
        turns = {
            name: times["rounds"]["step_us"]
            for name, run in runs.items()
            if "rounds" in (times := run.get("cases", {}).get(case, {}))
        }
        most = max(map(len, turns.values()), default=0)
        for name, medians in turns.items():
            timed = sum(us is not None for us in medians)
            if 0 < timed < most:
                bad.append(f"{name}, {case}: {timed} of {most} turns, see {name}.log")
    return bad


def print_kernels(runs: dict[str, dict[str, Any]], case: str, rows: int = 5) -> None:
    """Print the largest kernels of each run in one case."""
    for name, run in runs.items():
        kernels = run.get("cases", {}).get(case, {}).get("kernels", [])
        for us, count, kernel in kernels[:rows]:
            print(f"{name:<18}{us:>9.1f} us {count:>6.1f} x  {kernel[:90]}")


def verdicts(
    runs: dict[str, dict[str, Any]], tolerance: float = 0.0
) -> Iterator[tuple[str, bool]]:
    """Yield a line for each model, cache, judged case and time, and whether it is good.

    Judged are the step, most of which is the host's for models so small, and the CUDA
    graph, which is what the GPU does; without graphs the step alone. Compared are the
    turns of one round, which lie a second or so apart: ours is faster than another if
    the median of the rounds' ratios says so. A comparison needs ours and every other
    backend that takes the cache: a missing one is no win.

    Args:
        runs: The runs' results by name.
        tolerance: A time of ours that is longer by at most this share is good too.

    """
    for model in models_of(runs):
        for suffix, others in (("", ("stock", "fa3")), ("-fp8", ("stock",))):
            group = [f"{model}-{w}{suffix}" for w in ("ours", *others)]
            if not any(name in runs for name in group):
                continue
            for case in JUDGED:
                for key, what in (("step_us", "step"), ("graph_us", "graph")):
                    times = {name: _rounds(runs, name, case, key) for name in group}
                    if what == "graph" and not any(map(any, times.values())):
                        continue
                    yield _verdict(group, times, f"{case}, {what}", tolerance)


def _rounds(
    runs: dict[str, dict[str, Any]], name: str, case: str, key: str
) -> list[float | None]:
    times = runs.get(name, {}).get("cases", {}).get(case, {})
    return times.get("rounds", {}).get(key, [])


def _verdict(
    group: list[str], times: dict[str, list[float | None]], what: str, tolerance: float
) -> tuple[str, bool]:
    label = f"{group[0]}, {what}: "
    ratios = {
        name: [
            other / ours
            for ours, other in zip(times[group[0]], times[name])
            if ours and other
        ]
        for name in group[1:]
    }
    if missing := [n for n in group if not any(times[n])]:
        return label + f"no verdict, {', '.join(missing)} has no time", False
    if missing := [n for n, both in ratios.items() if not both]:
        return label + f"no verdict, no round has ours and {missing[0]}", False
    best = min(ratios, key=lambda name: statistics.median(ratios[name]))
    least = statistics.median(ratios[best])
    won, good = least > 1, least * (1 + tolerance) > 1
    parts = [
        f"{name} {statistics.median(both):.2f} x (ours ahead in "
        f"{sum(ratio > 1 for ratio in both)} of {len(both)} rounds)"
        for name, both in ratios.items()
    ]
    which = "ours is the fastest" if won else f"{best} is faster"
    if good and not won:
        which += f", within {100 * tolerance:.0f} %"
    return f"{label}{which}; {', '.join(parts)}", good


def report(
    out: Path, names: list[str], known: list[str], tolerance: float = 0.0
) -> int:
    """Print everything, write the JSON lines, and return the exit status.

    Args:
        out: Folder with the runs' JSON.
        names: Runs that were asked for; a missing one is a failure.
        known: All runs, in the order of the tables.
        tolerance: As `verdicts` takes it.

    """
    runs = load(out, known)
    bad = [f"{n}: no result" for n in names if n not in runs]
    print("\nrun                     start s  backend file sha256")
    for name, run in runs.items():
        print(
            f"{name:<24}{run['start_seconds']:>7}  {run['sha256'][:16]} {run['file']}"
        )
    bad += print_tokens(runs)
    bad += print_times(runs)
    bad += lost_turns({n: run for n, run in runs.items() if n in names})
    print(f"\nlargest kernels, {JUDGED[-1]}")
    print_kernels(runs, JUDGED[-1])
    print("\nverdict")
    for line, good in verdicts(runs, tolerance):
        print("  " + line)
        if not good:
            bad.append(line)
    with (out / "sparse_check.jsonl").open("w") as file:
        for row, limit in token_rows(runs):
            file.write(json.dumps(dict(row, limit=limit)) + "\n")
        for run in runs.values():
            short = {k: v for k, v in run.items() if k != "forced"}
            file.write(json.dumps(short) + "\n")
    print(("\nFAILED:\n  " + "\n  ".join(bad)) if bad else "\nall checks passed")
    return 1 if bad else 0
