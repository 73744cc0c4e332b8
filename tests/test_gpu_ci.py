# SPDX-License-Identifier: Apache-2.0
"""ci/gpu.sh on a fake GPU runner: its parts, limits, and environments of a runner."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = "KIMI_K3_KV_BALANCED_MLA"
PARTS = [
    "scripts/engine_check.py",
    "scripts/serve_check.py",
    "scripts/demo.py",
    "scripts/promises.py",
    "scripts/sparse_check.py",
    "scripts/engine_timing.py",
    "scripts/two_gpu_check.py",
    "vllm_overlay/benchmarks/kernels/benchmark_kimi_k3_kv_balanced_mla.py",
    "vllm_overlay/benchmarks/kernels/benchmark_flashinfer_mla_sparse_sm90.py",
    "vllm_overlay/tests/v1/attention/test_flashinfer_mla_sparse_sm90_gpu.py",
]
# A part notes that it ran, and leaves what ci/gpu.sh and the summary look for.
PART = """
import json, os, sys
from pathlib import Path
name, words = Path(sys.argv[0]).stem, sys.argv[1:]
with open(os.environ["CALLS"], "a") as file:
    print(name, *words, file=file)
if "--ratios" in words:
    ratios = json.loads(os.environ["RATIOS"])
    Path(words[words.index("--ratios") + 1]).write_text(json.dumps(ratios))
if os.environ.get("HANG") == name:
    import time
    gpu_sh = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
    begun = Path(words[words.index("--out") + 1]).parent / "started"
    begun.with_suffix(".part").write_text(str(gpu_sh))
    begun.with_suffix(".part").rename(begun)
    time.sleep(300)
if "--out" in words:
    out = Path(words[words.index("--out") + 1])
    out.mkdir(parents=True, exist_ok=True)
if name == "promises":
    tests = dict(
        a=dict(outcome="passed", note="", seconds=1.0),
        b=dict(outcome="left out", note="no sanitizer here"),
    )
    if os.environ.get("BROKEN") == name:
        tests["c"] = dict(outcome="failed", note="wrong bits")
    (out / "promises.json").write_text(json.dumps(dict(tests=tests, seconds=2.0)))
if name == "engine_timing":
    (out / "engine_timing.md").write_text("| run | step, us |")
