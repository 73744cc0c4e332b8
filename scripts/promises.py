#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the tests behind every promise of the backend, and make docs/promises.md.

    python scripts/promises.py --out DIR        on a machine with a Hopper GPU
    python scripts/promises.py --table DIR/promises.json
    python scripts/promises.py --check          the list against the tests, no GPU

ci/promises.toml has the promises and their tests. Needed on the GPU: torch and the
CuTe DSL for the kernel's part, vLLM with this patch set for the rest; what is missing
is left out, and said so. Everything runs in processes of its own with a time limit: a
failure or a hang of one leaves the others their results. DIR gets promises.json, and a
log of each process.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpromises import report
from kvpromises.jobs import Job, Queue, python_of, sanitizer
from kvpromises.listing import Listing

PROJECT = Path(__file__).resolve().parent.parent
OVERLAY = PROJECT / "vllm_overlay"
TILES = 6
HOST_PROCESSES = 3
SECONDS_OF_A_PROCESS = 220.0
SECONDS_OF_A_SANITIZER_RUN = 120.0
SANITIZERS_AT_ONCE = 4
PLAN_CHECKS = [
    "planner_equals_reference",
    "planner_follows_lengths_in_a_graph",
    "combine",
]


# --- inside a process that has the GPU --------------------------------------------


def plan_checks(module: Any) -> dict[str, Callable[[], Any]]:
    """The checks of the planner's test file, whose tests are pytest's only."""

    def combine() -> str:
        worst = 0.0
        for case in module.COMBINE_CASES.values():
            for use_pdl in (False, True):
                worst = max(worst, module.check_combine(*case, use_pdl=use_pdl)[1])
        module.check_combine([8192] * 80, 66, 96, with_lse=False)
        return f"largest error {worst:.1e}"

    def planner() -> str:
        for shape in module.SHAPES:
            module.check_planner(*shape)
        return f"{len(module.SHAPES)} shapes"

    return {
        "planner_equals_reference": planner,
        "planner_follows_lengths_in_a_graph": module.check_planner_replay,
        "combine": combine,
    }


def import_tests(file: str, alone: bool) -> Any:
    """Import a test file: by its path without vLLM, else as vLLM's tests are."""
    folder = OVERLAY / "tests" / "v1" / "attention"
    name = Path(file).stem
    if alone:
        sys.modules["vllm"] = None  # type: ignore[assignment]
        sys.path.insert(0, str(folder))
        return importlib.import_module(name)
    return importlib.import_module(f"tests.v1.attention.{name}")


def work(listing: Listing, process: str, results: Path) -> int:
    """Run one process's tests one by one; a line of JSON for each."""
    entry = listing.process(process)
    failed = 0
    with results.open("a") as out:
        for alias in dict.fromkeys(name.split("::")[0] for name in entry["tests"]):
            module = import_tests(listing.files[alias], entry["needs"] == "kernel")
            tests = {n: f for n, f in vars(module).items() if n.startswith("test_")}
            if alias == "plan_gpu":
                tests = plan_checks(module)
            reason = getattr(module, "missing", lambda: None)() or getattr(
                module, "MISSING", None
            )
            for name in listing.names_of(entry, alias, list(tests)):
                began = time.monotonic()
                row: dict[str, Any] = {"test": f"{alias}::{name}"}
                try:
                    if reason is not None:
                        raise RuntimeError(f"can't run here: {reason}")
                    note = tests[name]()
                    row |= {"outcome": "passed", "note": str(note) if note else ""}
                except BaseException as error:  # noqa: BLE001
                    failed += 1
                    text = f"{type(error).__name__}: {error}"
                    row |= {"outcome": "failed", "note": text[:600]}
                    traceback.print_exc(limit=-6)
                row["seconds"] = round(time.monotonic() - began, 1)
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(row, flush=True)
                if row["outcome"] == "failed" and "CUDA error" in row["note"]:
                    return failed  # the context is gone: so is all that follows
    return failed


# --- the driver -------------------------------------------------------------------


