# SPDX-License-Identifier: Apache-2.0
"""Turn a folder of JUnit XML into a markdown table and a list of failures.

    python ci/summary.py DIR [--title TEXT]

What the GPU parts leave in folders of their own joins it: the tests behind the promises
(promises/promises.json), and the tables of step times (TABLES). The exit status is 1
when a test failed, or when there is no result at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

MAX_FAILURES = 20
MAX_REASONS = 8
PROMISES = "promises/promises.json"
TABLES = {
    "Decode steps in the engine": "timing/engine_timing.md",
    "Two GPUs": "two-gpus/two_gpu_check.md",
}


def read(path: Path) -> tuple[Counter, float, list[str], Counter]:
    """Return outcome counts, seconds, failed tests and skip reasons of one file."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures, seconds = [], 0.0
    for case in ET.parse(path).iter("testcase"):
        seconds += float(case.get("time") or 0)
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = case.find("failure")
        bad = bad if bad is not None else case.find("error")
        skipped = case.find("skipped")
        if bad is not None:
            counts["failed"] += 1
            message = (bad.get("message") or "").strip().split("\n")[0]
            failures.append(f"`{name}`: {message[:200]}")
        elif skipped is not None:
            counts["skipped"] += 1
            reasons[(skipped.get("message") or "no reason").split("\n")[0]] += 1
        else:
            counts["passed"] += 1
    return counts, seconds, failures, reasons


def read_promises(path: Path) -> tuple[Counter, float, list[str], Counter]:
    """Return the same of what scripts/promises.py found."""
    found = json.loads(path.read_text())
    counts: Counter[str] = Counter()
    failures = []
    reasons: Counter[str] = Counter()
    for name, test in found["tests"].items():
        first = (test["note"] or "no reason").splitlines()[0]
        if test["outcome"] == "passed":
            counts["passed"] += 1
        elif test["outcome"] == "failed":
            counts["failed"] += 1
            failures.append(f"`{name}`: {first[:200]}")
        else:
            counts["skipped"] += 1
            reasons[first] += 1
    return counts, found["seconds"], failures, reasons


def markdown(folder: Path, title: str) -> tuple[str, bool]:
    """Return the summary, and whether everything passed."""
    lines = [f"## {title}", "", "| | passed | failed | skipped | s |"]
    lines.append("|---|---|---|---|---|")
    failures: list[str] = []
    reasons: Counter[str] = Counter()
    files = sorted(folder.glob("*.xml"))
    if (folder / PROMISES).exists():
        files.append(folder / PROMISES)
    for path in files:
        parsed = read_promises if path.suffix == ".json" else read
        counts, seconds, bad, why = parsed(path)
        failures += bad
        reasons += why
        cells = [counts["passed"], counts["failed"], counts["skipped"], round(seconds)]
        name = path.stem if path.suffix == ".xml" else "promises: each test"
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    if failures:
        lines += ["", f"### {len(failures)} failed", ""]
        lines += [f"- {text}" for text in failures[:MAX_FAILURES]]
    if reasons:
        lines += ["", "### Skipped because", ""]
        lines += [f"- {n}: {text}" for text, n in reasons.most_common(MAX_REASONS)]
    for title, name in TABLES.items():
        if (folder / name).exists():
            lines += ["", f"### {title}", "", (folder / name).read_text().strip()]
    if not files:
        lines += ["", "There are no results."]
    return "\n".join(lines) + "\n", bool(files) and not failures


def main() -> int:
    """Print the summary; return 1 when something failed."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("folder", type=Path, help="where the parts left their XML")
    made.add_argument("--title", default="Tests", help="heading of the summary")
    args = made.parse_args()
    text, good = markdown(args.folder, args.title)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