sys.exit(3 if os.environ.get("BROKEN") == name else 0)
"""
SHELL = '#!/bin/sh\necho "$(basename "$0" .sh) $*" >>"$CALLS"\n'


@pytest.fixture
def runner(tmp_path):
    """A project with fake parts, a fake environment, and a fake nvidia-smi."""
    project, env, tools = (tmp_path / n for n in ("project", "env/bin", "tools"))
    (project / "scripts").mkdir(parents=True)
    shutil.copytree(ROOT / "ci", project / "ci")
    shutil.copy(ROOT / "scripts/common.sh", project / "scripts")
    shutil.copy(ROOT / "pyproject.toml", project)
    for name in PARTS:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(PART)
    scripts = dict.fromkeys(("setup", "test"), SHELL)
    scripts["apply"] = SHELL + 'case $* in *--no-import*) exit "${NO_TREE:-0}";; esac\n'
    for name, text in scripts.items():
        (project / f"scripts/{name}.sh").write_text(text)
        (project / f"scripts/{name}.sh").chmod(0o755)
    for folder in ("tests", "build/vllm/benchmarks", "build/vllm/tests/v1/attention"):
        (project / folder).mkdir(parents=True)
    (project / "build/vllm/pyproject.toml").write_text("")
    (project / "tests/test_own.py").write_text("def test_own(): pass\n")
    upstream = project / "build/vllm/tests"
    (upstream / "v1/attention/test_mla_backends.py").write_text(
        "import os, types\n"
        f"NAMES = ('TRITON_MLA', '{OURS}')\n"
        "BACKENDS_TO_TEST = [types.SimpleNamespace(name=n) for n in NAMES]\n"
        "def test_adaptive_varlen():\n"
        f"    assert [b.name for b in BACKENDS_TO_TEST] == ['{OURS}']\n"
        "    assert os.path.exists(os.environ['HF_HOME'] + '/hub')\n"
    )
    (upstream / "kernels/attention").mkdir(parents=True)
    (upstream / "kernels/attention/test_attention_selector.py").write_text(
        "def test_KIMI_K3(): pass\ndef test_other(): assert False\n"
    )
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text("")
    kept = site / ".kv-balanced-mla/stock/vllm/v1/attention/backends/mla"
    kept.mkdir(parents=True)
    (kept / "flashinfer_mla_sparse_sm90.py").write_text("")
    env.mkdir(parents=True)
    (env / "python").write_text(
        '#!/bin/sh\ncase "$1 $2" in\n'
        '"-m pip") echo "pip" >>"$CALLS"; exit "${PIP:-1}";;\nesac\n'
        f'exec {sys.executable} "$@"\n'
    )
    tools.mkdir()
    (tools / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in\n*index,compute_cap*) printf "$GPUS" | '
        "awk '{print NR - 1 \", \" $1}';;\n"
        '*compute_cap*) printf "$GPUS";;\n'
        "*) printf 'name\\nNVIDIA H200\\n';;\nesac\n"
    )
    for path in (env / "python", tools / "nvidia-smi"):
        path.chmod(0o755)

    def run(*words, gpus="9.0", **more):
        calls = tmp_path / "calls"
        calls.write_text("")
        record = (ROOT / "ci/baseline/gpu_ratios.json").read_text()
        got = subprocess.run(
            [project / "ci/gpu.sh", "--out", tmp_path / "out", *words],
            capture_output=True,
            text=True,
            env=dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}",
                     KVPATCH_ENV=str(env.parent), PYTHONPATH=str(site),
                     CALLS=str(calls), GPUS="\\n".join(gpus.split()) + "\\n",
                     **{"RATIOS": record, "CUDA_VISIBLE_DEVICES": "", **more}),
        )  # fmt: skip
        return got, calls.read_text().splitlines()

    run.env, run.out = env.parent, tmp_path / "out"
    return run


def called(calls):
    return [line.split()[0] for line in calls]


def test_a_runners_own_environment_needs_no_network(runner):
    got, calls = runner("--only", "tests,upstream-quick,sparse", NO_TREE="1")
    assert got.returncode == 0, got.stdout + got.stderr
    assert not {"setup", "pip", "test"} & set(called(calls))
    assert "apply --installed" in calls
    for text in ("skipped: installing", "skipped: the source tree"):
        assert text in got.stdout
    assert "| repository-tests | 1 | 0 | 0 |" in got.stdout
    assert "| upstream-quick | 0 | 0 | 1 |" in got.stdout
    assert "no source tree in build/vllm" in got.stdout
    (engine,) = [line for line in calls if line.startswith("sparse_check")]
    assert ".kv-balanced-mla/stock" in engine and "--parallel 10" in engine


@pytest.mark.parametrize("only", ["typo", "serve,typo,main_job", "", "serve, timing"])
def test_unknown_parts_are_refused_before_anything_else(runner, only):
    got, calls = runner("--only", only, gpus="8.0")
    assert got.returncode == 1 and calls == [] and not runner.out.exists()
    assert "this needs a Hopper GPU" not in got.stderr
    for name in only.split(","):
        assert (f"'{name}'" in got.stderr) == (name != "serve")
    assert "allowed: tests, upstream, engine" in got.stderr
    assert "two-gpus, upstream-quick\n" in got.stderr


def test_a_failed_preparation_leaves_out_upstreams_tests_alone(runner):
    (runner.env / ".kvpatch-gpu").touch()
    got, calls = runner("--only", "upstream,upstream-quick,timing")
    assert got.returncode == 1 and "pip" in calls, got.stdout
    assert "engine_timing" in called(calls)
    assert "| upstream-packages | 0 | 1 | 0 |" in got.stdout
    for part in ("upstream", "upstream-quick"):
        assert f"| {part} | 0 | 0 | 1 |" in got.stdout
    assert "- 2: upstream-packages failed" in got.stdout
    assert "`ci::upstream-packages`: exit status 1" in got.stdout


def test_configs_that_cannot_be_written_leave_out_upstreams_tests_alone(runner):
    real = runner.out / "hub/hub/models--deepseek-ai--DeepSeek-R1/refs"
    real.mkdir(parents=True)
    (real / "main").write_text("f" * 40)
    got, calls = runner("--only", "upstream-quick,timing")
    assert got.returncode == 1 and "engine_timing" in called(calls)
    assert "| upstream-configs | 0 | 1 | 0 |" in got.stdout
    assert "- 1: upstream-configs failed" in got.stdout


def test_results_of_an_earlier_run_go_where_the_part_is_asked_for(runner):
    """Also those of a part that then writes nothing; and nothing of others."""
    runner("--only", "sparse")
    folders = ("engine", "serve", "promises", "sparse", "sparse-engine", "timing")
    for name in folders:
        (runner.out / name).mkdir(exist_ok=True)
        (runner.out / name / "old.log").write_text("")
    (runner.out / "bench.png").write_text("")
    asked = folders[:2] + folders[3:5]
    got, _ = runner("--only", "engine,serve,sparse", BROKEN="serve_check")
    assert got.returncode == 1
    left = [name for name in folders if (runner.out / name / "old.log").exists()]
    assert left == [name for name in folders if name not in asked]
    assert not (runner.out / "bench.png").exists()


def test_a_folder_that_no_run_wrote_keeps_its_subfolders(runner):
    (runner.out / "engine").mkdir(parents=True)
    (runner.out / "engine/mine.txt").write_text("")
    got, _ = runner("--only", "engine")
    assert got.returncode == 0 and (runner.out / "engine/mine.txt").exists()


@pytest.mark.parametrize("stamp", [True, False])
def test_the_limits_of_all_parts_fit_into_the_jobs(runner, stamp):
    """With the time to end a part, and half an hour to set the runner up."""
    if stamp:
        (runner.env / ".kvpatch-gpu").touch()
    got, _ = runner(gpus="9.0 9.0", PIP="0")
    limits = dict(re.findall(r"\] (\S+) \(at most (\d+) s\)", got.stdout))
    assert {"engine", "upstream", "two-gpus", "accuracy"} < set(limits), got.stdout
    assert ("upstream-packages" in limits) == stamp
    # run_case.py gives a part that much between asking it to end and ending it.
    total = sum(int(limit) + 20 for limit in limits.values())
    for name, key in ((".github/workflows/ci.yml", "timeout-minutes"),
                      (".buildkite/pipeline.yml", "timeout_in_minutes")):  # fmt: skip
        found = re.findall(rf"{key}: (\d+)", (ROOT / name).read_text())
        assert total + 1800 <= max(map(int, found)) * 60, (name, total)


def test_an_environment_of_setup_is_brought_up_to_date(runner):
    (runner.env / ".kvpatch-gpu").touch()
    got, calls = runner("--only", "tests")
    assert got.returncode == 0
    assert called(calls) == ["setup", "test"] and "skipped: inst" not in got.stdout


def test_upstreams_tests_run_on_one_backend_with_configs_of_their_own(runner):
    got, _ = runner("--only", "upstream-quick")
    assert got.returncode == 0, got.stdout
    assert "| upstream-quick-tests | 2 | 0 | 0 |" in got.stdout


def test_upstreams_tests_spread_over_processes(runner):
    pytest.importorskip("xdist")
    tests = runner.env.parent / "project/build/vllm/tests"
    for name in (
        "v1/attention/test_flashinfer_mla_sparse_sm90",
        "test_attention_backend_registry",
    ):
        (tests / f"{name}.py").write_text("def test_it(): pass\n")
    got, _ = runner("--only", "upstream")
    assert "bringing up nodes" in got.stdout, got.stdout + got.stderr
    # The fakes fail with more than one backend, and outside of the quick part.
    assert got.returncode == 1 and "| upstream-tests | 3 | 2 | 0 |" in got.stdout


def test_all_parts_run_and_the_summary_has_them(runner):
    parts = "engine,serve,main-job,bench,promises,sparse,timing,two-gpus"
    got, calls = runner("--only", parts, gpus="9.0 9.0")
    assert got.returncode == 0, got.stdout + got.stderr
    twice = ["apply"] * 2 + [Path(p).stem for p in PARTS if "benchmarks" in p]
    assert sorted(called(calls)) == sorted(twice + [Path(p).stem for p in PARTS])
    assert sum("--accuracy" in line for line in calls) == 1
    for cache in ("fp8", "bf16"):
        assert sum(f"--cache {cache}" in line for line in calls) == 1
    assert "| promises: each test | 1 | 0 | 1 | 2 |" in got.stdout
    assert "- 1: no sanitizer here" in got.stdout
    assert "### Decode steps in the engine" in got.stdout
    assert "| bench-ratios | 1 | 0 | 0 |" in got.stdout


def options_of(calls, name):
    """The options of the one call of a part's script."""
    (line,) = [line for line in calls if line.split()[0] == name]
    return line + " "


