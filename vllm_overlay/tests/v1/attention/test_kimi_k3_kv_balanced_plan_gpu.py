# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Device planner and split-KV combine of the KV-balanced MLA decode (Hopper).

Also a script, for a host with torch and the CuTe DSL only: it runs the same checks
without pytest and prints times.
"""

import importlib
import random
import sys
from pathlib import Path

import torch

try:
    from tests.v1.attention.kimi_k3_kv_balanced_mla_package import (
        PACKAGE,
        config,
        hopper_missing,
        plan,
    )
except ImportError:  # as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).parent))
    from kimi_k3_kv_balanced_mla_package import (  # type: ignore[no-redef]
        PACKAGE,
        config,
        hopper_missing,
        plan,
    )

try:
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

missing = hopper_missing
LATENT = 512
GRAPH_LAUNCHES = 20

if pytest is not None:
    pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def planner(groups, max_requests=1024):
    module = importlib.import_module(PACKAGE + ".sm90.planner")
    return module.compile_plan_kernel(groups, max_requests)


def combine(groups, use_pdl=False):
    module = importlib.import_module(PACKAGE + ".sm90.combine")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return module.compile_combine_kernel(groups, sms, use_pdl)


def device_plan(lengths, groups, max_requests=1024):
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    counts = torch.full((plan.COUNTS_LEN,), -7, dtype=torch.int32, device="cuda")
    work = torch.full((plan.work_len(groups),), -7, dtype=torch.int32, device="cuda")
    planner(groups, max_requests).launch(seq_lens, counts, work, stream())
    return counts, work


def graph_us(launch):
    """Microseconds of one launch in a CUDA graph of ``GRAPH_LAUNCHES``."""
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            launch()
    times = []
    for _ in range(7):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / GRAPH_LAUNCHES)
    return sorted(times)[len(times) // 2]


def plan_cases(max_requests):
    rng = random.Random(max_requests)
    cases = [
        [0], [1], [128], [129], [1 << 20], [0] * 64, [8192] * 64, [8192] * 80,
        [32768] * 32, [512] * 1024, [1 << 20] + [1024] * 63, [262144] * 4 + [2048] * 60,
        [2**31 - 1] * 1024, [-5, 300, -(2**31), 7000], [8192] * 40 + [0] * 88,
    ]  # fmt: skip
    for _ in range(150):
        batch = rng.choice((1, 2, 3, rng.randint(1, 150), rng.randint(1, max_requests)))
        longest = int(2 ** rng.uniform(0, 18))
        lengths = [rng.randint(0, longest) for _ in range(batch)]
        if rng.random() < 0.3:
            lengths[rng.randrange(batch)] = 1 << 20
        cases.append(lengths)
    return [case[:max_requests] for case in cases]


SHAPES = [(1, 64), (7, 100), (66, 1024), (132, 1024), (66, 4096), (255, 2048)]


def check_planner(groups, max_requests):
    """The device planner gives the reference's bits."""
    for lengths in plan_cases(max_requests):
        counts, work = device_plan(lengths, groups, max_requests)
        want_counts, want_work = plan.plan_reference(
            torch.tensor(lengths, dtype=torch.int32), groups
        )
        assert torch.equal(counts.cpu(), want_counts), (lengths, counts, want_counts)
        assert torch.equal(work.cpu(), want_work), lengths


