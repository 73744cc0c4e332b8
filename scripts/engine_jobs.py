# SPDX-License-Identifier: Apache-2.0
"""Run engines as child processes: several at a time, spread over GPUs, timed alone.

A child that measures time calls :meth:`Gate.wait` once it is warm. The parent opens
one gate at a time on a GPU, and only when nothing else runs there. With a last end,
jobs that hang can't keep the others from measuring, nor the caller from its report.
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = time.time()
POLL_SECONDS = 0.1


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.time() - START:6.1f} s] {text}", flush=True)


def environment(**more: str) -> dict[str, str]:
    """Return a child's environment: in-process engine core, no network, no JIT.

    The engine core stays in the child, where the schedule can be read and steps be
    timed; FlashInfer's sampler would be compiled at start-up (100 s) for nothing.
    """
    env = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Worker processes import engine_hooks by name.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), *filter(None, [env.get("PYTHONPATH")])]
    )
    env.update(more)
    return env


def compile_bytecode(package: str = "vllm") -> None:
    """Compile a package's bytecode before children that would each do it start.

    An installer leaves bytecode behind, an unpacked archive doesn't. Nothing happens
    if there is some, if the folder can't be written, or if there is no such package.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or []:
        cached = importlib.util.cache_from_source(os.path.join(folder, "__init__.py"))
        if os.path.exists(cached) or not os.access(folder, os.W_OK):
            continue
        say(f"{folder} has no bytecode: compiling it once for all engines")
        compileall.compile_dir(folder, quiet=2, workers=0)


def begin(
    made: argparse.ArgumentParser,
    runs: Mapping[str, Any],
    defaults: Iterable[str],
    run_child: Callable[[str, argparse.Namespace], None],
) -> tuple[argparse.Namespace, Path, list[str]] | None:
    """Read the command line; a child does its run here.

    Args:
        made: The parser; it has ``--out``, ``--only`` and ``--child``.
        runs: What ``--only`` may name.
        defaults: The runs without ``--only``.
        run_child: Called in a child, with its run and the arguments.

    Returns:
        The arguments, the result folder, which exists, and the chosen runs. None in a
        child, when it is done.

    """
    args = made.parse_args()
    args.out = str(Path(args.out).resolve())
    if args.child:
        run_child(args.child, args)
        return None
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else list(defaults)
    if unknown := [n for n in names if n not in runs]:
        made.error(f"unknown runs {unknown}; there are {', '.join(runs)}")
    return args, out, names


class Gate:
    """The child's side of a measurement that must not share its GPU.

    Args:
        out: Folder that parent and child share.
        name: The run's name.

    """

    def __init__(self, out: Path, name: str) -> None:
        self.ready = out / f"{name}.ready"
        self.open = out / f"{name}.go"

    def clear(self) -> None:
        """Remove what an earlier run left."""
        self.ready.unlink(missing_ok=True)
        self.open.unlink(missing_ok=True)

    def wait(self, seconds: float) -> None:
        """Say that this child is warm, and wait until the GPU is its own.

        Raises:
            TimeoutError: If the parent doesn't open the gate in time.

        """
        self.ready.touch()
        limit = time.time() + seconds
        while not self.open.exists():
            if time.time() > limit:
                raise TimeoutError(
                    f"the GPU did not become free within {seconds:.0f} s: other "
                    "engines of this call still start; raise --timeout or run fewer"
                )
            time.sleep(POLL_SECONDS)


@contextmanager
def turn(out: Path, places: int) -> Iterator[None]:
    """Wait for one of `places` places among the children that share a folder.

    Engines that span several GPUs must not all generate at the same time: processes of
    one GPU get it in slices of time, and a collective ends only in a moment in which
    every rank of its engine has a slice. A child that dies leaves its place.

    Args:
        out: Folder that the children share.
        places: How many children may go on at a time.

    """
    files = [(out / f"place-{i}.lock").open("w") for i in range(places)]
    try:
        while True:
            for file in files:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
            time.sleep(POLL_SECONDS)
    finally:
        for file in files:
            file.close()


@dataclass
class Job:
    """One child process.

    Attributes:
        name: The run's name; its log is `<name>.log`.
        command: What to run.
        gpus: The GPUs that it sees, as CUDA_VISIBLE_DEVICES takes them. Empty: any.
        timed: It waits at a gate before it measures.
        env: Variables of this run alone.

    """

    name: str
    command: list[str]
    gpus: tuple[str, ...] = ()
    timed: bool = False
    env: dict[str, str] = field(default_factory=dict)
    state: str = "pending"  # pending, running, measuring, ended, left out
    end: float = float("inf")  # seconds after the script's start; then it is killed


def error_lines(text: str, most: int = 40) -> list[str]:
    """Return the part of a log that says why it failed."""
    lines = text.splitlines()
    errors = [i for i, line in enumerate(lines) if "Error" in line]
    # The first error of a worker process is the cause; its parents only repeat it.
    first = max(errors[0] - 12, 0) if errors else max(len(lines) - 25, 0)
    return lines[first:][:most]


