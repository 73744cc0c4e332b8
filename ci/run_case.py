# SPDX-License-Identifier: Apache-2.0
"""Run a command and keep its outcome as a JUnit XML test case.

    python ci/run_case.py --junit DIR NAME -- COMMAND...
    python ci/run_case.py --junit DIR --skip REASON NAME

Prints what the command prints; the XML holds its last lines when it fails. With --limit
the command, and what it started, is ended after so many seconds, which is a failure.
So it is on SIGINT and SIGTERM, and the exit status is then 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import deque
from pathlib import Path

TAIL_LINES = 60
TIMED_OUT, INTERRUPTED = 124, 130
MESSAGES = {TIMED_OUT: "its time was over", INTERRUPTED: "interrupted"}
# Between asking politely, which pytest answers with its XML, and not.
GRACE_SECONDS = 20.0


def case_xml(
    name: str, seconds: float, code: int, tail: str, skip: str = ""
) -> ET.ElementTree:
    """Return a JUnit document of one test case."""
    failed = "1" if code else "0"
    suite = ET.Element(
        "testsuite", name=name, tests="1", failures=failed, errors="0",
        skipped="1" if skip else "0",
        time=f"{seconds:.3f}",
    )  # fmt: skip
    case = ET.SubElement(
        suite, "testcase", classname="ci", name=name, time=f"{seconds:.3f}"
    )
    if code:
        message = MESSAGES.get(code, f"exit status {code}")
        failure = ET.SubElement(case, "failure", message=message)
        failure.text = "".join(c for c in tail if c in "\n\t" or c.isprintable())
    if skip:
        ET.SubElement(case, "skipped", message=skip)
    top = ET.Element("testsuites")
    top.append(suite)
    return ET.ElementTree(top)


def heed_interrupts() -> None:
    """Undo what a shell does to background jobs, so that a command can be asked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen, ended: list[int], code: int) -> None:
    """End a command's session: ask, wait, kill. `ended` gets `code`."""
    ended.append(code)
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run(words: list[str], limit: float | None, tail: deque[str]) -> int:
    """Run a command, print what it prints, and return its exit status."""
    ended: list[int] = []
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True, preexec_fn=heed_interrupts,
    ) as ran:  # fmt: skip
        timer = threading.Timer(limit or 0, end, (ran, ended, TIMED_OUT))

        def interrupted(*_: object) -> None:
            timer.cancel()
            threading.Thread(target=end, args=(ran, ended, INTERRUPTED)).start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted)
        if limit is not None:
            timer.start()
        assert ran.stdout is not None
        for line in ran.stdout:
            print(line, end="", flush=True)
            tail.append(line)
        code = ran.wait()
        timer.cancel()
    if ended:
        tail.append(
            f"ended after {limit:.0f} s\n" if ended[0] == TIMED_OUT else "interrupted\n"
        )
        return ended[0]
    return code


def main() -> int:
    """Run the command; return its exit status."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--junit", type=Path, required=True, help="folder for the XML")
    made.add_argument("--limit", type=float, help="seconds that it may take")
    made.add_argument("--skip", default="", help="run nothing, for this reason")
    made.add_argument("name", help="of the test case and its XML")
    made.add_argument("command", nargs=argparse.REMAINDER, help="after `--`")
    args = made.parse_args()
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if bool(words) == bool(args.skip):
        made.error("give a command after the name, or --skip")
    begin, code, tail = time.monotonic(), 0, deque[str](maxlen=TAIL_LINES)
    if words:
        code = run(words, args.limit, tail)
    else:
        print(f"{args.name}: skipped, {args.skip}")
    seconds = time.monotonic() - begin
    args.junit.mkdir(parents=True, exist_ok=True)
    document = case_xml(args.name, seconds, code, "".join(tail), args.skip)
    document.write(args.junit / f"{args.name}.xml", encoding="unicode")
    return code


if __name__ == "__main__":
    sys.exit(main())
