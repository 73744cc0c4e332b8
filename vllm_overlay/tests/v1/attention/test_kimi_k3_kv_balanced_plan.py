# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Work partition of the KV-balanced MLA decode (CPU)."""

import random

import pytest
import torch

from vllm.models.kimi_k3.nvidia.kv_balanced_mla import plan
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.config import UNIT_TOKENS

# The cost model the balance is judged with, in units; kept apart from plan.py's
# constants so that a wrong constant there shows up here.
ITEM_UNITS = 3.5
SPLIT_UNITS = 0.75
EMPTY_UNITS = 1.0


def lognormal(count, mu, sigma, low, high, seed=0):
    rng = random.Random(seed)
    draws = (rng.lognormvariate(mu, sigma) for _ in range(count))
    return [int(min(max(low, x), high)) for x in draws]


# name -> (lengths, least efficiency in % with 66 groups, with 132 groups): 2 % below
# the better of plain equal stretches, snapped stretches and no split at all.
BATCHES = {
    "1x1M+63x1k": ([1 << 20] + [1024] * 63, 95, 93),
    "64x8k": ([8192] * 64, 95, 87),
    "80x8k": ([8192] * 80, 93, 87),
    "66x8k": ([8192] * 66, 98, 93),
    "32x32k": ([32768] * 32, 95, 92),
    "16x128k": ([131072] * 16, 97, 95),
    "128x4k": ([4096] * 128, 95, 95),
    "256-lognormal-8k": (lognormal(256, 9, 1.2, 64, 1 << 18), 97, 96),
    "1x1M": ([1 << 20], 96, 92),
    "4x256k+60x2k": ([262144] * 4 + [2048] * 60, 96, 92),
    "1024x512": ([512] * 1024, 95, 95),
    "1024-lognormal-2k": (lognormal(1024, 7.6, 1, 16, 1 << 20), 97, 96),
}


def make_plan(lengths, groups):
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    counts, work = plan.plan_reference(seq_lens, groups)
    return seq_lens, counts, work, plan.segments(work, counts, seq_lens, groups)


def segment_time(segment):
    length = segment.unit_end - segment.unit_begin
    if length == 0:
        return EMPTY_UNITS
    return length + ITEM_UNITS + (SPLIT_UNITS if segment.slot >= 0 else 0)


def slowest_group(walks):
    return max(sum(segment_time(s) for s in walk) for walk in walks)