def check_planner_replay():
    """A captured planner follows lengths that change after the capture."""
    groups, batch = 66, 64
    seq_lens = torch.full((batch,), 8192, dtype=torch.int32, device="cuda")
    counts = torch.zeros(plan.COUNTS_LEN, dtype=torch.int32, device="cuda")
    work = torch.zeros(plan.work_len(groups), dtype=torch.int32, device="cuda")
    compiled = planner(groups)
    compiled.launch(seq_lens, counts, work, stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled.launch(seq_lens, counts, work, stream())
    for lengths in ([1 << 20] + [1024] * 63, [0] * 64, list(range(0, 64000, 1000))):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        want = plan.plan_reference(torch.tensor(lengths, dtype=torch.int32), groups)
        assert torch.equal(counts.cpu(), want[0]), lengths
        assert torch.equal(work.cpu(), want[1]), lengths


def partials(groups, rows, splits, seed=0):
    """Random partials; unused slots hold NaN, a fifth of the pieces is empty.

    Returns:
        fp16 outputs, as the decode writes them (scaled), and LSEs.

    """
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2 * groups, rows)
    out = 50 * torch.randn(*shape, LATENT, device="cuda", generator=generator)
    lse = 20 * torch.randn(*shape, device="cuda", generator=generator)
    empty = torch.rand(*shape, device="cuda", generator=generator) < 0.2
    used = [s for _, first, last in splits for s in plan.slots_of_split(first, last)]
    if splits:  # a row of which nothing is visible
        empty[plan.slots_of_split(*splits[0][1:]), rows - 1] = True
    lse.masked_fill_(empty, -torch.inf)
    out.masked_fill_(empty[..., None], 0.0)
    unused = torch.ones(2 * groups, dtype=torch.bool, device="cuda")
    unused[used] = False
    out[unused] = torch.nan
    lse[unused] = torch.nan
    return (out * config.PARTIAL_SCALE).half(), lse


def combine_reference(out, lse, split, scale):
    """Float64 merge of one split request: out [rows, 512] and LSE [rows]."""
    slots = plan.slots_of_split(*split[1:])
    lse = lse[slots].double()
    maximum = lse.amax(0)
    shift = torch.where(maximum.isinf(), torch.zeros_like(maximum), maximum)
    weights = torch.exp2(lse - shift)
    total = weights.sum(0)
    merged = (weights[..., None] * out[slots].double()).sum(0) / config.PARTIAL_SCALE
    merged = merged / total.clamp_min(1e-300)[:, None] * scale
    return merged, torch.where(total > 0, total.log2() + shift, -torch.inf)


def check_combine(lengths, groups, rows, use_pdl=False, with_lse=True):
    """Merged rows against float64; all other rows stay as they were.

    Returns:
        Largest error of the output relative to its row's size, and of the LSE.

    """
    scale = 0.37
    counts, work = device_plan(lengths, groups)
    splits = plan.split_list(work.cpu(), counts.cpu(), groups)
    part, part_lse = partials(groups, rows, splits)
    lines = len(lengths) * rows
    results = []
    for _ in range(2):
        out = torch.full((lines, LATENT), 7.0, dtype=torch.bfloat16, device="cuda")
        lse = torch.full((lines,), 7.0, device="cuda")
        combine(groups, use_pdl)(
            part.data_ptr(), part_lse.data_ptr(), counts.data_ptr(), work.data_ptr(),
            out.data_ptr(), lse.data_ptr() if with_lse else None, rows, scale, stream(),
        )  # fmt: skip
        results.append((out, lse))
    (out, lse), (again, lse_again) = results
    assert torch.equal(out, again) and torch.equal(lse, lse_again), "not deterministic"
    assert not out.isnan().any() and not lse.isnan().any()
    touched = torch.zeros(lines, dtype=torch.bool, device="cuda")
    worst = worst_lse = 0.0
    for split in splits:
        lines_of = slice(split[0] * rows, (split[0] + 1) * rows)
        touched[lines_of] = True
        want, want_lse = combine_reference(part, part_lse, split, scale)
        error = (out[lines_of].double() - want).abs().amax(1)
        size = want.abs().amax(1)
        assert (out[lines_of][size == 0] == 0).all()
        worst = max(worst, (error / size.clamp_min(1e-9)).max().item())
        if with_lse:
            empty = want_lse.isinf()
            assert (lse[lines_of][empty] == -torch.inf).all()
            difference = (lse[lines_of].double() - want_lse)[~empty].abs()
            worst_lse = max([worst_lse, *difference.tolist()])
    assert (out[~touched] == 7.0).all() and (lse[~touched] == 7.0).all()
    assert with_lse or (lse == 7.0).all()
    # bf16 has 8 significant bits: half a unit is at most 2**-8 of a value.
    assert worst <= 2**-8 + 1e-5 and worst_lse <= 1e-5, (worst, worst_lse)
    return len(splits), worst, worst_lse


