# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests on the patched tree, compared with what stock gives.

Running stock every time would double the wait, so its outcomes are recorded for the
pin in ci/baseline/. On any difference the run fails: a test that stock passes and the
patched tree doesn't, but also one that got better or vanished, because then the record
or the patch's story is wrong. Tests that a patch adds may pass or skip.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .cli_apply import default_tree
from .errors import PatchSetError
from .fetch import fetch_release, unpack
from .patchset import PatchSet, load_patch_set
from .state import look
from .target import open_tree

ALLOWED = "ci/baseline/allowed.txt"


def read_outcomes(path: Path) -> dict[str, str]:
    """Read `outcome nodeid` lines; comments and blank lines are passed over."""
    rows: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            outcome, _, nodeid = line.partition(" ")
            rows[nodeid] = outcome
    return rows


def compare(
    stock: dict[str, str], patched: dict[str, str], allowed: dict[str, str]
) -> list[str]:
    """Return one line for each difference that isn't allowed.

    Args:
        stock: Test -> outcome on the stock tree.
        patched: The same on the patched tree.
        allowed: Test -> outcome on the patched tree that a patch declares; "gone" for
            one that it removes.

    """
    lines = []
    for nodeid in sorted(set(stock) | set(patched)):
        was, now = stock.get(nodeid), patched.get(nodeid, "gone")
        if was == now or allowed.get(nodeid) == now:
            continue
        if was is None and now in ("passed", "skipped"):
            continue
        lines.append(f"{was or 'new'} -> {now}: {nodeid}")
    unused = sorted(n for n, o in allowed.items() if patched.get(n, "gone") != o)
    return lines + [f"{ALLOWED} allows what doesn't happen: {n}" for n in unused]


def run_tests(tree: Path, tests: list[str], out: Path, junit: Path | None) -> int:
    """Run tests in a tree with this Python, on the CPU; return pytest's status."""
    here = Path(__file__).resolve().parents[1]
    env = dict(
        os.environ,
        PYTHONPATH=str(here),
        VLLM_TARGET_DEVICE="cpu",
        HF_HUB_OFFLINE="1",
        KVPATCH_OUTCOMES=str(out),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    # From the tree's root, `python -m pytest` imports the tree's own vllm.
    command = [sys.executable, "-m", "pytest", "-p", "kvpatch.outcomes", "-q"]
    command += ["--tb=line", "--no-header", "-p", "no:cacheprovider", "-W", "ignore"]
    if junit:
        command.append(f"--junitxml={junit}")
    ran = subprocess.run([*command, *tests], cwd=tree, env=env)
    if not out.exists():
        raise PatchSetError(
            "vLLM's tests didn't run", got=f"pytest ended with status {ran.returncode}"
        )
    return ran.returncode


def _tests(ps: PatchSet, tree: Path) -> list[str]:
    lines = (ps.root / "ci" / "upstream_tests.txt").read_text().splitlines()
    names = [li.strip() for li in lines if li.strip() and not li.startswith("#")]
    if missing := [n for n in names if not (tree / n).exists()]:
        raise PatchSetError(
            "ci/upstream_tests.txt lists tests that the tree doesn't have",
            got=", ".join(missing),
        )
    return names


def record_file(ps: PatchSet) -> Path:
    """Return where stock's outcomes for the pin are kept."""
    return ps.root / "ci" / "baseline" / f"{ps.pin.project}-{ps.pin.version}-cpu.txt"


def record(ps: PatchSet) -> int:
    """Run the tests on a stock tree and keep the outcomes."""
    tree = ps.root / "build" / "stock"
    if not tree.exists():
        unpack(fetch_release(ps.pin), tree)
    if not look(open_tree(tree, ps.pin), ps).is_stock:
        raise PatchSetError("build/stock isn't stock", todo=f"rm -r {tree}")
    out = ps.root / "build" / "outcomes-stock.txt"
    run_tests(tree, _tests(ps, tree), out, None)
    kept = record_file(ps)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(
        f"# Outcomes of vLLM {ps.pin.version}'s own tests on a CPU, stock tree.\n"
        "# Written by: scripts/kv.py baseline --record\n" + out.read_text()
    )
    print(f"recorded {_summary(read_outcomes(kept))} in {kept}")
    return 0


def _summary(rows: dict[str, str]) -> str:
    counts = Counter(rows.values())
    return ", ".join(f"{counts[k]} {k}" for k in sorted(counts))


def main(argv: list[str]) -> int:
    """Run `kv.py baseline`; return its exit status."""
    made = argparse.ArgumentParser(
        prog="kv.py baseline", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--record", action="store_true", help="run stock, keep outcomes")
    made.add_argument("--junit", type=Path, help="also write JUnit XML")
    args = made.parse_args(argv)
    ps = load_patch_set(Path(__file__).resolve().parents[2])
    if args.record:
        return record(ps)
    tree = default_tree(ps)
    target = open_tree(tree, ps.pin)
    if not look(target, ps).is_patched:
        raise PatchSetError(
            "the tree isn't patched", got=str(tree), todo="run scripts/apply.sh"
        )
    kept = record_file(ps)
    if not kept.exists():
        raise PatchSetError(
            "there is no record of stock's outcomes for this pin",
            got=str(kept),
            todo="scripts/kv.py baseline --record",
        )
    out = ps.root / "build" / "outcomes-patched.txt"
    run_tests(tree, _tests(ps, tree), out, args.junit)
    allowed = ps.root / ALLOWED
    stock, patched = read_outcomes(kept), read_outcomes(out)
    bad = compare(stock, patched, read_outcomes(allowed) if allowed.exists() else {})
    print(f"stock:   {_summary(stock)}\npatched: {_summary(patched)}")
    for line in bad:
        print(f"  {line}")
    print(f"{len(bad)} difference(s)" if bad else "no difference from stock")
    return 1 if bad else 0
