# SPDX-License-Identifier: Apache-2.0
"""Run a command and keep its outcome as a JUnit XML test case.

    python ci/run_case.py --junit DIR NAME -- COMMAND...

Prints what the command prints; the XML holds its last lines when it fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import deque
from pathlib import Path

TAIL_LINES = 60


def case_xml(name: str, seconds: float, code: int, tail: str) -> ET.ElementTree:
    """Return a JUnit document of one test case."""
    failed = "1" if code else "0"
    suite = ET.Element(
        "testsuite", name=name, tests="1", failures=failed, errors="0", skipped="0",
        time=f"{seconds:.3f}",
    )  # fmt: skip
    case = ET.SubElement(
        suite, "testcase", classname="ci", name=name, time=f"{seconds:.3f}"
    )
    if code:
        failure = ET.SubElement(case, "failure", message=f"exit status {code}")
        failure.text = "".join(c for c in tail if c in "\n\t" or c.isprintable())
    top = ET.Element("testsuites")
    top.append(suite)
    return ET.ElementTree(top)


def main() -> int:
    """Run the command; return its exit status."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--junit", type=Path, required=True, help="folder for the XML")
    made.add_argument("name")
    made.add_argument("command", nargs=argparse.REMAINDER)
    args = made.parse_args()
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not words:
        made.error("there is no command after the name")
    begin, tail = time.monotonic(), deque[str](maxlen=TAIL_LINES)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as ran:  # fmt: skip
        assert ran.stdout is not None
        for line in ran.stdout:
            print(line, end="", flush=True)
            tail.append(line)
    seconds = time.monotonic() - begin
    args.junit.mkdir(parents=True, exist_ok=True)
    document = case_xml(args.name, seconds, ran.returncode, "".join(tail))
    document.write(args.junit / f"{args.name}.xml", encoding="unicode")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
