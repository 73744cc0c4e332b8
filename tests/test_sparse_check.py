# SPDX-License-Identifier: Apache-2.0
"""The sparse engine check without a GPU: models, step times, turns, verdict."""

import importlib.metadata
import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse_check
import sparse_models
import sparse_report
import sparse_timing
import sparse_turns

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("model", sparse_models.MODELS)
@pytest.mark.parametrize("layers", [1, 3, 4])
def test_models(model, layers, tmp_path):
    folder = sparse_models.write_model(tmp_path, model, layers)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == layers
    assert config["kv_lora_rank"] == 512
    assert config["qk_rope_head_dim"] == {"dsv32": 64, "glm": 0}[model]
    assert config["index_topk"] == 2048
    # What DeepGEMM's logits kernels take on Hopper.
    assert config["index_n_heads"] in (32, 64)
    if model == "glm":
        sparse = [t == "sparse" for t in config["mlp_layer_types"]]
        assert sparse == [i >= 3 for i in range(layers)]
        assert len(config["layer_types"]) == layers
        assert config["index_topk"] % config["index_kpool"] == 0


def test_attention_only():
    glm = SimpleNamespace(model_type="glm5_next_text", num_hidden_layers=2)
    assert sparse_models.attention_only(glm).layer_types == ["full_attention"] * 2
    other = SimpleNamespace(model_type="deepseek_v32")
    assert not hasattr(sparse_models.attention_only(other), "layer_types")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("5.17.0", False), ("4.57.1", False), ("5.18.0", True), ("6.0.0.dev0", True)],
)
def test_transformers_that_cannot_read_glm(version, fits, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    gap = sparse_models.transformers_gap()
    assert not gap if fits else version in gap and "5.18" in gap


def test_glm_runs_are_left_out_where_their_config_is_unknown(
    tmp_path, monkeypatch, capsys
):
    started = []
    monkeypatch.setattr(sparse_check, "compile_bytecode", lambda: None)
    monkeypatch.setattr(sparse_models, "transformers_gap", lambda: "too old for glm")
    monkeypatch.setattr(
        sparse_check, "run_wave", lambda names, args, end: started.extend(names)
    )
    only = "dsv32-ours,glm-ours,dsv32-fa3,glm-ours-fp8"
    monkeypatch.setattr(
        sys, "argv", ["x", "--out", str(tmp_path), "--only", only, "--budget", "1e9"]
    )
    assert sparse_check.main() == 1
    assert started == ["dsv32-ours", "dsv32-fa3"]
    text = capsys.readouterr().out
    assert "too old for glm" in text and "glm-ours: no result" in text


@pytest.fixture
def package(monkeypatch):
    """A package of two modules in the place of vLLM's; gives its name."""
    name = "fake_backends.mla"
    for part in ("fake_backends", name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setattr(sparse_models, "MODULE", f"{name}.sparse")
    yield f"{name}.sparse"
    sys.modules.pop(f"{name}.sparse", None)


def test_install_stock(package, tmp_path):
    stock = tmp_path / "stock.py"
    stock.write_text("WHO = 'stock'\n")
    sparse_models.install_stock(stock)
    module = sys.modules[package]
    assert (module.WHO, module.__file__) == ("stock", str(stock))
    assert sys.modules["fake_backends.mla"].sparse is module
    with pytest.raises(RuntimeError, match="imported already"):
        sparse_models.install_stock(stock)


def test_install_stock_without_file(package, tmp_path):
    with pytest.raises(FileNotFoundError, match="--stock"):
        sparse_models.install_stock(tmp_path / "none.py")


def test_pinned_hash(tmp_path):
    toml = tmp_path / "UPSTREAM.toml"
    toml.write_text("[shadow]\n")
    assert sparse_models.pinned_hash(toml) is None
    path = sparse_models.MODULE.replace(".", "/") + ".py"
    toml.write_text(f'[shadow]\n"{path}" = "ab12"\n')
    assert sparse_models.pinned_hash(toml) == "ab12"


def test_quantiles():
    assert sparse_timing.quantiles([]) == {"n": 0}
    got = sparse_timing.quantiles([float(v) for v in range(11)])
    assert got == dict(n=11, median=5.0, p10=1.0, p90=9.0, mean=5.0, max=10.0)
    assert sparse_timing.quantiles([3.0, 1.0])["median"] == 2.0


class FakeEngine:
    """Schedules like vLLM: decodes first, then prompts in chunks, one build a step.

    A step takes 10 ms with a prefill, else 1 ms and 0.1 ms a request, of which
    the builder takes 0.25 ms.
    """

    def __init__(self, monkeypatch, second_builder=False):
        self.now = 0.0
        self.batches = []
        monkeypatch.setattr(
            sparse_timing, "time", SimpleNamespace(perf_counter=lambda: self.now)
        )
        engine = self

        class Builder:
            def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
                engine.now += 250e-6
                return "metadata"

        self.recorder = sparse_timing.StepRecorder(Builder, None)
        self.builders = [Builder() for _ in range(2 if second_builder else 1)]

    def step(self, queries):
        self.batches.append(queries)
        common = SimpleNamespace(
            num_actual_tokens=sum(queries), max_query_len=max(queries)
        )
        begin = self.now
        for builder in self.builders:
            assert builder.build(0, common) == "metadata"
        long = max(queries) > 1
        self.now = begin + (10e-3 if long else 1e-3 + 1e-4 * len(queries))

    def generate(self, prompts, params, use_tqdm):
        prompt = [len(p["prompt_token_ids"]) for p in prompts]
        left, made = list(prompt), [0] * len(prompt)
        while any(m < p.max_tokens for m, p in zip(made, params)):
            budget, queries = sparse_check.BATCHED_TOKENS, []
            for i, p in enumerate(params):
                if made[i] >= p.max_tokens or budget == 0:
                    continue
                take = min(left[i], budget) if left[i] else 1
                left[i] -= min(take, left[i])
                made[i] += left[i] == 0
                budget -= take
                queries.append(take)
            self.step(queries)


@pytest.fixture
def sampling(monkeypatch):
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)


@pytest.mark.parametrize("second_builder", [False, True])
@pytest.mark.parametrize("case", sparse_check.CASES)
def test_cases(case, second_builder, monkeypatch, sampling):
    """Every case gives enough steps, and only steps of its own batch."""
    engine = FakeEngine(monkeypatch, second_builder)
    options = sparse_check.CASES[case]
    times = sparse_check.time_case(engine, engine.recorder, options, profile=False)
    requests = options["requests"]
    step, build = times["step_us"], times["build_us"]
    assert build["median"] == build["max"] == (500 if second_builder else 250)
    assert step["n"] >= 30
    if options.get("leaving"):
        # One request leaves at (nearly) every step, until the last.
        counts = [len(q) for q in engine.batches if max(q) == 1]
        assert counts[-1] == 1
        assert len(set(counts)) >= 0.9 * requests
        assert step["max"] <= 1000 + 100 * requests
    else:
        assert step["p10"] == step["max"] == 1000 + 100 * requests


def test_steady_steps_settle(monkeypatch):
    """The first steps after a change of batch don't count."""
    engine = FakeEngine(monkeypatch)
    engine.recorder.reset(2)
    engine.step([2, 5])
    for _ in range(sparse_timing.SETTLE_STEPS):
        engine.step([1, 1])
        engine.now += 1.0
    for _ in range(4):
        engine.step([1, 1])
    engine.step([1])
    summary = engine.recorder.summary()
    assert (summary["step_us"]["n"], summary["step_us"]["max"]) == (3, 1200)
    engine.recorder.stop()
    engine.step([1, 1])
    assert len(engine.recorder.steps) == sparse_timing.SETTLE_STEPS + 6


class FakeProfile:
    """Rows as torch's profiler gives them."""

    stopped = 0

    def stop(self):
        self.stopped += 1

    def key_averages(self):
        return [
            SimpleNamespace(key="cpu", self_device_time_total=0, count=9),
            SimpleNamespace(key="small", self_device_time_total=12.0, count=12),
            SimpleNamespace(key="large", self_device_time_total=36.0, count=3),
        ]


@pytest.mark.parametrize("enough", [True, False])
def test_profile_follows_the_timed_steps(enough, monkeypatch):
    """It starts after the timed steps, which don't see it, and always ends."""
    engine, profile = FakeEngine(monkeypatch), FakeProfile()
    monkeypatch.setattr(sparse_timing, "start_profile", lambda: profile)
    engine.recorder.reset(1, profile_from=20, profile_steps=3)
    for _ in range(20):
        engine.step([1])
    engine.now += 5.0
    for _ in range(10 if enough else 2):
        engine.step([1])
    engine.recorder.stop()
    summary = engine.recorder.summary()
    assert profile.stopped == 1
    assert summary["step_us"]["max"] == 1100
    assert summary["step_us"]["n"] == 18 - sparse_timing.SETTLE_STEPS
    steps = 3
    assert summary["busy_us"] == 48.0 / steps
    assert summary["kernels"][0] == [12.0, 1.0, "large"]


CHILD = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
name = sys.argv[sys.argv.index("--child") + 1]
if name.endswith("stock"):
    print("SomeError: broken")
    sys.exit(3)
if name.endswith("fa3") and "--steps" in sys.argv:
    time.sleep(600)
(out / f"{name}.began").write_text(str(time.time()))
(out / f"{name}.up").write_text("")
turns = 0
while sys.stdin.readline() == "go\\n":
    busy = out / "busy"
    busy.touch(exist_ok=False)
    if not turns:
        (out / f"{name}.timed").write_text(str(time.time()))
    with (out / "order").open("a") as order:
        order.write(name + "\\n")
    time.sleep(0.2)
    busy.unlink()
    turns += 1
    (out / f"{name}.json").write_text(json.dumps({"run": name}))
    if name.endswith("fp8"):
        time.sleep(600)
    (out / f"{name}.turns").write_text(str(turns))
"""


@pytest.fixture
def wave(tmp_path, monkeypatch):
    """Run a wave of fake children; gives their outcome."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(sparse_check, "__file__", str(child))

    def run(names, *options):
        argv = ["--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", ["sparse_check.py", *argv])
        args = sparse_check.parser().parse_args(argv)
        ended = []
        for module in (sparse_check, sparse_turns):
            monkeypatch.setattr(module, "say", ended.append)
        import time

        sparse_check.run_wave(names, args, time.time() + args.budget)
        return ended

    return run


def test_children_take_turns(wave, tmp_path, capsys):
    """One at a time is timed; a broken one doesn't stop the others."""
    said = wave(
        ["dsv32-ours", "dsv32-stock", "glm-ours"], "--gpus", "0,1", "--rounds", "3"
    )
    done = sorted(p.stem for p in tmp_path.glob("*.json"))
    assert done == ["dsv32-ours", "glm-ours"]
    assert any("dsv32-stock: ended with 3" in line for line in said)
    assert "glm-ours: starting on GPU 0" in said
    assert "dsv32-stock: starting on GPU 1" in said
    assert "SomeError: broken" in capsys.readouterr().out
    assert not (tmp_path / "busy").exists()
    order = (tmp_path / "order").read_text().split()
    assert order == ["dsv32-ours", "glm-ours"] * 3
    # They end by themselves when no turn follows.
    assert {s for s in said if "ended" in s and "-ours" in s} == {
        s for s in said if "-ours: ended with 0" in s
    }
    assert sum("-ours: ended with 0" in s for s in said) == 2


def test_no_round_begins_that_does_not_fit(wave, tmp_path):
    """All engines have the same turns then, and end by themselves."""
    said = wave(["dsv32-ours", "glm-ours"], "--rounds", "99", "--budget", "5")
    (line,) = [s for s in said if "of 99 rounds: there is no time" in s]
    rounds = int(line.split()[0])
    order = (tmp_path / "order").read_text().split()
    assert rounds > 1 and order == ["dsv32-ours", "glm-ours"] * rounds
    assert sum("ended with 0" in s for s in said) == 2


def test_limits_of_time(wave, tmp_path):
    """A child that doesn't start, or doesn't end, is stopped; the rest goes on."""
    said = wave(
        ["dsv32-fa3", "dsv32-ours-fp8", "glm-ours"],
        *("--start-limit", "2", "--time-limit", "2", "--steps", "1"),
    )
    done = sorted(p.stem for p in tmp_path.glob("*.json"))
    assert done == ["dsv32-ours-fp8", "glm-ours"]
    assert any(s.startswith("dsv32-fa3: stopped: not up after") for s in said)
    assert "dsv32-ours-fp8: stopped: the time of its turn is over" in said


def test_the_turn_with_the_smaller_median_is_kept():
    def timed(median, **more):
        return dict(more, step_us=dict(n=40, median=median), build_us=dict(median=2.0))

    kept = sparse_report.better_turn(None, timed(9.0, busy_us=3.0, kernels=["k"]))
    for times in (timed(11.0), timed(7.0), dict(error="no steps")):
        kept = sparse_report.better_turn(kept, times)
    rounds = dict(
        step_us=[9.0, 11.0, 7.0, None],
        build_us=[2.0, 2.0, 2.0, None],
        graph_us=[None] * 4,
    )
    assert kept == dict(timed(7.0, busy_us=3.0, kernels=["k"]), rounds=rounds)
    after_error = sparse_report.better_turn(None, dict(error="broken"))
    after_error = sparse_report.better_turn(after_error, timed(8.0))
    assert after_error["step_us"]["median"] == 8.0


def test_all_threads_move_to_the_cores_that_are_shared():
    code = (
        "import os, sys, threading\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import sparse_turns\n"
        "gate = threading.Event()\n"
        "thread = threading.Thread(target=gate.wait)\n"
        "thread.start()\n"
        "cores = sparse_turns.share_cores(1)\n"
        "assert len(cores) == 1\n"
        "for tid in (0, thread.native_id):\n"
        "    assert os.sched_getaffinity(tid) == set(cores)\n"
        "gate.set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ten_engines_start_in_one_wave(wave, tmp_path):
    names = list(sparse_check.DEFAULT_RUNS)
    assert len(names) == 10
    assert sparse_check.parser().parse_args(["--parallel", "10"]).parallel == 10
    said = wave(names, "--time-limit", "1")
    assert sum(": starting on GPU" in line for line in said) == 10
    began = [float(p.read_text()) for p in tmp_path.glob("*.began")]
    timed = [float(p.read_text()) for p in tmp_path.glob("*.timed")]
    assert len(began) == len(timed) == 8  # the two stock ones break
    assert max(began) < min(timed)


def test_nothing_is_timed_before_the_held_file_is_there(wave, tmp_path):
    import threading
    import time

    hold = tmp_path / "go-on"
    at = []
    timer = threading.Timer(2.0, lambda: (at.append(time.time()), hold.touch()))
    timer.start()
    wave(["dsv32-ours", "glm-ours"], "--hold", str(hold))
    timer.join()
    timed = [float(p.read_text()) for p in tmp_path.glob("*.timed")]
    assert len(timed) == 2 and min(timed) > at[0]


def test_a_held_file_that_never_comes_ends_with_the_time_to_start(wave, tmp_path):
    said = wave(["dsv32-ours"], "--hold", str(tmp_path / "never"), "--start-limit", "3")
    assert any("never came" in line for line in said)
    assert (tmp_path / "dsv32-ours.json").exists()


def test_starting_leaves_time_to_measure(monkeypatch):
    monkeypatch.setattr(sparse_turns.time, "time", lambda: 1000.0)
    assert sparse_turns.start_patience(60, 300, 1200.0) == 140
    assert sparse_turns.start_patience(60, 100, 1200.0) == 100
    assert sparse_turns.start_patience(60, 300, 1060.0) == 30


def test_the_budget_ends_whatever_hangs(tmp_path):
    """The command, with children that never start and children that never end."""
    copy = tmp_path / "scripts"
    copy.mkdir()
    for path in (ROOT / "scripts").glob("*.py"):
        (copy / path.name).write_text(path.read_text())
    script = copy / "sparse_check.py"
    script.write_text(script.read_text().replace("        compile_bytecode()\n", ""))
    jobs = copy / "engine_jobs.py"
    whole = jobs.read_text()
    assert whole.count("    if args.child:\n") == 1
    jobs.write_text(
        whole.replace("    if args.child:\n", f"    if args.child:\n"
        f"        return exec(compile({CHILD!r}, 'child', 'exec'), {{}})\n")
    )  # fmt: skip
    names = "dsv32-ours,dsv32-fa3,glm-fa3,dsv32-ours-fp8,glm-ours-fp8,glm-ours"
    import time

    begin = time.time()
    got = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "out", "--parallel", "10"]
        + ["--budget", "12", "--steps", "1", "--only", names],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 5 < time.time() - begin < 12 + 8
    assert "dsv32-fa3: stopped: not up" in got.stdout
    done = sorted(p.stem for p in (tmp_path / "out").glob("*.json"))
    assert done == ["dsv32-ours", "dsv32-ours-fp8", "glm-ours", "glm-ours-fp8"]


def step(median, width=1.0):
    return dict(
        n=40,
        median=median,
        p10=median - width,
        p90=median + width,
        mean=median,
        max=median + 9,
    )


def result(name, median=1000.0, shift=0.0, rounds=None, **more):
    times = dict(
        step_us=step(median),
        build_us=step(50.0),
        graph_us=step(median / 3),
        busy_us=310.0,
        kernels=[[100.0, 3.0, "attention"]],
        rounds=dict(step_us=rounds or [median], build_us=[50.0]),
    )
    graphs = [us and us / 3 for us in times["rounds"]["step_us"]]
    times["rounds"]["graph_us"] = graphs
    run = dict(
        sparse_check.RUNS[name],
        run=name,
        file="x.py",
        sha256="a" * 64,
        start_seconds=9.0,
        forced=[[[-1.0 + shift, -9.0], [-2.0 + shift, -7.0]]],
        greedy=[[5, 6, 7 + (shift > 0)]],
        greedy_best=[[[[5, -0.1], [9, -4.0]]] * 2 + [[[7, -0.5], [8, -0.75]]]],
        cases={case: times for case in sparse_report.JUDGED},
    )
    run.update(more)
    return run


def write(out, runs):
    for run in runs:
        (out / f"{run['run']}.json").write_text(json.dumps(run))
    return [run["run"] for run in runs]


def test_report_passes(tmp_path, capsys):
    names = write(
        tmp_path,
        [
            result("dsv32-ours", 900.0, shift=0.1),
            result("dsv32-stock", 990.0),
            result("dsv32-fa3", 950.0),
            result("dsv32-ours-fp8", 890.0, shift=0.2),
            result("dsv32-stock-fp8", 1200.0),
        ],
    )
    assert sparse_report.report(tmp_path, names, list(sparse_check.RUNS)) == 0
    text = capsys.readouterr().out
    for what in ("step", "graph"):
        assert f"dsv32-ours, 1 x 4096, {what}: ours is the fastest" in text
    assert "dsv32-fa3 1.06 x (ours ahead in 1 of 1 rounds)" in text
    assert "2/3, gap <= 0.25" in text
    assert "all checks passed" in text
    lines = (tmp_path / "sparse_check.jsonl").read_text().splitlines()
    assert len(lines) == 6 + 5
    assert "forced" not in json.loads(lines[-1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(name="dsv32-fa3", median=880.0), "dsv32-fa3 is faster"),
        (dict(name="dsv32-ours", shift=0.5), "decode mean 0.25, limit 0.15"),
        (dict(name="dsv32-ours", shift=float("nan")), "decode mean nan"),
        (dict(name="dsv32-fa3", cases={}), "dsv32-fa3 has no time"),
        (dict(name="dsv32-fa3", run=None), "dsv32-fa3: no result"),
        (
            dict(name="dsv32-stock", cases={"8 x 4096": dict(error="out of memory")}),
            "dsv32-stock, 8 x 4096: out of memory",
        ),
    ],
)
def test_report_fails(change, complaint, tmp_path, capsys):
    runs = {n: dict(name=n) for n in ("dsv32-ours", "dsv32-stock", "dsv32-fa3")}
    runs["dsv32-ours"]["median"] = 900.0
    runs[change["name"]].update(change)
    wanted = list(runs)
    write(tmp_path, [result(**r) for r in runs.values() if r.pop("run", 1)])
    assert sparse_report.report(tmp_path, wanted, list(sparse_check.RUNS)) == 1
    failed = capsys.readouterr().out.split("FAILED:")[1]
    assert complaint in failed


