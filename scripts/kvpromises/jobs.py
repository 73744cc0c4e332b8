# SPDX-License-Identifier: Apache-2.0
"""Processes with a time limit and a log each, several at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TAIL_LINES = 3
SANITIZERS = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
)


def sanitizer() -> str | None:
    """Where compute-sanitizer is, or None."""
    places = [shutil.which("compute-sanitizer"), *SANITIZERS]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


def python_of(project: Path) -> str:
    """PYTHONPATH of a child: this package, then what the parent has."""
    parts = [str(project / "scripts"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(part for part in parts if part)


@dataclass
class Job:
    """A command to run.

    Attributes:
        name: Name of the log.
        needs: Part of the machine that it needs: kernel, vllm, host or sanitizer.
        command: Its words.
        limit: Seconds after which it is ended.
        environment: Variables beside the parent's.
        folder: Where it runs.
        at_once: Whether only some of its kind run at the same time.

    """

    name: str
    needs: str
    command: list[str]
    limit: float
    environment: dict[str, str]
    folder: Path | None = None
    at_once: bool = False


class Queue:
    """Runs jobs side by side.

    Args:
        out: Folder of the logs.
        at_once: Most jobs with ``at_once`` at the same time.

    """

    def __init__(self, out: Path, at_once: int) -> None:
        self._out = out
        self._at_once = at_once
        self._waiting: list[Job] = []
        self._running: list[tuple[Job, subprocess.Popen, float, IO]] = []
        self.began = time.monotonic()
        self.ended: dict[str, tuple[int | None, float]] = {}
        """Exit status (None: ended by its limit) and seconds, by name."""

    def start(self, jobs: list[Job]) -> None:
        """Add jobs; as many as may run at once start."""
        self._waiting += jobs
        self._fill()

    def wait(self, until: float | None) -> None:
        """Wait for all jobs, or until so many seconds after the start."""
        while self._waiting or self._running:
            if until is not None and time.monotonic() - self.began >= until:
                return
            time.sleep(0.2)
            self._reap()
            self._fill()

    def _fill(self) -> None:
        busy = sum(job.at_once for job, *_ in self._running)
        for job in list(self._waiting):
            if job.at_once and busy >= self._at_once:
                continue
            busy += job.at_once
            self._waiting.remove(job)
            log = (self._out / f"{job.name}.log").open("w")
            process = subprocess.Popen(
                job.command, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **job.environment}, cwd=job.folder,
                start_new_session=True,
            )  # fmt: skip
            self._running.append((job, process, time.monotonic(), log))

    def _reap(self) -> None:
        for item in list(self._running):
            job, process, began, log = item
            seconds = time.monotonic() - began
            code = process.poll()
            if code is None and seconds < job.limit:
                continue
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self._running.remove(item)
            log.close()
            self.ended[job.name] = (code, round(seconds, 1))
            text = "ended by its time limit" if code is None else f"exit {code}"
            print(f"[{time.monotonic() - self.began:5.0f} s] {job.name}: {text}, "
                  f"{seconds:.0f} s", flush=True)  # fmt: skip
            if code != 0:
                lines = (self._out / f"{job.name}.log").read_text(errors="replace")
                for line in lines.strip().split("\n")[-TAIL_LINES:]:
                    print(f"        {line[:200]}", flush=True)