def test_parts_run_on_the_hoppers_of_a_mixed_host(runner):
    parts = "engine,timing,two-gpus,sparse"
    got, calls = runner("--only", parts, gpus="8.9 9.0 9.0 9.0")
    assert got.returncode == 0, got.stdout + got.stderr
    for name in ("engine_check", "engine_timing", "two_gpu_check"):
        assert "--gpus 1,2 " in options_of(calls, name)
    assert "--gpus 1 " in options_of(calls, "sparse_check")


def test_parts_keep_to_the_visible_devices(runner):
    got, calls = runner(
        "--only", "engine,timing,two-gpus", gpus="9.0 " * 8, CUDA_VISIBLE_DEVICES="6"
    )
    assert got.returncode == 0, got.stdout + got.stderr
    assert "--gpus 6 --parallel 6 " in options_of(calls, "engine_check")
    assert "--gpus 6 " in options_of(calls, "engine_timing")
    assert "two Hopper GPUs and there is 1" in got.stdout


def test_two_gpus_are_left_out_where_there_is_one(runner):
    got, calls = runner("--only", "two-gpus")
    assert got.returncode == 0 and "two_gpu_check" not in called(calls)
    assert "two Hopper GPUs and there is 1" in got.stdout


@pytest.mark.parametrize("broken", ["promises", "engine_check"])
def test_a_failed_part_fails_the_run_after_the_others(runner, broken):
    got, calls = runner("--only", "engine,promises,timing", BROKEN=broken)
    assert got.returncode == 1 and "engine_timing" in called(calls)
    assert "exit status 3" in got.stdout.split("==> ")[-1]
    if broken == "promises":
        assert "- `c`: wrong bits" in got.stdout


