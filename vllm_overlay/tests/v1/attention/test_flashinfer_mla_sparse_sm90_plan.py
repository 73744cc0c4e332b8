# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The schedule of the sparse MLA backend: its reference, its kernel, its layout.

Without a GPU the kernel runs in Triton's interpreter, which has to be switched on
before vLLM is imported; ``test_in_the_interpreter`` starts these files that way.
"""

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.v1.attention import flashinfer_mla_sparse_sm90_utils as utils
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.mla import (
    flashinfer_mla_sparse_sm90_plan as plan_module,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    Geometry,
    WorkspaceLayout,
    check_schedule,
    reference_schedule,
    row_kv_lengths,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_planner import (
    DevicePlanner,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON
NO_KERNEL = "needs a GPU or Triton's interpreter"
needs_kernel = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason=NO_KERNEL)
pytestmark = pytest.mark.skip_global_cleanup
H200 = 132


@pytest.mark.skipif(
    ON_GPU or INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="runs without a GPU, where triton is installed, outside the interpreter",
)
def test_in_the_interpreter():
    """The kernel tests of this file and of the backend's, in Triton's interpreter."""
    files = [Path(__file__).with_name(f"test_flashinfer_mla_sparse_sm90_{name}.py")
             for name in ("plan", "backend")]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qrs", "-p", "no:cacheprovider", *files],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    shown = run.stdout[-4000:] + run.stderr[-2000:]
    assert run.returncode == 0, shown
    assert " passed" in run.stdout and NO_KERNEL not in run.stdout, shown


def geometry(heads=8, width=2176, thread_blocks=H200):
    return Geometry(heads, 1 if heads <= 64 else 2, thread_blocks, width)


def random_lengths(random_, rows, width):
    kind = random_.choice(["any", "full", "short", "edges", "one"])
    edges = [0, 1, 63, 64, 65, width - 1, width]
    return {
        "any": [random_.randint(0, width) for _ in range(rows)],
        "full": [width] * rows,
        "short": [random_.randint(0, 70) for _ in range(rows)],
        "edges": [random_.choice(edges) for _ in range(rows)],
        "one": [width if row == rows // 2 else 1 for row in range(rows)],
    }[kind]


# -- lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("kpool", [1, 4])
def test_lengths_keep_the_context_up_to_topk_and_the_open_pool_above(kpool):
    topk = 2048
    for context in (0, 1, topk - 1, topk, *range(topk + 1, topk + 9), 42295):
        (got,) = row_kv_lengths([0, 1], [context], 1, topk, kpool, 2176)
        assert got == (context if context <= topk else topk + context % kpool)


def test_lengths_of_a_request_s_rows_grow_by_one_and_padding_is_empty():
    got = row_kv_lengths([0, 5, 7, 10], [100, 9, 3000], 12, 2048, 4, 2176)
    # Request 2: contexts 2998, 2999, 3000; 2998 % 4 = 2.
    assert got == [96, 97, 98, 99, 100, 8, 9, 2050, 2051, 2048, 0, 0]


def test_lengths_stay_in_the_slot_table():
    assert row_kv_lengths([0, 1], [2051], 1, 2048, 4, 2048) == [2048]


# -- the schedule ------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 64, 65, 96, 128])
def test_every_row_is_done_once_within_the_bounds(heads):
    random_ = random.Random(heads)
    shape = geometry(heads)
    for _ in range(60):
        rows = random_.choice([0, 1, 2, 31, 66, 67, 131, 132, 133, 300])
        lengths = random_lengths(random_, rows, shape.width)
        schedule = reference_schedule(lengths, shape)
        starts = [row * shape.width for row in range(rows)]
        check_schedule(schedule, lengths, starts, shape)
        assert len(schedule.items) <= rows + shape.clusters
        order = [item.cluster for item in schedule.items]
        assert order == sorted(order)


@pytest.mark.parametrize("rows,worst", [(8, 2.0), (64, 1.15), (133, 1.15), (512, 1.05)])
def test_clusters_get_about_the_same(rows, worst):
    shape = geometry(width=2048)
    cost = [0] * shape.clusters
    for item in reference_schedule([2048] * rows, shape).items:
        cost[item.cluster] += shape.row_cost + item.kv_end - item.kv_start
    assert max(cost) <= worst * sum(cost) / len(cost)


@pytest.mark.parametrize("heads", [8, 128])
def test_flashinfer_s_own_schedule_passes_the_check(heads):
    random_ = random.Random(1)
    shape = geometry(heads, thread_blocks=16)
    for _ in range(40):
        lengths = random_lengths(random_, random_.choice([1, 7, 40, 90]), shape.width)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        check_schedule(
            utils.host_schedule(lengths, starts, shape), lengths, starts, shape
        )


def change_item(schedule, index, **changes):
    items = list(schedule.items)
    items[index] = replace(items[index], **changes)
    return replace(schedule, items=tuple(items))


def change_merge(schedule, index, **changes):
    merges = list(schedule.merges)
    merges[index] = replace(merges[index], **changes)
    return replace(schedule, merges=tuple(merges))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: change_item(s, 0, kv_end=s.items[0].kv_end - 1),
        lambda s: change_item(s, 1, kv_start=0),
        lambda s: change_item(s, 0, kv_len=2176),
        lambda s: change_item(s, 0, kv_indptr=64),
        lambda s: change_item(s, 1, partial_indptr=-1),
        lambda s: change_item(s, 0, q_indptr=9),
        lambda s: replace(s, items=s.items[1:]),
        lambda s: replace(s, work_indptr=s.work_indptr[:-1] + (0,)),
        lambda s: replace(s, merges=s.merges[1:]),
        lambda s: replace(s, merges=s.merges + s.merges[:1]),
        lambda s: change_merge(s, 0, merge_partial_start=1),
        lambda s: change_merge(s, 0, merge_stride=7),
    ],
)
def test_the_check_finds_a_spoilt_schedule(spoil):
    shape, lengths = geometry(), [2000, 1500, 0]
    starts = [0, 2176, 4352]
    schedule = reference_schedule(lengths, shape)
    check_schedule(schedule, lengths, starts, shape)
    with pytest.raises(ValueError):
        check_schedule(spoil(schedule), lengths, starts, shape)


# -- the layout --------------------------------------------------------------------


def test_layout_survives_a_round_trip():
    shape = geometry(96, thread_blocks=8)
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    assert layout.capacity == utils.CAPACITY
    assert layout.max_rows == utils.CAPACITY - 4
    schedule = reference_schedule([2176, 5, 0, 900], shape)
    workspace = torch.full((used // 4,), -1, dtype=torch.int32)
    utils.write_schedule(schedule, layout, workspace)
    assert layout.read(workspace) == schedule


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda info: info + [0], "19 fields, not 18"),
        (lambda info: [2, 4] + info[2:], r"grid is \(2, 4\), not \(1, 8\)"),
        (lambda info: info[:4] + [info[3] + 2] + info[5:], "partial_indptr"),
        (lambda info: info[:12] + [info[11] + 4] + info[13:], "q_start"),
        (lambda info: info[:15] + [1 << 24] + info[16:], "work_indptr|end at byte"),
        (lambda info: info[:3] + [info[2]] + info[4:], "expected|q_indptr"),
    ],
)
def test_another_layout_is_refused(spoil, message):
    shape = geometry(thread_blocks=8)
    info, used = utils.plan_info(shape)
    WorkspaceLayout.from_plan(info, used, shape)
    with pytest.raises(ValueError, match=message):
        WorkspaceLayout.from_plan(spoil(info), used, shape)


def test_a_device_with_too_many_thread_blocks_is_refused():
    shape = geometry(thread_blocks=256)
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    with pytest.raises(ValueError, match="fewer than 256 thread blocks"):
        DevicePlanner(layout, torch.empty(0), 1, 2048, 1)


# -- the kernel --------------------------------------------------------------------


def run_kernel(shape, query_lens, seq_lens, topk, kpool, padding=0):
    """Plan on the device; give the schedule, the lengths, and the reference's."""
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    rows = starts[-1] + padding
    requests = [i for i, n in enumerate(query_lens) for _ in range(n)] + [0] * padding

    def tensor(values):
        return torch.tensor(values or [0], dtype=torch.int32, device=DEVICE)

    workspace = torch.full((used // 4,), -7, dtype=torch.int32, device=DEVICE)
    planner = DevicePlanner(layout, workspace, rows + 1, topk, kpool)
    lengths = planner.row_lengths.fill_(-7)
    planner(rows, tensor(starts), tensor(seq_lens), len(query_lens), tensor(requests))
    assert lengths[rows].item() == -7, "a length past the rows was written"
    want = row_kv_lengths(starts, seq_lens, rows, topk, kpool, shape.width)
    got = layout.read(workspace)
    # What limits a row's items starts from the plan's own.
    planner.limit(tensor([shape.width] * rows)[:rows])
    assert layout.read(workspace) == got
    return got, lengths[:rows].tolist(), want


@needs_kernel
@pytest.mark.parametrize("heads,thread_blocks", [(8, 132), (64, 8), (96, 132), (12, 4)])
def test_kernel_writes_the_reference_s_schedule(heads, thread_blocks):
    random_ = random.Random(heads)
    shape = geometry(heads, thread_blocks=thread_blocks)
    for requests, most in ((1, 1), (3, 6), (40, 1), (132, 1), (133, 1), (90, 7)):
        query_lens = [random_.randint(1, most) for _ in range(requests)]
        seq_lens = [
            n + random_.choice([0, 1, 60, random_.randint(0, 4000)]) for n in query_lens
        ]
        got, lengths, want = run_kernel(
            shape, query_lens, seq_lens, 2048, 4, random_.choice([0, 5])
        )
        assert lengths == want
        assert got == reference_schedule(want, shape)


@needs_kernel
@pytest.mark.parametrize("kpool", [1, 4])
def test_kernel_lengths_around_topk(kpool):
    seq_lens = [2046, 2047, *range(2048, 2057), 1, 0]
    _, lengths, want = run_kernel(geometry(), [1] * 13, seq_lens, 2048, kpool)
    assert lengths == want
    above = [topk + c % kpool for topk, c in zip([2048] * 8, range(2049, 2057))]
    assert lengths == [2046, 2047, 2048, *above, 1, 0]


@needs_kernel
@pytest.mark.parametrize("padding", [0, 3])
def test_kernel_without_a_request(padding):
    got, lengths, _ = run_kernel(geometry(), [], [], 2048, 1, padding)
    assert lengths == [0] * padding
    assert [item.kv_end for item in got.items] == [0] * padding
    assert got.work_indptr[-1] == padding and not got.merges


@needs_kernel
def test_kernel_leaves_nothing_of_a_larger_batch():
    """A replay with fewer rows: old items and merges must not be seen."""
    shape = geometry(thread_blocks=8)
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    workspace = torch.zeros(used // 4, dtype=torch.int32, device=DEVICE)
    planner = DevicePlanner(layout, workspace, 64, 2048, 1)
    starts = torch.arange(9, dtype=torch.int32, device=DEVICE)
    for contexts in ([2000] * 8, [0, 300] + [0] * 6, [0] * 8):
        seq_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        planner(8, starts, seq_lens, 8, starts)
        assert layout.read(workspace) == reference_schedule(contexts, shape)


@needs_kernel
@pytest.mark.parametrize("heads", [8, 96])
def test_limit_shortens_a_row_s_items_to_its_count(heads):
    """And the next layer's counts start from the plan again."""
    shape = geometry(heads, thread_blocks=16)
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    workspace = torch.zeros(used // 4, dtype=torch.int32, device=DEVICE)
    planner = DevicePlanner(layout, workspace, 6, 2048, 1)
    contexts = [2000, 2000, 100, 64, 1, 0]
    starts = torch.arange(7, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    planner(6, starts, seq_lens, 6, starts)
    planned = layout.read(workspace)
    for counts in ([700, 0, 99, 64, 0, 3], [2000, 1999, 1, 0, 1, 0], contexts):
        planner.limit(torch.tensor(counts, dtype=torch.int32, device=DEVICE))
        limited = layout.read(workspace)
        assert limited.merges == planned.merges
        assert limited.work_indptr == planned.work_indptr
        for item, before in zip(limited.items, planned.items):
            length = min(counts[item.q_indptr], contexts[item.q_indptr])
            end = max(min(before.kv_end, length), before.kv_start)
            assert item == replace(before, kv_len=length, kv_end=end)
    assert limited == planned


def test_the_kernel_s_names_are_the_layout_s():
    """Each array that the layout knows is a constant of the kernel."""
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_planner as m

    source = Path(m.__file__).read_text()
    for name in (*plan_module.WORK_FIELDS, *plan_module.MERGE_FIELDS, "work_indptr"):
        assert f"{name.upper()}: tl.constexpr" in source
