# SPDX-License-Identifier: Apache-2.0
"""The CI helpers: JUnit cases, summaries, ratios, and every script's --help."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "ci").glob("*.sh"),
    ROOT / "ci/run_case.py",
    ROOT / "ci/summary.py",
    ROOT / "ci/check_ratios.py",
    ROOT / "scripts/tiny_k3.py",
]


def python(*args):
    return subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "script",
    [s for s in SCRIPTS if s.name != "common.sh"],
    ids=lambda s: s.name,
)
def test_help_works_from_any_folder(script, tmp_path):
    ran = subprocess.run(
        [sys.executable, script, "--help"] if script.suffix == ".py"
        else [script, "--help"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHON=sys.executable),
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 80 and not list(tmp_path.iterdir())


def test_the_commands_run_as_the_documentation_writes_them(tmp_path):
    """`scripts/kv.py COMMAND`, without an interpreter before it."""
    found = Path(sys.executable).parent
    env = dict(os.environ, PATH=f"{found}:{os.environ['PATH']}")

    def kv(*words):
        return subprocess.run(
            [ROOT / "scripts/kv.py", *words],
            cwd=tmp_path, env=env, capture_output=True, text=True,
        )  # fmt: skip

    for word in ("--help", "-h"):
        ran = kv(word)
        assert ran.returncode == 0 and "baseline" in ran.stdout, ran.stderr
    names = kv("--help").stdout.partition("{")[2].partition("}")[0].split(",")
    assert "baseline" in names
    for name in names:
        ran = kv(name, "--help")
        assert ran.returncode == 0 and "usage: " in ran.stdout, ran.stderr
    for words in ([], ["nothing"]):
        ran = kv(*words)
        assert ran.returncode == 2 and "usage: scripts/kv.py" in ran.stderr


def test_a_case_keeps_status_and_tail(tmp_path):
    words = ["-c", "print('hello'); raise SystemExit(3)"]
    ran = python(ROOT / "ci/run_case.py", "--junit", tmp_path, "engine", "--",
                 sys.executable, *words)  # fmt: skip
    assert ran.returncode == 3 and "hello" in ran.stdout
    text = (tmp_path / "engine.xml").read_text()
    assert "exit status 3" in text and "hello" in text
    ran = python(ROOT / "ci/summary.py", tmp_path)
    assert ran.returncode == 1
    assert "| engine | 0 | 1 | 0 | 0 |" in ran.stdout and "exit status 3" in ran.stdout


def test_summary_counts_pytests_xml(tmp_path):
    test = tmp_path / "test_x.py"
    test.write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='no GPU')\n"
        "def test_b(): pass\n"
    )
    junit = tmp_path / "junit"
    python("-m", "pytest", "-q", f"--junitxml={junit}/kernel.xml", test)
    ran = python(ROOT / "ci/summary.py", junit, "--title", "H200")
    assert ran.returncode == 0 and "## H200" in ran.stdout
    assert "| kernel | 1 | 0 | 1 |" in ran.stdout and "- 1: no GPU" in ran.stdout


def test_no_results_is_a_failure(tmp_path):
    assert python(ROOT / "ci/summary.py", tmp_path).returncode == 1


@pytest.mark.parametrize(
    "result, code",
    [
        ({"a": 0.5, "b": 1.0}, 0),
        ({"a": 0.54, "b": 1.0, "new": 9}, 0),
        ({"a": 0.57, "b": 1.0}, 1),
        ({"a": 0.5}, 1),
    ],
)
def test_ratios(tmp_path, result, code):
    (tmp_path / "record.json").write_text(json.dumps({"a": 0.5, "b": 1.0}))
    (tmp_path / "result.json").write_text(json.dumps(result))
    words = [tmp_path / "result.json", tmp_path / "record.json"]
    assert python(ROOT / "ci/check_ratios.py", *words).returncode == code
    assert python(ROOT / "ci/check_ratios.py", *words, "--write").returncode == 0
    assert json.loads((tmp_path / "record.json").read_text()) == result


@pytest.mark.parametrize(
    "files, good",
    [
        (["patches/a.patch", "patches/series"], True),
        (["vllm_overlay/a.py", "README.md"], True),
        (["patches/README.md", "vllm_overlay/a.py"], True),
        (["patches/a.patch", "vllm_overlay/a.py"], False),
    ],
)
def test_a_commit_holds_one_half(tmp_path, files, good):
    (tmp_path / "ci").mkdir()
    script = tmp_path / "ci/check_commit.sh"
    script.write_bytes((ROOT / "ci/check_commit.sh").read_bytes())
    script.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    subprocess.run(["git", "add", *files], cwd=tmp_path, check=True)
    ran = subprocess.run([script], capture_output=True, text=True)
    assert (ran.returncode == 0) == good
    assert good or "mixes patches and overlay" in ran.stderr


def test_workflow_is_locked_down():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    uses = [li.split("uses:")[1].split("#")[0].strip() for li in text.split("\n")
            if "uses:" in li]  # fmt: skip
    assert uses and all(len(u.partition("@")[2]) == 40 for u in uses)
    assert "permissions:\n  contents: read" in text
    assert "write" not in text and "secrets" not in text


def test_the_cpu_jobs_script_uses_the_environment_that_is_named(tmp_path):
    """scripts/test.sh sets up KVPATCH_ENV; the check after it takes that one."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_bytes((ROOT / ".ci/run").read_bytes())
    (tmp_path / ".ci/run").chmod(0o755)
    for name in ("scripts/test.sh", "scripts/verify.sh", "ci/lint.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\necho "$0 with $PYTHON"\n')
        (tmp_path / name).chmod(0o755)
    for named, want in (("/some/env", "/some/env"), (None, ".venv")):
        env = {k: v for k, v in os.environ.items() if k not in ("KVPATCH_ENV",)}
        if named:
            env["KVPATCH_ENV"] = named
        ran = subprocess.run(
            [tmp_path / ".ci/run"], env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert f"scripts/verify.sh with {want}/bin/python\n" in ran.stdout
