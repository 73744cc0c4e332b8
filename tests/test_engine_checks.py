# SPDX-License-Identifier: Apache-2.0
"""The engine checks without an engine: reports, comparisons, two GPUs in time."""

import argparse
import json
import sys
import time
from types import SimpleNamespace

import engine_check
import engine_jobs
import engine_models
import engine_report
import engine_timing
import engine_work
import pytest
import two_gpu_check

TWO_GPU_CHILD = """
import json, signal, sys, time
sys.path.insert(0, {scripts!r})
from engine_jobs import Gate
from pathlib import Path
name, out = sys.argv[1], Path({out!r})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(out / f"{{name}}.began").write_text(str(time.time()))
if name == "dcp2-i64":
    time.sleep(600)
if name.startswith("time-"):
    Gate(out, name).wait(600)
    (out / f"{{name}}.timed").write_text(str(time.time()))
    if name == "time-dcp2-i64":
        time.sleep(600)
result = json.loads({result!r})
if name.startswith("time-"):
    entry = dict(median_us=9.0, p10_us=8.0, p90_us=10.0, steps=4)
    result["mixes"] = {{"32k": entry}}
    result["capacity"] = dict(num_blocks=1, vllm_says_tokens=2)
(out / f"{{name}}.json").write_text(json.dumps(dict(result, run=name)))
if name == "tp2":
    time.sleep(600)
"""


def test_two_gpu_check_ends_in_time_whatever_hangs(tmp_path, monkeypatch, capsys):
    """All runs at once; one never comes up, one never ends, one hangs when timed."""
    result = json.dumps(two_gpu_run("", [[[-1.0], [-2.0]]], A["greedy"]))
    script = tmp_path / "child.py"
    script.write_text(
        TWO_GPU_CHILD.format(
            scripts=str(engine_jobs.HERE), out=str(tmp_path), result=result
        )
    )
    monkeypatch.setattr(engine_jobs, "START", begin := time.time())
    monkeypatch.setattr(two_gpu_check, "write_models", lambda args: None)
    monkeypatch.setattr(two_gpu_check, "compile_bytecode", lambda: None)
    monkeypatch.setattr(two_gpu_check, "TIMED_SHARE_SECONDS", 3.0)
    monkeypatch.setattr(
        two_gpu_check,
        "child_command",
        lambda _, name: [sys.executable, str(script), name],
    )
    monkeypatch.setattr(
        sys, "argv",
        ["x", "--out", str(tmp_path), "--parallel", "16", "--budget", "20"],
    )  # fmt: skip
    assert two_gpu_check.main() == 1
    assert time.time() - begin < 20 + 20
    names = two_gpu_check.RUNS
    began = [float(p.read_text()) for p in tmp_path.glob("*.began")]
    timed = {p.stem: float(p.read_text()) for p in tmp_path.glob("*.timed")}
    assert len(began) == len(names) == 16
    order = ["time-tp2", "time-dcp2-i64", "time-dcp2-i1"]
    assert sorted(timed, key=timed.__getitem__) == order
    # Not before what hangs was killed.
    assert max(began) < begin + 11 < timed["time-tp2"]
    text = capsys.readouterr().out
    failed = text.split("FAILED: ")[1]
    assert "dcp2-i64: no result" in failed and "time-dcp2-i64: no result" in failed
    assert failed.count("no result") == 2
    assert "| time-dcp2-i1 | 32 x 32k | 9 |" in text


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("kernel_cutlass_kernel_kv_balanced_mlasm90decode_kernelDecodeKernel_object"
         "_at__CopyAtom_ThrID10", "ours: decode"),
        ("kernel_cutlass_kernel_kv_balanced_mlasm90combineCombineKernel_object",
         "ours: combine"),
        ("kernel_cutlass_kernel_kv_balanced_mlasm90plannerPlannerKernel_object",
         "ours: plan"),
        ("void sm90::dense::flash_fwd_splitkv_mla_kernel<bf16>", "MLA decode of stock"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "KDA"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        ("_ngram_scan_kernel", "sampling, drafts, bookkeeping"),
        ("something_new", engine_report.OTHER),
    ],
)  # fmt: skip
def test_kernels_are_grouped_by_name(kernel, group):
    assert engine_report.group_of(kernel) == group