def test_a_part_that_leaves_no_result_fails_the_run(runner):
    """As where run_case.py itself was killed."""
    case = runner.env.parent / "project/ci/run_case.py"
    text = case.read_text().replace(
        "    args = made.parse_args()\n",
        "    args = made.parse_args()\n    if args.name == 'serve': sys.exit(9)\n",
    )
    case.write_text(text)
    got, calls = runner("--only", "serve,timing")
    assert got.returncode == 1 and "engine_timing" in called(calls)
    assert "error: serve ended without a result" in got.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_part_and_leaves_out_the_rest(runner, number):
    """What the part started ends too, and the summary is written."""
    started = runner.out / "started"

    def interrupt():
        end = time.monotonic() + 60
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(int(started.read_text()), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.monotonic()
    got, calls = runner("--only", "engine,timing", HANG="engine_check")
    thread.join()
    assert got.returncode == 130 and time.monotonic() - begin < 60, got.stdout
    assert "engine_timing" not in called(calls)
    assert "| engine | 0 | 1 | 0 |" in got.stdout
    assert "| timing | 0 | 0 | 1 |" in got.stdout
    assert "this run was interrupted" in got.stdout


def test_a_ratio_worse_by_more_than_the_tolerance_fails(runner):
    record = json.loads((ROOT / "ci/baseline/gpu_ratios.json").read_text())
    for factor, code in ((1.11, 0), (1.13, 1)):
        worse = dict(record, **{"12x8 64x32k": record["12x8 64x32k"] * factor})
        got, _ = runner("--only", "bench", RATIOS=json.dumps(worse))
        assert got.returncode == code, got.stdout


def test_the_record_has_the_benchmarks_shapes(monkeypatch):
    pytest.importorskip("torch")
    folder = ROOT / "vllm_overlay/benchmarks/kernels"
    monkeypatch.syspath_prepend(str(folder))
    import kimi_k3_mla_cases

    record = json.loads((ROOT / "ci/baseline/gpu_ratios.json").read_text())
    assert set(record) == {shape.name for shape in kimi_k3_mla_cases.SHAPES}


def run_case(folder, *words):
    return subprocess.run(
        [sys.executable, ROOT / "ci/run_case.py", "--junit", folder, *words],
        capture_output=True,
        text=True,
    )


def alive(process):
    """Tell whether a process runs; one that nobody waited for doesn't."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_case_past_its_limit_is_ended_with_what_it_started(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(p.pid, flush=True)\ntime.sleep(60)\n"
    )
    begin = time.time()
    words = ["--limit", "1", "slow", "--", sys.executable, str(child)]
    ran = run_case(tmp_path, *words)
    assert time.time() - begin < 20 and ran.returncode == 124
    assert "its time was over" in (tmp_path / "slow.xml").read_text()
    assert not alive(int(ran.stdout.split()[0]))


def test_a_case_within_its_limit_keeps_its_status(tmp_path):
    words = [
        "--limit",
        "30",
        "quick",
        "--",
        sys.executable,
        "-c",
        "raise SystemExit(7)",
    ]
    assert run_case(tmp_path, *words).returncode == 7
    assert "exit status 7" in (tmp_path / "quick.xml").read_text()


def test_a_skipped_case_says_why(tmp_path):
    assert run_case(tmp_path, "--skip", "one GPU", "two-gpus").returncode == 0
    assert 'skipped message="one GPU"' in (tmp_path / "two-gpus.xml").read_text()
    assert run_case(tmp_path, "nothing").returncode == 2


def test_the_offline_hub_is_laid_out_like_a_cache(tmp_path):
    script = [sys.executable, ROOT / "ci/offline_hub.py", tmp_path]
    for _ in range(2):
        subprocess.run(script, check=True, capture_output=True)
    root = tmp_path / "hub/models--deepseek-ai--DeepSeek-R1"
    revision = (root / "refs/main").read_text()
    config = json.loads((root / f"snapshots/{revision}/config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576
    assert config["num_attention_heads"] % 16 == 0
    assert len(list((root / "snapshots").iterdir())) == 1
    hub = pytest.importorskip("huggingface_hub")
    for model in ("deepseek-ai/DeepSeek-R1", "google/gemma-4-31B-it"):
        found = hub.try_to_load_from_cache(
            model, "config.json", cache_dir=tmp_path / "hub"
        )
        assert isinstance(found, str), model


def test_the_offline_hub_leaves_a_real_cache_alone(tmp_path):
    real = tmp_path / "hub/models--deepseek-ai--DeepSeek-R1/refs"
    real.mkdir(parents=True)
    (real / "main").write_text("f" * 40)
    ran = subprocess.run(
        [sys.executable, ROOT / "ci/offline_hub.py", tmp_path],
        capture_output=True,
        text=True,
    )
    assert ran.returncode != 0 and "from elsewhere" in ran.stderr
    assert (real / "main").read_text() == "f" * 40


@pytest.mark.parametrize(("chosen", "code"), [("A", 0), ("B,A", 1), ("C", 4), ("", 1)])
def test_one_mla_backend_cuts_the_list_or_complains(tmp_path, chosen, code):
    (tmp_path / "test_x.py").write_text(
        "from types import SimpleNamespace as N\n"
        "BACKENDS_TO_TEST = [N(name='A'), N(name='B')]\n"
        "def test_x(): assert [b.name for b in BACKENDS_TO_TEST] == ['A']\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "one_mla_backend"]
        + ["--mla-backend", chosen, "test_x.py"],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "ci")),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    if code == 4:
        assert "C is not tested on this machine; there are A, B" in ran.stderr
