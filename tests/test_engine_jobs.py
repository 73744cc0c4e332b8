# SPDX-License-Identifier: Apache-2.0
"""Engines as child processes: order, turns, limits, and what hangs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import engine_jobs
import pytest

CHILD = """
import sys, time
sys.path.insert(0, {scripts!r})
from engine_jobs import Gate
from pathlib import Path
name, out = sys.argv[1], Path({out!r})
if name.startswith("timed"):
    Gate(out, name).wait(20)
    begin = time.time()
    time.sleep(0.4)
    (out / f"{{name}}.span").write_text(f"{{begin}} {{time.time()}}")
elif name == "breaks":
    raise ValueError("KeyError of the first worker")
else:
    time.sleep(0.5)
    (out / f"{{name}}.span").write_text(f"0 {{time.time()}}")
"""


@pytest.fixture
def jobs_of(tmp_path):
    script = tmp_path / "child.py"
    scripts = str(engine_jobs.HERE)
    script.write_text(CHILD.format(scripts=scripts, out=str(tmp_path)))

    def make(*names, gpus=("0",)):
        return [
            engine_jobs.Job(
                name,
                [sys.executable, str(script), name],
                gpus=gpus,
                timed=name.startswith("timed"),
            )
            for name in names
        ]

    return make


def span(folder, name):
    return [float(x) for x in (folder / f"{name}.span").read_text().split()]


def test_timed_jobs_measure_alone_after_the_others(tmp_path, jobs_of):
    jobs = jobs_of("timed-a", "timed-b", "plain")
    left_out = engine_jobs.Jobs(tmp_path, 30).run(jobs, {("0",): 3})
    assert left_out == []
    a, b = span(tmp_path, "timed-a"), span(tmp_path, "timed-b")
    assert a[1] <= b[0] or b[1] <= a[0]
    assert span(tmp_path, "plain")[1] <= min(a[0], b[0])


def test_timed_jobs_on_two_gpus_measure_at_the_same_time(tmp_path, jobs_of):
    jobs = jobs_of("timed-a") + jobs_of("timed-b", gpus=("1",))
    engine_jobs.Jobs(tmp_path, 30).run(jobs, {("0",): 1, ("1",): 1})
    a, b = span(tmp_path, "timed-a"), span(tmp_path, "timed-b")
    assert a[0] < b[1] and b[0] < a[1]


def test_a_failed_job_shows_its_error_and_the_rest_goes_on(tmp_path, jobs_of, capsys):
    engine_jobs.Jobs(tmp_path, 30).run(jobs_of("breaks", "plain"), {("0",): 1})
    assert "KeyError of the first worker" in capsys.readouterr().out
    assert (tmp_path / "plain.span").exists()


def test_no_job_starts_once_the_time_is_over(tmp_path, jobs_of):
    jobs = engine_jobs.Jobs(tmp_path, 30, budget=-1)
    assert jobs.run(jobs_of("plain"), {("0",): 1}) == ["plain"]
    assert not (tmp_path / "plain.span").exists()


def test_a_job_past_its_limit_is_ended(tmp_path, jobs_of, capsys):
    begin = time.time()
    engine_jobs.Jobs(tmp_path, 0.2).run(jobs_of("plain"), {("0",): 1})
    assert time.time() - begin < 5
    assert "time limit of 0 s" in capsys.readouterr().out


HANGS = """
import signal, sys, time
sys.path.insert(0, {scripts!r})
from engine_jobs import Gate
from pathlib import Path
name, out = sys.argv[1], Path({out!r})
if name.startswith("hangs"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if name.startswith("timed"):
    Gate(out, name).wait(600)
    if "hangs" in name:
        time.sleep(600)
(out / f"{{name}}.span").write_text(f"{{time.time()}}")
"""


def test_jobs_that_hang_leave_the_timed_ones_their_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_jobs, "START", begin := time.time())
    script = tmp_path / "child.py"
    script.write_text(HANGS.format(scripts=str(engine_jobs.HERE), out=str(tmp_path)))
    names = ["plain", "hangs", "timed-a", "timed-hangs", "hangs-warming", "timed-b"]
    jobs = [
        engine_jobs.Job(
            name, [sys.executable, str(script), name], gpus=("0", "1"),
            timed="timed" in name or "warming" in name,
        )
        for name in names
    ]  # fmt: skip
    # Long enough for six interpreters to start on a busy machine.
    runner = engine_jobs.Jobs(tmp_path, 330, budget=20, end=20, share=4)
    assert runner.run(jobs, {("0", "1"): 16}) == []
    took = time.time() - begin
    assert took < 20 + 12
    done = {p.stem: float(p.read_text()) for p in tmp_path.glob("*.span")}
    assert sorted(done) == ["plain", "timed-a", "timed-b"]
    # Killed at 10 s (half, since four timed jobs have 16 s), politely until 15 s.
    assert done["plain"] < begin + 10 < done["timed-a"] < done["timed-b"]
    text = capsys.readouterr().out
    for name in ("hangs", "hangs-warming", "timed-hangs"):
        assert f"{name}: ended with its last end" in text


SLOW = """
import sys, time
from pathlib import Path
if sys.argv[1] == "slow":
    time.sleep(3.5)
    Path({out!r}, "slow.span").touch()
else:
    time.sleep(600)
"""


def test_no_job_is_ended_for_timed_ones_that_are_not_warm(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_jobs, "START", time.time())
    script = tmp_path / "child.py"
    script.write_text(SLOW.format(out=str(tmp_path)))
    jobs = [
        engine_jobs.Job(
            name, [sys.executable, str(script), name], gpus=("0",), timed=timed
        )
        for name, timed in (("slow", False), ("never-warm", True))
    ]
    runner = engine_jobs.Jobs(tmp_path, 60, budget=5, end=5, share=5)
    assert runner.run(jobs, {("0",): 2}) == []
    assert (tmp_path / "slow.span").exists()


def test_bytecode_is_compiled_once_where_there_is_none(tmp_path, monkeypatch, capsys):
    package = tmp_path / "unpacked_engine"
    (package / "inner").mkdir(parents=True)
    for path in (package / "__init__.py", package / "inner" / "part.py"):
        path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    compiled = package / "inner" / "__pycache__"

    engine_jobs.compile_bytecode("unpacked_engine")
    assert [p.name.split(".")[0] for p in compiled.iterdir()] == ["part"]
    assert "has no bytecode" in capsys.readouterr().out

    (package / "inner" / "later.py").write_text("x = 2\n")
    engine_jobs.compile_bytecode("unpacked_engine")
    assert len(list(compiled.iterdir())) == 1
    engine_jobs.compile_bytecode("no_such_engine")
    assert not capsys.readouterr().out


INTERRUPTED = """
import sys
sys.path.insert(0, {scripts!r})
from engine_jobs import Job, Jobs
from pathlib import Path
sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
job = Job("sleeps", [sys.executable, "-c", sleep], gpus=("0",))
Jobs(Path({out!r}), 600).run([job], {{("0",): 1}})
"""


def test_an_interrupt_ends_the_jobs_too(tmp_path):
    script = tmp_path / "parent.py"
    scripts = str(engine_jobs.HERE)
    script.write_text(INTERRUPTED.format(scripts=scripts, out=str(tmp_path)))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        # A shell makes its background jobs ignore it, and pytest may be one of them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log, limit = tmp_path / "sleeps.log", time.time() + 20
    while not (log.exists() and log.read_text()) and time.time() < limit:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(15) != 0
    state = f"/proc/{log.read_text().strip()}/stat"
    assert not os.path.exists(state) or Path(state).read_text().split()[2] == "Z"