def test_gpu_time_counts_overlapping_kernels_once():
    kernels = [
        ("a_gemm", 0.0, 10.0),
        ("inside_a_gemm", 1.0, 2.0),
        ("b_gemm", 5.0, 10.0),
        ("Memcpy", 40.0, 20.0),
    ]
    found = engine_report.kernel_groups(kernels, 2)
    assert (found["busy_us"], found["span_us"]) == (17.5, 30.0)
    assert found["groups"] == {"GEMM": 11.0, "copies": 10.0}


def timing_run(name, step, **more):
    entry = dict(
        median_us=step,
        p10_us=step - 5,
        p90_us=step + 5,
        tokens_per_s=64e6 / step,
        trace=dict(groups={"GEMM": 100.0}, busy_us=step - 100, span_us=step),
    )
    short = dict(entry, median_us=2000.0)
    short.pop("trace")
    group = dict(spec="MLAAttentionSpec", layers=24, block_tokens=1024, page_bytes=1)
    return dict(
        engine_timing.RUNS[name],
        run=name,
        mixes={"32k": entry, "short": short},
        capacity=dict(
            cache_gib=40.0, num_blocks=3000, groups=[group], tokens_per_gib=70000,
            vllm_says_tokens=2900000,
        ),
        workspace=dict(scratch_mib=[20.0], locked=True),
        workspace_moved=False,
        **more,
    )  # fmt: skip


def write(folder, runs):
    for name, run in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(run))


def test_timing_report_compares_with_the_best_bf16_run_of_the_same_rows(tmp_path):
    steps = {"ours-8": 10000.0, "flash_attn-8": 15000.0, "flashmla-8": 14000.0,
             "ours-1": 5000.0}  # fmt: skip
    write(tmp_path, {n: timing_run(n, s) for n, s in steps.items()})
    code = engine_report.timing_report(tmp_path, list(steps), [], list(steps))
    text = (tmp_path / "engine_timing.md").read_text()
    (row,) = [r for r in text.splitlines() if r.startswith("| ours-8") and "32k" in r]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert code == 0
    assert cells[-1] == "1.40" and cells[7] == "8000" and cells[8] == "9900"
    (alone,) = [r for r in text.splitlines() if r.startswith("| ours-1") and "32k" in r]
    assert alone.rstrip("| ").endswith("-")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(workspace_moved=True), "allocated after the start"),
        (dict(workspace=dict(scratch_mib=[1.0], locked=False)), "not locked"),
    ],
)
def test_timing_report_fails_on_moved_or_unlocked_workspaces(
    tmp_path, capsys, change, complaint
):
    write(tmp_path, {"ours-1": dict(timing_run("ours-1", 5000.0), **change)})
    assert engine_report.timing_report(tmp_path, ["ours-1"], [], ["ours-1"]) == 1
    assert complaint in capsys.readouterr().out


def test_a_run_without_a_result_fails_the_report_unless_left_out(tmp_path):
    assert engine_report.timing_report(tmp_path, ["ours-1"], [], ["ours-1"]) == 1
    assert engine_report.timing_report(tmp_path, ["ours-1"], ["ours-1"], []) == 0


def test_runs_share_a_gpu_only_while_its_memory_holds_them():
    args = engine_timing.parser().parse_args([])
    names = ["ours-8", "flash_attn-8", "ours-1", "flash_attn-1", "flashmla-8"]
    waves = engine_timing.waves(names, ["0"], args)
    assert sorted(job.name for wave in waves for job in wave) == sorted(names)
    for wave in waves:
        sizes = [
            engine_timing.kv_cache_bytes(engine_timing.RUNS[job.name], args) / 2**30
            + args.extra_gib
            for job in wave
        ]
        assert len(wave) == 1 or sum(sizes) <= args.gpu_gib
    assert len(waves) < len(names)
    two = engine_timing.waves(names, ["0", "1"], args)
    assert {job.gpus for job in two[0]} == {("0",), ("1",)}


