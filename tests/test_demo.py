# SPDX-License-Identifier: Apache-2.0
"""The main job's parts: lengths, the split reference, loads and pictures."""

import argparse
import math

import pytest

torch = pytest.importorskip("torch", reason="the main job needs torch")

from kvdemo.batch import Batch, parse_lengths  # noqa: E402
from kvdemo.picture import (  # noqa: E402
    bar_chart,
    evenness,
    save_png,
    whole_request_loads,
)
from kvdemo.reference import ErrorSum, attend, merge  # noqa: E402
from kvdemo.work import Work, check_cover, decode  # noqa: E402


def test_lengths():
    assert parse_lengths("7,3x2, 0") == [7, 3, 3, 0]


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "1x", "99999999", "1x5000", "a"])
def test_bad_lengths(text):
    if text == "1x":  # an empty count reads as one
        assert parse_lengths(text) == [1]
        return
    with pytest.raises(argparse.ArgumentTypeError):
        parse_lengths(text)


def naive(batch, request):
    """Softmax over all of a request's visible tokens at once, in float64."""
    q, kv = batch.query(request).double(), batch.cache(request).double()
    out = torch.zeros(batch.qlen, batch.heads, 512, dtype=torch.float64)
    lse = torch.full((batch.qlen, batch.heads), -math.inf, dtype=torch.float64)
    for j in range(batch.qlen):
        last = len(kv) - batch.qlen + 1 + j if batch.causal else len(kv)
        if last > 0:
            scores = q[j] @ kv[:last].T * (192**-0.5)
            lse[j] = scores.logsumexp(-1) / math.log(2)
            out[j] = scores.softmax(-1) @ kv[:last, :512]
    return out, lse


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 70, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_attend_and_merge_against_one_softmax(length, causal):
    batch = Batch([length], heads=2, qlen=4, causal=causal)
    cache = batch.cache(0)
    cuts = [0, length // 3, length // 2, length]
    parts = [
        attend(batch, 0, cache, a, b, torch.float64) for a, b in zip(cuts, cuts[1:])
    ]
    got = merge(parts)
    out, lse = naive(batch, 0)
    torch.testing.assert_close(got.out, out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.lse_log2, lse, rtol=1e-9, atol=1e-9)


def made_work(lengths, cuts):
    """A plan of one worker for each piece."""
    segments, splits, slot = [], [], 0
    for request, (length, at) in enumerate(zip(lengths, cuts)):
        ends = [*at, length]
        slots = []
        for begin, end in zip([0, *at], ends):
            segments.append([(request, begin, end, slot if at else -1)])
            slots.append(slot)
            slot += 1
        if at:
            splits.append((request, slots))
    return Work(len(segments), 1, segments, splits)


def test_decode_follows_the_work_list():
    batch = Batch([50, 0, 9], heads=2, qlen=3, causal=True)
    work = made_work(batch.lengths, [[10, 30], [], []])
    check_cover(work, batch.lengths)
    seen = []
    errors, partials = decode(batch, work, lambda done, total: seen.append(done))
    assert partials == 3 and seen == [50, 50, 59]
    assert errors.result().out < 1e-6 and errors.result().lse_log2 < 1e-5


def test_decode_notices_a_wrong_merge():
    batch = Batch([50], heads=2, qlen=3, causal=True)
    work = made_work(batch.lengths, [[10, 30]])
    work.splits = [(0, [0, 1])]
    errors, _ = decode(batch, work, lambda done, total: None)
    assert errors.result().out > 1e-3


def test_cover_notices_missed_tokens():
    work = made_work([50], [[10]])
    work.segments[1] = [(0, 11, 50, 1)]
    with pytest.raises(AssertionError):
        check_cover(work, [50])


def test_error_sum_holds_rows_that_see_nothing_to_zero():
    batch = Batch([0], heads=1, qlen=1, causal=True)
    want = attend(batch, 0, batch.cache(0), 0, 0, torch.float64)
    got = attend(batch, 0, batch.cache(0), 0, 0, torch.float32)
    errors = ErrorSum()
    errors.add(got, want)
    assert errors.result().out == 0
    got.out += 1
    errors.add(got, want)
    assert errors.result().out == math.inf


def test_loads_and_evenness():
    assert whole_request_loads([8, 4, 4, 1], 2) == [9, 8]
    assert evenness([4, 4]) == 1 and evenness([8, 0]) == 0.5 and evenness([0]) == 1


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    work = made_work([50, 0, 9], [[10, 30], [], []])
    chart = bar_chart(work)
    assert chart.count("worker") == 5 and "20 tokens" in chart
    save_png(work, [50, 0, 9], "title", tmp_path / "new" / "p.png")
    assert (tmp_path / "new/p.png").read_bytes()[:4] == b"\x89PNG"