class Jobs:
    """Runs jobs and opens gates.

    Args:
        out: Result folder.
        timeout: Seconds that a job may take.
        budget: Seconds after the start of the script from which no job is started.
        end: Seconds after the start of the script at which every job is killed.
        share: Seconds before `end` that each timed job can count on: from then on no
            job is started, and once a timed one is warm, what isn't is killed.

    """

    def __init__(
        self,
        out: Path,
        timeout: float,
        budget: float = 1e9,
        end: float = float("inf"),
        share: float = 0.0,
    ) -> None:
        self.out = out
        self.timeout = timeout
        self.budget = budget
        self.end = end
        self.share = share
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._reserved = end  # from here on the time is the timed jobs'

    def run(self, jobs: list[Job], slots: dict[tuple[str, ...], int]) -> list[str]:
        """Run the jobs in order and return the names of those left out.

        Args:
            jobs: What to run.
            slots: GPUs (as `Job.gpus`) to how many jobs may run there at a time. A
                job without GPUs takes the first of them that has a free slot.

        """
        self._jobs = jobs
        timed = sum(job.timed for job in jobs)
        self._reserved = self.end - min(self.share * timed, self.end / 2)
        for job in jobs:
            job.end = self.end
        free = [gpus for gpus, number in slots.items() for _ in range(number)]
        threads: list[threading.Thread] = []
        try:
            self._start_and_gate(jobs, free, threads)
        finally:
            # After an interrupt too: children have sessions of their own.
            for job in jobs:
                if job.state not in ("ended", "left out"):
                    job.end = 0.0
            for thread in threads:
                thread.join()
        return [job.name for job in jobs if job.state == "left out"]

    def _start_and_gate(
        self,
        jobs: list[Job],
        free: list[tuple[str, ...]],
        threads: list[threading.Thread],
    ) -> None:
        """Start jobs and open gates until all have ended."""
        while any(job.state not in ("ended", "left out") for job in jobs):
            for job in jobs:
                if job.state != "pending":
                    continue
                if time.time() - START > (limit := min(self.budget, self._reserved)):
                    job.state = "left out"
                    say(f"{job.name}: not run, {limit:.0f} s are over")
                    continue
                gpus = job.gpus if job.gpus in free else None
                if not job.gpus and free:
                    gpus = free[0]
                if gpus is None:
                    continue
                free.remove(gpus)
                job.gpus, job.state = gpus, "running"
                thread = threading.Thread(target=self._run_one, args=(job, free))
                thread.start()
                threads.append(thread)
            self._make_room()
            self._open_gates()
            time.sleep(POLL_SECONDS)

    def _is_warm(self, job: Job) -> bool:
        """Tell whether a job runs and waits for its turn to measure."""
        warm = job.timed and Gate(self.out, job.name).ready.exists()
        return job.state == "running" and warm

    def _make_room(self) -> None:
        """In the timed jobs' part, end what keeps a warm one from measuring.

        While none is warm, the rest may go on: ending it would gain nothing.
        """
        now = time.time() - START
        if now < self._reserved:
            return
        warm = [job for job in self._jobs if self._is_warm(job)]
        for job in self._jobs:
            if (
                job.state == "running"
                and job not in warm
                and any(set(job.gpus) & set(other.gpus) for other in warm)
            ):
                job.end = min(job.end, now)

    def _open_gates(self) -> None:
        """Let one waiting job a GPU measure if nothing else runs or starts there."""
        for job in self._jobs:
            if not self._is_warm(job):
                continue
            others = [
                other
                for other in self._jobs
                if other is not job
                and (set(other.gpus) & set(job.gpus) or not other.gpus)
            ]
            if any(
                other.state in ("pending", "measuring")
                or other.state == "running"
                and not self._is_warm(other)
                for other in others
            ):
                continue
            say(f"{job.name}: measures")
            job.state = "measuring"
            # What this one leaves of its part goes to those that wait.
            now = time.time() - START
            waiting = sum(o.timed and o.state == "running" for o in others) + 1
            job.end = now + (self.end - now) / waiting
            Gate(self.out, job.name).open.touch()

    def _run_one(self, job: Job, free: list[tuple[str, ...]]) -> None:
        log_path = self.out / f"{job.name}.log"
        gpus = f" on GPU {','.join(job.gpus)}" if job.gpus else ""
        say(f"{job.name}: starting{gpus} (log: {log_path})")
        (self.out / f"{job.name}.json").unlink(missing_ok=True)
        Gate(self.out, job.name).clear()
        env = environment(**job.env)
        if job.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
        code: int | str | None
        with log_path.open("w") as log:
            child = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
            begin = time.time()
            try:
                while (code := child.poll()) is None:
                    if time.time() - begin > self.timeout:
                        code = f"time limit of {self.timeout:.0f} s"
                        break
                    if time.time() - START > job.end:
                        code = f"its last end, {time.time() - START:.0f} s"
                        break
                    time.sleep(POLL_SECONDS)
            finally:
                # The session too: worker processes may outlive their parent.
                end_session(child)
        say(f"{job.name}: ended with {code}")
        if code:
            lines = error_lines(log_path.read_text(errors="replace"))
            print("\n".join("    " + line for line in lines), flush=True)
        with self._lock:
            job.state = "ended"
            free.append(job.gpus)


def end_session(child: subprocess.Popen) -> None:
    """End what is left of a child's session, politely first."""
    for signal_number in (15, 9):
        try:
            os.killpg(child.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(POLL_SECONDS)


def child_command(script: str, name: str) -> list[str]:
    """Return the command that runs `name` of this script in a process of its own."""
    return [sys.executable, script, "--child", name, *sys.argv[1:]]