def test_the_cache_of_a_timed_run_holds_its_largest_batch():
    args = engine_timing.parser().parse_args([])
    longest = max(sum(engine_timing.lengths(m)) for m in engine_timing.MIXES)
    for cache, value in (("fp8", 1), ("auto", 2)):
        for queries in (1, 8):
            got = engine_timing.kv_cache_bytes(dict(cache=cache, queries=queries), args)
            assert got > longest * 576 * value * 24


A = dict(
    run="a",
    greedy=[[5, 6, 7], [8, 9, 4]],
    greedy_best=[
        [[[5, -0.1], [1, -3.0]], [[6, -0.7], [3, -0.8]], [[7, -0.1], [2, -9.0]]],
        [[[8, -0.1], [1, -3.0]], [[9, -0.2], [3, -2.0]], [[4, -0.1], [2, -9.0]]],
    ],
)


def test_tokens_that_part_at_a_near_tie_are_explained():
    b = dict(run="b", greedy=[[5, 3, 1], [8, 9, 4]])
    row = engine_work.compare(A, b)
    assert (row["greedy_same"], row["greedy_total"]) == (4, 6)
    (part,) = row["parts"]
    assert (part["step"], part["gap"], part["among_best"]) == (1, 0.1, True)
    assert engine_work.unexplained(row["parts"], 0.3) == []


@pytest.mark.parametrize(
    "tokens",
    [
        [[5, 6, 7], [8, 3, 4]],  # the second best, but far behind
        [[5, 2, 7], [8, 9, 4]],  # a near tie of two others
    ],
)
def test_other_differences_are_not(tokens):
    row = engine_work.compare(A, dict(run="b", greedy=tokens))
    assert len(engine_work.unexplained(row["parts"], 0.3)) == 1


def test_a_tie_of_three_explains_every_two_of_them():
    best = [[[[7, -2.0], [8, -2.0], [9, -2.0], [4, -3.0], [5, -3.5]]]]
    rows = [
        engine_work.first_differences([[a]], [[b]], best)[0]
        for a, b in ((7, 9), (8, 9), (7, 4), (7, 6))
    ]
    assert [r["gap"] for r in rows] == [0.0, 0.0, 1.0, 1.5]
    assert [r["among_best"] for r in rows] == [True, True, True, False]
    assert engine_work.unexplained(rows, 0.3) == rows[2:]


def test_greedy_keeps_the_best_tokens_in_order(monkeypatch):
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    values = {11: -4.0, 12: -1.0, 13: -1.5, 14: -2.0, 15: -3.0, 16: -2.5}
    step = {t: SimpleNamespace(logprob=v) for t, v in values.items()}
    asked = []

    def generate(inputs, params, use_tqdm):
        asked.append(params[0].logprobs)
        out = SimpleNamespace(token_ids=[12], logprobs=[step])
        return [SimpleNamespace(outputs=[out])]

    llm = SimpleNamespace(generate=generate)
    tokens, best = engine_work.greedy(llm, [[1]], [1], top=True)
    assert (tokens, asked) == ([[12]], [5])
    assert [t for t, _ in best[0][0]] == [12, 13, 14, 16, 15]


@pytest.mark.parametrize(
    ("name", "accepted", "passes"),
    [
        ("ours-dspark-by-batch", 1.16, True),
        ("ours-dspark-by-batch", 1.0, False),
        ("ours-dspark-adaptive", 1.62, True),
        ("ours-dspark-adaptive", 1.16, False),
        ("ours-dspark-graph", 2.14, True),
        ("ours-dspark-graph", 1.62, False),
    ],
)
def test_right_drafts_are_accepted_as_often_as_a_run_verifies_them(
    name, accepted, passes
):
    run = dict(good_run(), oracle_tokens_per_verify=accepted)
    assert (engine_check.failures(name, run) == []) == passes