def efficiency(lengths, walks):
    """Ideal time over the slowest group's, in %."""
    ideal = sum(-(-n // UNIT_TOKENS) + ITEM_UNITS for n in lengths) / len(walks)
    return 100 * ideal / slowest_group(walks)


def check_plan(lengths, groups):
    """Everything that the decode and the combine kernel rely on."""
    seq_lens, counts, work, walks = make_plan(lengths, groups)
    assert counts.dtype == work.dtype == torch.int32
    assert counts.shape == (plan.COUNTS_LEN,)
    assert work.shape == (plan.work_len(groups),)
    units = [-(-max(n, 0) // UNIT_TOKENS) for n in lengths]
    assert counts[1] == len(lengths)

    bounds = work[: 2 * (groups + 1)].view(-1, 2).tolist()
    assert bounds[0] == [0, 0]
    assert bounds[-1] == [len(lengths), 0]
    assert bounds == sorted(bounds)
    for request, unit in bounds:
        assert unit == 0 or 0 < unit < units[request], "boundary is not normalised"

    parts: dict[int, list] = {request: [] for request in range(len(lengths))}
    for group, walk in enumerate(walks):
        for segment in walk:
            parts[segment.request].append((group, segment))
    expected_splits = []
    slots_seen: set[int] = set()
    for request, pieces in parts.items():
        edge = 0
        for _, segment in pieces:
            assert segment.unit_begin == edge, "a gap or an overlap in the KV"
            assert segment.unit_end > edge or units[request] == 0
            edge = segment.unit_end
        assert edge == units[request]
        if len(pieces) == 1:
            assert pieces[0][1].slot == -1
            continue
        assert pieces, "a request that no group visits"
        shortest = min(s.unit_end - s.unit_begin for _, s in pieces)
        assert shortest >= min(plan.MIN_TIGHT_PIECE_UNITS, units[request])
        if counts[3] != 0:
            assert shortest >= plan.MIN_PIECE_UNITS
        first, last = pieces[0][0], pieces[-1][0]
        assert [group for group, _ in pieces] == list(range(first, last + 1))
        slots = [segment.slot for _, segment in pieces]
        assert slots == [2 * first + 1] + [2 * g for g in range(first + 1, last + 1)]
        assert slots == plan.slots_of_split(first, last)
        assert not slots_seen & set(slots), "two partials in one slot"
        slots_seen |= set(slots)
        expected_splits.append((request, first, last))
    assert all(0 <= slot < plan.partial_slots(groups) for slot in slots_seen)
    assert plan.split_list(work, counts, groups) == expected_splits
    assert counts[0] == len(expected_splits)
    used = plan.split_list_offset(groups) + 3 * len(expected_splits)
    assert (work[used:] == -1).all()
    return walks, counts


@pytest.mark.parametrize("groups", [66, 132])
@pytest.mark.parametrize("name", BATCHES)
def test_balance(name, groups):
    lengths, least_66, least_132 = BATCHES[name]
    walks, _ = check_plan(lengths, groups)
    assert efficiency(lengths, walks) >= (least_66 if groups == 66 else least_132)


@pytest.mark.parametrize("tokens", [512, 1024, 8192, 32768])
def test_equal_requests_stay_whole(tokens):
    _, counts = check_plan([tokens] * 64, 66)
    assert counts[0] == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 60, 64, 66, 67, 200, 1023, 1024, 4096])
@pytest.mark.parametrize("groups", [1, 2, 7, 66, 132, 255])
def test_random_lengths(batch, groups):
    rng = random.Random(batch * 1000 + groups)
    for longest in (1, 130, 3000, 40000):
        check_plan([rng.randint(0, longest) for _ in range(batch)], groups)
        if batch >= 1000:
            break


def test_many_random_shapes():
    rng = random.Random(7)
    for _ in range(400):
        batch = rng.choice((1, 2, 3, rng.randint(1, 40), rng.randint(1, 150)))
        groups = rng.choice((1, 2, 3, 16, 33, 66, 78, 132))
        longest = int(2 ** rng.uniform(0, 18))
        lengths = [rng.randint(0, longest) for _ in range(batch)]
        if rng.random() < 0.3:
            lengths[rng.randrange(batch)] = 1 << 20
        if rng.random() < 0.3:
            lengths += [0] * rng.randint(1, 60)
        check_plan(lengths, groups)


@pytest.mark.parametrize("groups", [1, 66, 132])
@pytest.mark.parametrize("batch", [1, 64, 1024])
def test_all_lengths_zero(batch, groups):
    walks, counts = check_plan([0] * batch, groups)
    assert counts.tolist()[:3] == [0, batch, 0]
    longest = max(len(walk) for walk in walks)
    assert longest <= -(-batch // groups) * 4, "one group clears most of the batch"


@pytest.mark.parametrize("live", [1, 5, 40, 64])
def test_padded_tail_costs_little(live):
    """Padded requests of length 0 must not land on the groups that carry the KV."""
    lengths = [8192] * live
    alone = slowest_group(check_plan(lengths, 66)[0])
    empty = 128 - live
    padded = slowest_group(check_plan(lengths + [0] * empty, 66)[0])
    assert padded <= alone + 2 * empty * EMPTY_UNITS / 66


def test_negative_length_is_zero():
    lengths = [5000, -3, 900, -(2**31), 0]
    positive = [max(n, 0) for n in lengths]
    check_plan(lengths, 66)
    for got, want in zip(make_plan(lengths, 66)[1:3], make_plan(positive, 66)[1:3]):
        assert torch.equal(got, want)


def test_huge_lengths_do_not_overflow():
    lengths = [2**31 - 1] * plan.MAX_REQUESTS
    _, counts = check_plan(lengths, 132)
    assert counts[2] == plan.MAX_REQUESTS * plan.MAX_REQUEST_UNITS
    line = plan._Line(lengths, 132)
    assert line.total < 2**31


def test_more_groups_never_hurt_much():
    """A single request gets faster with the number of groups that it can use."""
    slowest = [
        100 / efficiency([1 << 20], check_plan([1 << 20], groups)[0]) / groups
        for groups in (1, 2, 4, 8, 16, 33, 66, 132)
    ]
    assert slowest == sorted(slowest, reverse=True)


def test_layout_of_a_small_plan():
    """Numbers worked out by hand: 2 groups, 100 units in one request, 1 in the next."""
    seq_lens, counts, work, walks = make_plan([12800, 5], 2)
    # Line: 4 * 100 + 8 = 408, then 4 + 8 = 12, total 420; half is 210, minus half the
    # fixed cost is 206, which is unit 52.
    assert work.tolist() == [0, 0, 0, 52, 2, 0, 0, 0, 1, -1, -1, -1]
    assert counts.tolist()[:3] == [1, 2, 101]
    assert walks == [
        [plan.Segment(0, 0, 52, 1)],
        [plan.Segment(0, 52, 100, 2), plan.Segment(1, 0, 1, -1)],
    ]


@pytest.mark.parametrize("name", BATCHES)
def test_scored_cost_is_the_time_of_the_walk(name):
    """The cost that candidates are compared by is what the groups really do."""
    lengths = BATCHES[name][0] + [0, 0, 0]
    _, _, work, walks = make_plan(lengths, 66)
    bounds = [tuple(pair) for pair in work[: 2 * 67].view(-1, 2).tolist()]
    line = plan._Line(lengths, 66)
    for walk, begin, end in zip(walks, bounds, bounds[1:]):
        cost, partials = line.group_cost(begin, end)
        assert cost == plan.COST_SCALE * sum(segment_time(s) for s in walk)
        assert partials == sum(s.slot >= 0 for s in walk)


def test_even_pieces_leave_the_empty_tail_to_idle_groups():
    """5 requests x 4 pieces on 22 groups: the last 2 groups share 10 empty ones."""
    line = plan._Line([8192] * 5 + [0] * 10, 22)
    bounds = line.candidate(plan.EVEN_CANDIDATE)
    assert bounds is not None
    assert bounds[:5] == [(0, 0), (0, 16), (0, 32), (0, 48), (1, 0)]
    assert bounds[20:] == [(5, 0), (10, 0), (15, 0)]


def test_plan_depends_on_lengths_only():
    lengths = BATCHES["256-lognormal-8k"][0]
    first = make_plan(lengths, 66)[1:3]
    again = make_plan(lengths, 66)[1:3]
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize(
    "batch, groups, message",
    [
        (plan.MAX_REQUESTS + 1, 66, "max_num_seqs"),
        (4, 0, "allowed are 1"),
        (4, plan.MAX_GROUPS + 1, "allowed are 1"),
    ],
)
def test_refuses_sizes_it_cannot_hold(batch, groups, message):
    with pytest.raises(ValueError, match=message):
        plan.plan_reference(torch.ones(batch, dtype=torch.int32), groups)


def test_segments_refuse_another_batch():
    seq_lens, counts, work, _ = make_plan([1000, 2000], 4)
    with pytest.raises(ValueError, match="for 2 requests"):
        plan.segments(work, counts, seq_lens[:1], 4)
