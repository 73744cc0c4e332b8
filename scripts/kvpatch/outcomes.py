# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes each test's outcome to $KVPATCH_OUTCOMES."""

from __future__ import annotations

import os
from typing import Any

RANK = ("passed", "skipped", "failed", "error")
found: dict[str, str] = {}


def note(nodeid: str, outcome: str) -> None:
    """Keep the worst outcome of a test's phases."""
    old = found.get(nodeid, "passed")
    found[nodeid] = max(old, outcome, key=RANK.index)


def pytest_runtest_logreport(report: Any) -> None:
    """Note one phase of one test."""
    outcome = report.outcome
    if outcome == "failed" and report.when != "call":
        outcome = "error"
    note(report.nodeid, outcome)


def pytest_collectreport(report: Any) -> None:
    """Note a file that can't be collected or skips itself as a whole."""
    if report.outcome != "passed":
        note(report.nodeid, "error" if report.outcome == "failed" else "skipped")


def pytest_sessionfinish() -> None:
    """Write all outcomes, one a line, sorted."""
    with open(os.environ["KVPATCH_OUTCOMES"], "w") as file:
        for nodeid, outcome in sorted(found.items()):
            file.write(f"{outcome} {nodeid}\n")
