# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's grouping and results, without a GPU."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmark needs torch")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "vllm_overlay/benchmarks/kernels")
    try:
        import benchmark_kimi_k3_kv_balanced_mla as module

        yield module
    finally:
        for name in [n for n in sys.modules if "kimi_k3_mla_" in n]:
            del sys.modules[name]
        sys.modules.pop("benchmark_kimi_k3_kv_balanced_mla", None)


def test_a_skewed_batch_takes_turns_with_its_equal_requests(bench):
    by_name = {shape.name: shape for shape in bench.SHAPES}
    skewed = [shape for shape in bench.SHAPES if shape.equal]
    assert len(skewed) == 2
    groups = bench.in_turns(list(bench.SHAPES))
    assert [s for group in groups for s in group] == list(bench.SHAPES)
    assert [group for group in groups if len(group) > 1] == [
        [shape, by_name[shape.equal]] for shape in skewed
    ]
    for shape in skewed:  # either alone, as --shapes may choose
        for one in (shape, by_name[shape.equal]):
            assert bench.in_turns([one]) == [[one]]


def test_a_decode_that_cannot_be_captured_is_left_out(bench, monkeypatch):
    """It ran once, so it has an output and no graph; the others are timed."""
    group = bench.in_turns(list(bench.SHAPES[5:7]))[0]
    times = iter(range(1, 9))

    def build(batch, names, row):
        row.failed["other"] = "RuntimeError: not in a capture"
        return {bench.OURS: "graph"}, {bench.OURS: 1}, {bench.OURS: 0, "other": 0}

    def alternate(graphs, calls, reps):
        return {key: bench.Timing(next(times), 0, 0) for key in graphs}

    monkeypatch.setattr(bench, "build", build)
    monkeypatch.setattr(bench, "alternate", alternate)
    monkeypatch.setattr(bench.cases, "make_batch", lambda shape: shape)
    monkeypatch.setattr(bench.torch.accelerator, "empty_cache", lambda: None)
    names = [bench.OURS, "other"]
    rows = bench.run_shapes(group, names, bench.Ceilings(1.0, 1.0), 9, accuracy=False)
    assert len(group) == 2 and [row.name for row in rows] == [s.name for s in group]
    assert [set(row.times) for row in rows] == [{bench.OURS}] * 2
    assert [row.us() for row in rows] == [3, 4]
