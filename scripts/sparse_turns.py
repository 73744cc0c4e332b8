# SPDX-License-Identifier: Apache-2.0
"""Engines that start together, wait, and are timed in turns: for sparse_check.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from engine_jobs import child_command, environment, error_lines, say


class Run:
    """A child process: starting, then waiting for its turn, then timed, then ended."""

    def __init__(self, name: str, gpu: str, out: Path, script: str) -> None:
        self.name, self.out = name, out
        self.begin = time.time()
        self.state = "starting"
        self.turns = 0
        for mark in ("up", "turns"):
            (out / f"{name}.{mark}").unlink(missing_ok=True)
        env = environment(CUDA_VISIBLE_DEVICES=gpu)
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        log = (out / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            child_command(script, name),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        log.close()
        say(f"{name}: starting on GPU {gpu}")

    def look(self) -> str:
        """Return the state, after a look at the process."""
        if self.state != "ended" and (code := self.process.poll()) is not None:
            self.state = "ended"
            took = time.time() - self.begin
            say(f"{self.name}: ended with {code} after {took:.0f} s")
            if code:
                log = (self.out / f"{self.name}.log").read_text(errors="replace")
                print("\n".join("    " + line[:300] for line in error_lines(log)))
        elif self.state == "starting" and (self.out / f"{self.name}.up").exists():
            self.state = "waiting"
            say(f"{self.name}: up after {time.time() - self.begin:.0f} s")
        elif self.state == "timed" and self.turns_over() == self.turns:
            self.state = "waiting"
        return self.state

    def turns_over(self) -> int:
        """Return how many turns it has finished."""
        mark = self.out / f"{self.name}.turns"
        return int((mark.read_text() if mark.exists() else "") or 0)

    def go(self) -> None:
        """Let it time its steps for a turn."""
        self.state = "timed"
        self.turns += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def kill(self, why: str) -> None:
        """End it, with everything that it started."""
        if self.process.poll() is None:
            say(f"{self.name}: stopped: {why}")
            os.killpg(self.process.pid, signal.SIGKILL)
        self.state = "ended"

    def gone(self, limit: float) -> None:
        """Wait until it has left the GPU, but no longer than `limit` (time.time())."""
        try:
            self.process.wait(max(limit - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            say(f"{self.name}: is still there after SIGKILL")


def start_patience(shortest: float, start_limit: float, end: float) -> float:
    """Return how long (s) the engines of a wave may start, of what is left.

    The timing of all takes `shortest` seconds and more, so it keeps that much.
    """
    left = end - time.time()
    return min(start_limit, max(left - shortest, left / 2))


def take_turns(runs: list[Run], rounds: int, most: float, end: float) -> None:
    """Give every run one turn in each round; end those that take too long.

    No round begins that the time left is too short for, by the one before it.

    Args:
        runs: Runs that wait.
        rounds: Rounds, 1 or more.
        most: Seconds of one turn at most.
        end: time.time() at which all must be over.

    """
    took = 0.0
    for turn in range(rounds):
        begin = time.time()
        if took > end - begin:
            say(f"{turn} of {rounds} rounds: there is no time for another")
            return
        for place, run in enumerate(runs):
            share = (end - time.time()) / (len(runs) - place)
            if run.look() != "waiting":
                continue
            run.go()
            limit = time.time() + min(most, share)
            while run.look() == "timed" and time.time() < limit:
                time.sleep(0.02)
            if run.state == "timed":
                run.kill("the time of its turn is over")
                run.gone(time.time() + 3)
        took = time.time() - begin


def let_go(runs: list[Run], limit: float) -> None:
    """Tell runs that no turn follows; wait until they end, or `limit` (time.time())."""
    for run in runs:
        if run.look() == "waiting":
            assert run.process.stdin is not None
            run.process.stdin.close()
    while time.time() < limit and any([run.look() != "ended" for run in runs]):
        time.sleep(0.05)


def share_cores(count: int) -> list[int]:
    """Move all threads of this process to the host's last `count` cores.

    Engines that are timed in turns then differ by what they do, and not by the cores
    (and their neighbours) that they happen to be on.

    Returns:
        The cores.

    """
    cores = sorted(os.sched_getaffinity(0))[-count:]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
    return cores