COMBINE_CASES = {
    "1 split over 66": ([1 << 20], 66, 96),
    "2 partials each": ([8192] * 80, 66, 96),
    "even halves": ([8192] * 64, 132, 48),
    "several long": ([262144] * 4 + [2048] * 60, 66, 96),
    "none": ([8192] * 64, 66, 96),
    "one row": ([1 << 20, 5000, 1 << 18], 132, 1),
    "odd rows": ([1 << 18, 0, 1 << 17], 66, 13),
    "many rows and partials": ([1 << 20], 20, 1024),
    "8192 rows": ([30000, 70000], 4, 8192),
}


if pytest is not None:

    @pytest.mark.parametrize("groups, max_requests", SHAPES)
    def test_planner_equals_reference(groups, max_requests):
        check_planner(groups, max_requests)

    def test_planner_follows_lengths_in_a_graph():
        check_planner_replay()

    @pytest.mark.parametrize("use_pdl", [False, True])
    @pytest.mark.parametrize("name", COMBINE_CASES)
    def test_combine(name, use_pdl):
        splits, _, _ = check_combine(*COMBINE_CASES[name], use_pdl=use_pdl)
        assert (splits == 0) == (name == "none")

    def test_combine_without_lse():
        check_combine([8192] * 80, 66, 96, with_lse=False)


def time_combine(lengths, groups, rows, use_pdl):
    """Microseconds of a launch and its traffic in GB/s."""
    counts, work = device_plan(lengths, groups)
    splits = plan.split_list(work.cpu(), counts.cpu(), groups)
    part, part_lse = partials(groups, rows, splits)
    out = torch.empty(len(lengths) * rows, LATENT, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(len(lengths) * rows, device="cuda")
    kernel = combine(groups, use_pdl)
    arguments = [t.data_ptr() for t in (part, part_lse, counts, work, out, lse)]
    us = graph_us(lambda: kernel(*arguments, rows, 1.0, stream()))
    pieces = sum(last - first + 1 for _, first, last in splits)
    line = LATENT * config.PARTIAL_BYTES + 4
    moved = rows * (pieces * line + len(splits) * (LATENT * 2 + 4))
    return us, moved / us / 1e3


def main():
    """Run every check and print times."""
    reason = missing()
    if reason is not None:
        raise SystemExit(f"cannot run here: {reason}")
    print(torch.cuda.get_device_name(), flush=True)
    for groups, max_requests in SHAPES:
        check_planner(groups, max_requests)
        print(
            f"planner {groups} groups, {max_requests} requests: bits equal", flush=True
        )
    check_planner_replay()
    print("planner in a graph follows the lengths", flush=True)
    for batch in (1, 64, 1024):
        lengths = torch.full((batch,), 8192, dtype=torch.int32, device="cuda")
        counts = torch.zeros(plan.COUNTS_LEN, dtype=torch.int32, device="cuda")
        work = torch.zeros(plan.work_len(66), dtype=torch.int32, device="cuda")
        kernel = planner(66)
        us = graph_us(
            lambda: kernel.launch(lengths, counts, work, stream())  # noqa: B023
        )
        print(f"planner time, {batch} requests: {us:.2f} us", flush=True)
    for name, case in COMBINE_CASES.items():
        for use_pdl in (False, True):
            splits, worst, worst_lse = check_combine(*case, use_pdl=use_pdl)
            us, gb_per_s = time_combine(*case, use_pdl)
            print(
                f"combine {name} (pdl {use_pdl}): {splits} splits, error {worst:.1e}, "
                f"LSE {worst_lse:.1e}, {us:.2f} us, {gb_per_s:.0f} GB/s",
                flush=True,
            )
    check_combine([8192] * 80, 66, 96, with_lse=False)
    print("all checks passed")


if __name__ == "__main__":
    main()