def tests_tree(out: Path) -> Path:
    """Make a folder in which ``tests.v1.attention`` is the overlay's."""
    root = out / "tree"
    folder = root / "tests" / "v1" / "attention"
    folder.mkdir(parents=True, exist_ok=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    for path in (OVERLAY / "tests" / "v1" / "attention").glob("*kimi_k3*.py"):
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    (root / "conftest.py").write_text(report.CONFTEST)
    return root


def has(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def missing_parts() -> dict[str, str]:
    """Which parts can't run here, and why."""
    found: dict[str, str] = {}
    if not has("torch") or not has("cutlass"):
        found["kernel"] = "torch or the CuTe DSL (nvidia-cutlass-dsl) is not installed"
    if not has("vllm"):
        found["vllm"] = "vLLM is not installed"
    elif not has("triton"):
        found["vllm"] = "Triton is not installed"
    else:
        spec = importlib.util.find_spec("vllm")
        folders = list((spec and spec.submodule_search_locations) or [])
        package = "models/kimi_k3/nvidia/kv_balanced_mla/backend.py"
        if not any((Path(folder) / package).exists() for folder in folders):
            found["vllm"] = f"the vLLM in {folders} lacks this patch set"
    if not has("pytest") or "vllm" in found:
        found["host"] = found.get("vllm", "pytest is not installed")
    if sanitizer() is None:
        found["sanitizer"] = "compute-sanitizer is not installed"
    return found


def gpu_jobs(listing: Listing, out: Path, root: Path) -> list[Job]:
    """The GPU processes of the list."""
    jobs = []
    for entry in listing.processes:
        name = entry["name"]
        results = out / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--work", name, "--results", str(results)]
        environment = {"PYTHONPATH": f"{root}{os.pathsep}{python_of(PROJECT)}"}
        jobs.append(
            Job(name, entry["needs"], command, SECONDS_OF_A_PROCESS, environment)
        )
    return jobs


def host_jobs(listing: Listing, out: Path, root: Path) -> list[Job]:
    """The tests that need no GPU, by pytest in processes that see none."""
    gpu = {name.split("::")[0] for e in listing.processes for name in e["tests"]}
    files = [
        f"tests/v1/attention/{file}"
        for alias, file in listing.files.items()
        if alias not in gpu
    ]
    environment = {
        "PYTHONPATH": f"{root}{os.pathsep}{python_of(PROJECT)}",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_TARGET_DEVICE": "cpu",
    }
    jobs = []
    for number in range(HOST_PROCESSES):
        junit = out / f"host-{number}.xml"
        junit.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-W", "ignore", "--no-header", "--durations=3", "--tb=short"]
        command += [f"--junitxml={junit}", "--rootdir", str(root)]
        command += files[number::HOST_PROCESSES]
        limit = SECONDS_OF_A_PROCESS
        jobs.append(Job(f"host-{number}", "host", command, limit, environment, root))
    return jobs


ALONE = (
    "import runpy, sys; sys.modules['vllm'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def script(name: str, *options: str) -> list[str]:
    """Command of a script of the overlay's tests, on the kernel package alone."""
    path = OVERLAY / "tests" / "v1" / "attention" / name
    return [sys.executable, "-c", ALONE, str(path), *options]


def sanitizer_jobs() -> list[Job]:
    """Memcheck and racecheck of each tile, and one that must find something."""
    tool = sanitizer()
    if tool is None:
        return []
    runs = [("sanitizer-sees", "memcheck", ["--tile", "4", "--break"])]
    for checker in ("memcheck", "racecheck"):
        for tile in range(TILES):
            options = ["--every-lane"] if checker == "racecheck" else []
            runs.append((f"{checker}-{tile}", checker, ["--tile", str(tile), *options]))
    jobs = []
    for name, checker, options in runs:
        command = [tool, "--tool", checker, "--print-limit", "20"]
        # Libraries probe the driver for entry points; those calls may fail.
        command += ["--error-exitcode", "9", "--report-api-errors", "no"]
        if checker == "memcheck":  # else an overrun may end in the next allocation
            command += ["--padding", "4096"]
        command += script("kimi_k3_kv_balanced_mla_sanitize.py", *options)
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        limit = SECONDS_OF_A_SANITIZER_RUN
        jobs.append(Job(name, "sanitizer", command, limit, environment, at_once=True))
    return jobs


def soak_jobs(out: Path, seconds: float) -> list[Job]:
    """One soak a tile, all at the same time on one GPU."""
    jobs = []
    for tile in range(TILES):
        result = out / f"soak-{tile}.json"
        result.unlink(missing_ok=True)
        command = script(
            "kimi_k3_kv_balanced_mla_soak.py", "--tile", str(tile),
            "--seconds", str(seconds), "--json", str(result),
        )  # fmt: skip
        jobs.append(Job(f"soak-{tile}", "kernel", command, seconds + 60, {}))
    return jobs


def facts() -> dict[str, str]:
    """GPU, versions and the commit, as far as they can be found."""
    found = {"python": sys.version.split()[0]}
    commands = {
        "gpu": [
            "nvidia-smi",
            "--query-gpu=name,driver_version",
            "--format=csv,noheader",
        ],
        "commit": ["git", "-C", str(PROJECT), "describe", "--always", "--dirty"],
    }
    for name, command in commands.items():
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
            found[name] = ran.stdout.strip().split("\n")[0]
        except (OSError, subprocess.TimeoutExpired):
            found[name] = ""
    for package in ("torch", "triton", "vllm", "nvidia-cutlass-dsl"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def run_all(listing: Listing, args: argparse.Namespace) -> int:
    """Run everything that this machine can; returns the number of failures."""
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    root = tests_tree(out)
    missing = missing_parts()
    for part, reason in missing.items():
        print(f"left out: {part}: {reason}", flush=True)
    jobs = [*gpu_jobs(listing, out, root), *host_jobs(listing, out, root)]
    jobs += sanitizer_jobs()
    soaks = soak_jobs(out, args.soak) if args.soak else []
    wanted = set(args.only.split(",")) if args.only else None
    names = {job.name for job in [*jobs, *soaks]}
    kinds = {name.split("-")[0] for name in names}
    if unknown := sorted((wanted or set()) - names - kinds):
        raise SystemExit(
            f"promises.py: --only names no process: {', '.join(unknown)}; there are "
            f"{', '.join(sorted(names))}, and each up to its first dash for all of them"
        )

    def runs(job: Job) -> bool:
        chosen = (
            wanted is None or job.name.split("-")[0] in wanted or job.name in wanted
        )
        return job.needs not in missing and chosen

    queue = Queue(out, SANITIZERS_AT_ONCE)
    queue.start([job for job in jobs if runs(job)])
    soaks = [job for job in soaks if runs(job)]
    queue.wait(args.soak_at if soaks else None)
    queue.start(soaks)
    queue.wait(None)
    found = report.collect(listing, out, missing, queue.ended)
    found["facts"] = facts()
    found["seconds"] = round(time.monotonic() - queue.began, 1)
    (out / "promises.json").write_text(json.dumps(found, indent=1) + "\n")
    print(report.compact(listing, found), flush=True)
    return report.failures(found)


def main() -> int:
    """Run, check the list, or write the table."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--out", type=Path, help="run; results go to this folder")
    made.add_argument(
        "--soak", type=float, default=120.0, metavar="SECONDS", help="0: no soak"
    )
    made.add_argument(
        "--soak-at", type=float, default=90.0, metavar="SECONDS",
        help="start the soak then, or earlier if nothing else runs any more",
    )  # fmt: skip
    made.add_argument("--only", help="processes by name, comma-separated")
    made.add_argument(
        "--table", type=Path, metavar="JSON", help="write docs/promises.md"
    )
    made.add_argument("--check", action="store_true", help="the list against the tests")
    made.add_argument("--work", help=argparse.SUPPRESS)
    made.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = made.parse_args()
    folder = OVERLAY / "tests" / "v1" / "attention"
    listing = Listing(PROJECT / "ci" / "promises.toml", folder, PLAN_CHECKS)
    if args.work:
        return min(work(listing, args.work, args.results), 100)
    problems = listing.problems()
    print("\n".join(problems), end="\n" if problems else "")
    if args.table is not None:
        found = json.loads(args.table.read_text())
        page = PROJECT / "docs" / "promises.md"
        page.write_text(report.page(page.read_text(), listing, found))
        return 0
    if args.out is not None:
        return min(run_all(listing, args), 100)
    if not args.check:
        made.error("say what to do: --out, --table or --check")
    page = PROJECT / "docs" / "promises.md"
    problems += report.page_problems(page.read_text(), listing)
    print(f"{len(listing.promises)} promises, {len(problems)} problems")
    return min(len(problems), 100)


if __name__ == "__main__":
    sys.exit(main())