def test_turns_of_one_round_are_compared():
    """A host that slows down for a round, or a turn that failed, decides nothing."""
    ours = [900.0, 1800.0, 905.0, 1790.0, None]
    runs = {
        "glm-ours": result("glm-ours", rounds=ours),
        "glm-stock": result("glm-stock", rounds=[990.0, 1700.0, 985.0, 1990.0, 10.0]),
        "glm-fa3": result("glm-fa3", rounds=[890.0, 1850.0, None, 1800.0, 10.0]),
    }
    for line, won in sparse_report.verdicts(runs):
        assert won and "ours is the fastest" in line
        assert "glm-stock 1.09 x (ours ahead in 3 of 4 rounds)" in line
        assert "glm-fa3 1.01 x (ours ahead in 2 of 3 rounds)" in line
    slower = result("glm-ours", rounds=[950.0, 1900.0, 955.0, 1890.0])
    for line, won in sparse_report.verdicts(dict(runs, **{"glm-ours": slower})):
        assert not won and "glm-fa3 is faster" in line
    apart = result("glm-ours", rounds=[None, None, 900.0])
    for line, won in sparse_report.verdicts(dict(runs, **{"glm-ours": apart})):
        assert not won and "no round has ours and glm-fa3" in line


def test_graphs_are_judged_beside_the_steps():
    """The GPU's time is told from the host's; without graphs it isn't judged."""
    runs = {
        "glm-ours": result("glm-ours", rounds=[1010.0, 1020.0]),
        "glm-stock": result("glm-stock", rounds=[1100.0, 1100.0]),
        "glm-fa3": result("glm-fa3", rounds=[1000.0, 1000.0]),
    }

    def graphs(**times):
        for run in runs.values():
            for case in run["cases"].values():
                case["rounds"]["graph_us"] = times[run["run"].split("-")[1]]

    graphs(ours=[400.0, 410.0], stock=[440.0, 450.0], fa3=[430.0, 420.0])
    told = list(sparse_report.verdicts(runs))
    assert [good for _, good in told] == [False, True] * 2
    assert "8 x 4096, graph: ours is the fastest" in told[3][0]
    graphs(ours=[400.0], stock=[440.0], fa3=[390.0])
    assert not any(good for _, good in sparse_report.verdicts(runs))
    graphs(ours=[None], stock=[None], fa3=[None])
    assert [", step: " in line for line, _ in sparse_report.verdicts(runs)] == [
        True
    ] * 2
    graphs(ours=[400.0], stock=[440.0], fa3=[None])
    assert "glm-fa3 has no time" in list(sparse_report.verdicts(runs))[1][0]