def test_layers_must_lie_in_as_many_groups_as_the_run_is_for():
    run = dict(good_run(), oracle_tokens_per_verify=2.1)
    assert engine_check.failures("ours-dspark-groups", dict(run, groups=[2] * 7)) == []
    bad = engine_check.failures("ours-dspark-groups", dict(run, groups=[6, 8]))
    assert bad == ["ours-dspark-groups: KV-cache groups of [6, 8] layers, not 7 groups"]
    config = engine_models.target_config(12, mla_every=3)["linear_attn_config"]
    assert (len(config["full_attn_layers"]), len(config["kda_layers"])) == (4, 8)


def test_a_difference_without_log_probabilities_is_not_explained():
    parts = engine_work.first_differences([[1, 2]], [[1, 3]], [])
    assert engine_work.unexplained(parts, 0.3) == parts


def test_right_drafts_are_compared_with_the_run_without_speculation():
    b = dict(run="b", greedy=A["greedy"], oracle=[[5, 6, 1], [8, 9, 4]])
    row = engine_work.compare(A, b)
    assert (row["greedy_same"], row["oracle_same"]) == (6, 5)
    assert row["parts"][0]["work"] == "oracle"


def test_oracle_drafts_are_the_continuation_with_one_wrong_token_at_most():
    torch = pytest.importorskip("torch")
    steps, vocab = 7, 100
    continuation = list(range(10, 40))
    speculator = SimpleNamespace(
        propose=lambda batch, *rest, **more: torch.zeros(1, steps, dtype=torch.int64)
    )
    total = torch.zeros(4, dtype=torch.int32)
    runner = SimpleNamespace(
        speculator=speculator,
        num_speculative_steps=steps,
        device="cpu",
        req_states=SimpleNamespace(total_len=SimpleNamespace(gpu=total)),
    )
    executor = SimpleNamespace(
        driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    )
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=core),
        request_counter=SimpleNamespace(counter=12),
    )
    lengths = set()
    oracle = engine_work.OracleDrafts(llm, [[1] * 5], [continuation], vocab)
    with oracle:
        for done in range(1, 20):
            total[2] = 5 + done
            batch = SimpleNamespace(req_ids=["12-abc"], idx_mapping=torch.tensor([2]))
            rest = [None] * 4
            drafts = speculator.propose(batch, *rest, torch.tensor([3]))
            right = torch.tensor(continuation[done : done + steps])
            same = (drafts[0] == right).tolist()
            assert same.count(False) <= 1
            lengths.add(same.index(False) if False in same else steps)
    assert lengths == set(range(steps + 1))
    assert oracle.tokens_per_verify() == 3.0
    assert float(speculator.propose(batch, *rest, None).sum()) == 0


def test_synchronisations_are_told_apart_by_who_made_them(monkeypatch):
    monkeypatch.setattr(engine_work.warnings, "showwarning", None)
    recorder = engine_work.SyncRecorder()
    for path in ("/x/vllm/v1/worker/a.py", "/x/vllm/k/kv_balanced_mla/decode.py"):
        code = compile("show('called a synchronizing CUDA operation')", path, "exec")
        exec(code, {"show": lambda text: recorder._show(text, None, "", 0)})
    assert [s["kind"] for s in recorder.result()] == ["stock", "ours"]


def good_run(**more):
    return dict(
        run="ours-graph",
        workspace=dict(locked=True, scratch_mib=[6.0]),
        workspace_moved=False,
        plans=[dict(slot=0, heads=12, max_q=1, planned=3, reused=3, layers=2)],
        syncs=[dict(kind="stock", place="x", times=9)],
        **more,
    )


def test_a_good_run_has_no_failures():
    assert engine_check.failures("ours-graph", good_run()) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(plans=[dict(slot=0, planned=4, reused=2, layers=2)]), "not one plan"),
        (dict(workspace_moved=True), "after they were locked"),
        (dict(workspace=dict(locked=False)), "never locked"),
        (dict(syncs=[dict(kind="ours", place="decode.py:1", times=2)]), "decode.py:1"),
        (dict(oracle_error="gone"), "gone"),
        (dict(oracle_tokens_per_verify=1.1), "1.1 tokens a verify"),
    ],
)
def test_each_promise_of_a_run_is_held(change, complaint):
    (text,) = engine_check.failures("ours-graph", dict(good_run(), **change))
    assert complaint in text


