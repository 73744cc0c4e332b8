# SPDX-License-Identifier: Apache-2.0
"""Results of the promises' tests: collected, printed, and the documentation's table."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from .listing import Listing

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TILES = 6
CONFTEST = '''"""What vLLM's own conftest gives these tests."""

import logging

import pytest


@pytest.fixture
def caplog_vllm(caplog):
    logger = logging.getLogger("vllm")
    propagate, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, logger="vllm"):
        yield caplog
    logger.propagate = propagate
'''

Row = dict[str, Any]


def collect(
    listing: Listing,
    out: Path,
    missing: dict[str, str],
    ended: dict[str, tuple[int | None, float]],
) -> Row:
    """Gather every test's outcome: passed, failed, or left out with a reason.

    Args:
        listing: The promises.
        out: Folder with the processes' results and logs.
        missing: Parts that could not run, with their reasons.
        ended: Exit status and seconds of each process.

    Returns:
        ``tests`` by test id, and ``processes``.

    """
    tests: dict[str, Row] = {}
    for path in out.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            tests[row.pop("test")] = row
    tests |= _host(listing, out)
    tests |= _sanitizer(out, ended)
    tests |= _soak(out, ended)
    processes = listing.on_gpu()
    needs = {entry["name"]: entry["needs"] for entry in listing.processes}
    for promise in listing.promises:
        for test in promise["tests"]:
            if test in tests:
                continue
            process = processes.get(test, "host" if "::" in test else test)
            part = needs.get(process, "sanitizer" if process != "host" else "host")
            part = "kernel" if test == "soak" else part
            if part in missing:
                tests[test] = {"outcome": "left out", "note": missing[part]}
            elif any(name.startswith(process) for name in ended):
                note = f"no result; see {process}*.log"
                tests[test] = {"outcome": "failed", "note": note}
            else:
                tests[test] = {"outcome": "left out", "note": "not asked for"}
    return {"tests": tests, "processes": ended, "missing": missing}


def _host(listing: Listing, out: Path) -> dict[str, Row]:
    """Outcomes of pytest's tests, the cases of a test together."""
    alias_of = {Path(file).stem: alias for alias, file in listing.files.items()}
    found: dict[str, Row] = {}
    files = [path for path in sorted(out.glob("host-*.xml")) if path.stat().st_size]
    for case in (c for path in files for c in ET.parse(path).iter("testcase")):
        module = (case.get("classname") or "").split(".")[-1]
        name = (case.get("name") or "").split("[")[0]
        test = f"{alias_of.get(module, module)}::{name}"
        row = found.setdefault(
            test, {"outcome": "passed", "cases": 0, "skipped": 0, "note": ""}
        )
        bad = case.find("failure")
        bad = bad if bad is not None else case.find("error")
        skipped = case.find("skipped")
        row["cases"] += 1
        if bad is not None:
            row["outcome"] = "failed"
            row["note"] = (bad.get("message") or "").split("\n")[0][:300]
        elif skipped is not None:
            row["skipped"] += 1
            row["note"] = row["note"] or (skipped.get("message") or "")[:200]
    for row in found.values():
        if row["skipped"] == row["cases"]:
            row["outcome"] = "left out"
    return found


def _summary(log: Path) -> tuple[int | None, str]:
    """Errors that compute-sanitizer counted, and its first report."""
    text = log.read_text(errors="replace") if log.exists() else ""
    counts = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    counts += re.findall(r"RACECHECK SUMMARY: (\d+) hazard", text)
    reports = re.findall(r"^=+ (?:Error|Warning|Invalid)[^\n]*", text, re.M)
    return (int(counts[-1]) if counts else None), (reports[0][:200] if reports else "")


def _sanitizer(out: Path, ended: dict[str, tuple[int | None, float]]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for checker in ("memcheck", "racecheck"):
        if not any(name.startswith(checker) for name in ended):
            continue
        bad, ran = [], 0
        for tile in range(TILES):
            name = f"{checker}-{tile}"
            code, _ = ended.get(name, (None, 0.0))
            errors, first = _summary(out / f"{name}.log")
            ran += name in ended
            if code != 0 or errors != 0:
                counted = "no summary" if errors is None else f"{errors} reports"
                bad.append(f"tile {tile}: exit {code}, {counted} {first}".strip())
        found[checker] = {
            "outcome": "failed" if bad else "passed",
            "note": "; ".join(bad) or f"0 reports on {ran} tiles",
        }
    if "sanitizer-sees" in ended:
        errors, first = _summary(out / "sanitizer-sees.log")
        found["sanitizer-sees"] = {
            "outcome": "passed" if errors else "failed",
            "note": f"{errors} reports of a short LSE; {first}",
        }
    return found


def _soak(out: Path, ended: dict[str, tuple[int | None, float]]) -> dict[str, Row]:
    ran = [tile for tile in range(TILES) if f"soak-{tile}" in ended]
    if not ran:
        return {}
    results = []
    for tile in ran:
        path = out / f"soak-{tile}.json"
        if path.exists():
            results.append(json.loads(path.read_text()))
    failures = [text for one in results for text in one["failures"]]
    lost = len(ran) - len(results)
    batches = sum(one["batches"] for one in results)
    requests = sum(one["requests"] for one in results)
    worst = {
        key: max((one[key] for one in results), default=0.0)
        for key in ("error", "gain", "lse_error")
    }
    note = (
        f"{batches} batches, {requests} requests on {len(results)} tiles; largest "
        f"error {worst['error']:.4f}, LSE {worst['lse_error']:.5f}"
    )
    if failures:
        note += f"; {len(failures)} failures, first: {failures[0][:300]}"
    if lost:
        note += f"; {lost} tiles gave no result"
    good = not failures and not lost and batches > 0
    return {
        "soak": {
            "outcome": "passed" if good else "failed", "note": note,
            "tiles": results,
        }
    }  # fmt: skip


def failures(found: Row) -> int:
    """How many tests failed."""
    return sum(row["outcome"] == "failed" for row in found["tests"].values())


def result_of(promise: Row, tests: dict[str, Row]) -> str:
    """What a table's last column says of a promise."""
    rows = [
        (name, tests.get(name, {"outcome": "left out"})) for name in promise["tests"]
    ]
    bad = [name for name, row in rows if row["outcome"] == "failed"]
    out = [name for name, row in rows if row["outcome"] == "left out"]
    passed = [row for _, row in rows if row["outcome"] == "passed"]
    parts = []
    if bad:
        parts.append("**failed**: " + ", ".join(f"`{name}`" for name in bad))
    elif passed:
        parts.append("passed")
    if out:
        parts.append("left out: " + ", ".join(f"`{name}`" for name in out))
    parts += [row["note"] for row in passed if row.get("note") and "cases" not in row]
    return "; ".join(parts)


def compact(listing: Listing, found: Row) -> str:
    """Lines for the console: one a promise, then what failed."""
    tests = found["tests"]
    lines = ["", "promises:"]
    for number, promise in enumerate(listing.promises, 1):
        outcomes = [tests[name]["outcome"] for name in promise["tests"]]
        good = outcomes.count("passed")
        mark = "FAIL" if "failed" in outcomes else "ok  " if good else "none"
        text = promise["text"]
        lines.append(f"{mark} {number:2d} {good}/{len(outcomes)} {text[:88]}")
    for name, row in tests.items():
        if row["outcome"] == "failed":
            lines.append(f"failed: {name}: {row['note'][:300]}")
    soak = tests.get("soak", {})
    lines += [f"soak: {soak['note']}"] if "note" in soak else []
    slow = sorted(tests.items(), key=lambda item: -item[1].get("seconds", 0.0))[:8]
    lines.append(
        "slowest: "
        + ", ".join(f"{n} {r['seconds']} s" for n, r in slow if "seconds" in r)
    )
    counts = {kind: 0 for kind in ("passed", "failed", "left out")}
    for row in tests.values():
        counts[row["outcome"]] += 1
    total = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines.append(f"tests: {total}; {found['seconds']} s; {found['facts'].get('gpu')}")
    return "\n".join(lines)


def _test_cell(promise: Row) -> str:
    cell = "<br>".join(f"`{name}`" for name in promise["tests"])
    if promise.get("reports"):
        cell += "<br>reports: " + ", ".join(promise["reports"])
    return cell


def table(listing: Listing, found: Row | None) -> str:
    """The table of the documentation."""
    lines = ["| promise | test | result on H200 |", "|---|---|---|"]
    for promise in listing.promises:
        result = "" if found is None else result_of(promise, found["tests"])
        result = result.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {promise['text']} | {_test_cell(promise)} | {result} |")
    return "\n".join(lines)


def page(old: str, listing: Listing, found: Row | None) -> str:
    """The documentation's page with its table replaced."""
    head, rest = old.split(BEGIN)
    tail = rest.split(END)[1]
    facts = ""
    if found is not None:
        names = ("gpu", "commit", "torch", "nvidia-cutlass-dsl", "vllm")
        have = found["facts"]
        facts = "; ".join(f"{name} {have[name]}" for name in names if have.get(name))
        counts = [row["outcome"] for row in found["tests"].values()]
        facts += (
            f". {counts.count('passed')} tests passed, "
            f"{counts.count('failed')} failed, "
            f"{counts.count('left out')} left out, in {found['seconds']:.0f} s.\n\n"
        )
    return f"{head}{BEGIN}\n\n{facts}{table(listing, found)}\n\n{END}{tail}"


def page_problems(text: str, listing: Listing) -> list[str]:
    """Promises that the page lacks, or shows with other tests."""
    found = []
    for promise in listing.promises:
        row = f"| {promise['text']} | {_test_cell(promise)} |"
        if row not in text:
            found.append(f"docs/promises.md lacks this row: {promise['text'][:60]}")
    return found