@pytest.mark.parametrize(
    ("tolerance", "good"), [(0.0, False), (0.04, False), (0.06, True)]
)
def test_a_time_within_the_tolerance_is_told_and_good(
    tolerance, good, tmp_path, capsys
):
    names = write(
        tmp_path,
        [
            result("dsv32-ours", 1050.0),
            result("dsv32-stock", 1100.0),
            result("dsv32-fa3", 1000.0),
        ],
    )
    code = sparse_report.report(tmp_path, names, list(sparse_check.RUNS), tolerance)
    assert code == (not good)
    text = capsys.readouterr().out
    assert "dsv32-fa3 is faster" in text
    assert (", within 6 %;" in text) == good


def test_lost_turns_fail(tmp_path, capsys):
    """A turn that failed, and an engine that ended early, are told and fail the run."""
    three = [990.0, 980.0, 985.0]
    runs = {
        "glm-ours": result("glm-ours", rounds=[900.0, None, 905.0]),
        "glm-stock": result("glm-stock", rounds=three),
        "glm-fa3": result("glm-fa3", rounds=three[:1]),
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert sparse_report.report(tmp_path, list(runs), list(runs)) == 1
    failed = capsys.readouterr().out.split("FAILED")[1].strip(":\n ").splitlines()
    assert [line.strip() for line in failed] == [
        f"{name}, {case}: {turns} of 3 turns, see {name}.log"
        for case in sparse_report.JUDGED
        for name, turns in (("glm-ours", 2), ("glm-fa3", 1))
    ]


def test_without_cases_nothing_is_timed(tmp_path):
    args = sparse_check.parser().parse_args(["--cases", ""])
    result = {"run": "glm-ours"}
    for first in (True, False):
        sparse_check.time_turn(None, None, args, result, first=first, save=None)
    assert result == {"run": "glm-ours"}


def test_command_line(tmp_path):
    def run(*options):
        return subprocess.run(
            [sys.executable, ROOT / "scripts/sparse_check.py", *options],
            capture_output=True,
            text=True,
        )

    got = run("--only", "dsv32-stock", "--out", str(tmp_path))
    assert got.returncode == 2 and "pass --stock FILE" in got.stderr
    got = run("--only", "nothing", "--out", str(tmp_path))
    assert got.returncode == 2 and "dsv32-ours" in got.stderr
    got = run("--tolerance", "-0.1", "--out", str(tmp_path))
    assert got.returncode == 2 and "0 to 1" in got.stderr
    got = run("--cases", "9 x 9", "--out", str(tmp_path))
    assert got.returncode == 2 and "1 x 4096" in got.stderr
    for option in ("--rounds", "--parallel"):
        for value in ("0", "-1", "two"):
            got = run(option, value, "--out", str(tmp_path))
            assert got.returncode == 2
            assert f"{option}: {value!r} is not an integer of 1 or more" in got.stderr
    got = run("--report", "--only", "glm-ours", "--out", str(tmp_path))
    assert got.returncode == 1 and "glm-ours: no result" in got.stdout