def test_an_eager_run_that_never_planned_fails():
    (text,) = engine_check.failures("ours-eager", dict(good_run(), plans=[]))
    assert "no plan was counted" in text


def test_every_run_with_drafts_is_held_to_a_run_without():
    for name, run in engine_check.RUNS.items():
        if "spec" in run:
            reference = engine_check.RUNS[str(engine_check.reference_of(name))]
            assert "spec" not in reference and reference["enforce_eager"]
            assert bool(reference.get("k3_kda")) == bool(run.get("k3_kda"))


def test_engine_check_report_fails_on_a_changed_token(tmp_path):
    plain = good_run(start_seconds=1, greedy_seconds=1, memory=dict(peak_mib=100.0))
    eager = dict(plain, run="ours-eager", greedy=A["greedy"],
                 greedy_best=A["greedy_best"])  # fmt: skip
    graph = dict(plain, greedy=[[5, 6, 7], [8, 3, 4]])
    names = ["ours-eager", "ours-graph"]
    args = argparse.Namespace(limit=0.5, tie=0.3)
    write(tmp_path, {"ours-eager": eager, "ours-graph": graph})
    assert engine_check.report(tmp_path, names, args) == 1
    write(tmp_path, {"ours-graph": dict(graph, greedy=A["greedy"])})
    assert engine_check.report(tmp_path, names, args) == 0


def two_gpu_run(name, forced, greedy, planned=2):
    plans = [
        dict(slot=0, heads=6, max_q=1, planned=planned, reused=planned and 2, layers=2)
    ]
    return dict(
        run=name, start_seconds=1, forced=forced, greedy=greedy,
        greedy_best=A["greedy_best"], ranks=[plans, plans],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (two_gpu_run("dcp2-i1", [[[-1.0], [-2.1]]], A["greedy"]), 0),
        (two_gpu_run("dcp2-i1", [[[-1.0], [-3.0]]], A["greedy"]), 1),
        (two_gpu_run("dcp2-i1", [[[-1.0], [-2.1]]], [[5, 6, 7], [8, 2, 4]]), 1),
        (two_gpu_run("dcp2-i1", [[[-1.0], [-2.1]]], A["greedy"], planned=4), 1),
        (two_gpu_run("dcp2-i1", [[[-1.0], [-2.1]]], A["greedy"], planned=0), 1),
    ],
)
def test_two_gpu_report_holds_ranks_to_one_gpu(tmp_path, run, code):
    one = two_gpu_run(two_gpu_check.ONE, [[[-1.0], [-2.0]]], A["greedy"])
    write(tmp_path, {two_gpu_check.ONE: one, "dcp2-i1": run})
    args = two_gpu_check.parser().parse_args([])
    names = [two_gpu_check.ONE, "dcp2-i1"]
    assert two_gpu_check.report(tmp_path, names, [], args) == code
    assert "dcp2-i1" in (tmp_path / "two_gpu_check.md").read_text()


def test_two_gpu_runs_keep_multicast_off():
    off = two_gpu_check.NO_MULTICAST
    for name in ("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
        assert off[name] == "0"
    assert off["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_checkpoints_have_every_layer_and_the_same_weights_again(tmp_path):
    pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    config = dict(engine_models.target_config(4, 2), hidden_size=64,
                  intermediate_size=64, vocab_size=32, q_lora_rank=32)  # fmt: skip
    shapes = engine_models.checkpoint_shapes(config)
    attention = "model.layers.{}.self_attn.{}".format
    assert {n for n in shapes if n.endswith("kv_b_proj.weight")} == {
        attention(layer, "kv_b_proj.weight") for layer in (1, 3)
    }
    assert {n for n in shapes if n.endswith("A_log")} == {
        attention(layer, "A_log") for layer in (0, 2)
    }
    first = load_file(
        engine_models.write_checkpoint(tmp_path / "a", config) / "model.safetensors"
    )
    again = load_file(
        engine_models.write_checkpoint(tmp_path / "b", config) / "model.safetensors"
    )
    assert set(first) == set(shapes)
    assert all(torch.equal(first[name], again[name]) for name in first)
