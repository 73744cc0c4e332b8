# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``KIMI_K3_KV_BALANCED_MLA`` with adaptive verification.

The device trims the query lengths; the host has the right total and an even split.
Every expected value comes from the device's lengths, request by request.
"""

import math

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from tests.v1.attention.test_kimi_k3_kv_balanced_mla_builder import (
    common,
    layer,
    make_builder,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.worker import workspace

pytestmark = pytest.mark.skip_global_cleanup

HEADS = 4
LONGEST = 8


@pytest.fixture(autouse=True)
def _workspace():
    workspace.init_workspace_manager(utils.CPU)
    with utils.small_tensors():
        yield
    workspace.reset_workspace_manager()


@pytest.fixture
def core(monkeypatch):
    return utils.install_fake_core(monkeypatch)


@pytest.fixture
def impl(core):
    return utils.make_impl(utils.make_config(speculative=7, adaptive=True))


def starts_of(query_lens, requests, tokens):
    """``query_start_loc`` as the runner pads it: requests without tokens at the end."""
    starts = torch.full((requests + 1,), tokens, dtype=torch.int32)
    starts[0] = 0
    ends = torch.tensor(query_lens).cumsum(0).to(torch.int32)
    starts[1 : len(query_lens) + 1] = ends
    starts[len(query_lens) + 1 :] = ends[-1]
    return starts


def trimmed_metadata(query_lens, seq_lens, table, *, tokens=None, causal_lens=None):
    """Metadata of a step whose lengths are the device's; padding has length 0."""
    requests = len(seq_lens)
    metadata = utils.make_metadata(seq_lens, LONGEST, table, causal_lens=causal_lens)
    total = sum(query_lens) if tokens is None else tokens
    metadata.num_actual_tokens = metadata.num_decode_tokens = total
    metadata.decode.query_start_loc = starts_of(query_lens, requests, total)
    return metadata


def reference(
    q, cache, table, query_lens, seq_lens, scale, *, totals=None, cp=(1, 0, 1)
):
    """Each request on its own, with its own query length."""
    outs, lses, start = [], [], 0
    for r, qlen in enumerate(query_lens):
        out, lse = utils.reference_decode(
            q[start : start + qlen],
            cache,
            table[r : r + 1],
            [seq_lens[r]],
            scale,
            causal_lens=None if totals is None else [totals[r]],
            cp=cp,
        )
        outs.append(out)
        lses.append(lse)
        start += qlen
    return torch.cat(outs), torch.cat(lses)


def check(out, expected, tokens):
    live = expected.shape[0]
    assert out.shape[0] == tokens
    torch.testing.assert_close(out[:live].float(), expected, rtol=0.01, atol=0.01)
    assert torch.all(out[live:] == 0)


STEPS = [
    ([8, 2, 6, 4], [200, 64, 129, 65]),
    ([1, 8, 1, 1], [70, 8, 1, 300]),
    ([3, 3], [100, 7]),
    ([5], [5]),
    ([8, 8, 8], [100, 9, 64]),
]


@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
@pytest.mark.parametrize("padding", [0, 3])
def test_trimmed_step_matches_each_request_alone(impl, query_lens, seq_lens, padding):
    """With and without the requests and tokens that pad a graph."""
    lengths = seq_lens + [0] * padding
    cache, table = utils.make_cache(lengths)
    tokens = sum(query_lens) + 5 * padding
    q = utils.make_query(tokens, HEADS)
    metadata = trimmed_metadata(query_lens, lengths, table, tokens=tokens)
    out, lse = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    assert lse is None
    expected, _ = reference(q, cache, table, query_lens, seq_lens, impl.scale)
    check(out, expected, tokens)


def test_random_steps(impl):
    generator = torch.Generator().manual_seed(5)
    for number in range(20):
        requests = int(torch.randint(1, 9, (1,), generator=generator))
        query_lens = torch.randint(1, 9, (requests,), generator=generator).tolist()
        seq_lens = [
            q + int(torch.randint(0, 150, (1,), generator=generator))
            for q in query_lens
        ]
        cache, table = utils.make_cache(seq_lens, seed=number)
        q = utils.make_query(sum(query_lens), HEADS, seed=number)
        metadata = trimmed_metadata(query_lens, seq_lens, table)
        out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
        expected, _ = reference(q, cache, table, query_lens, seq_lens, impl.scale)
        check(out, expected, sum(query_lens))


@pytest.mark.parametrize("interleave", [1, 16])
def test_under_dcp_each_token_keeps_its_own_bound(core, interleave):
    """Local lengths, global bounds, and the LSE that ranks are merged by."""
    world = 2
    config = utils.make_config(speculative=7, adaptive=True, dcp=world)
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    impl = utils.make_impl(config, num_heads=2)
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = world, True
    query_lens, totals = [2, 8, 5], [33, 150, 5]
    q = utils.make_query(sum(query_lens) + 2, 2 * world)
    for rank in range(world):
        impl.dcp_rank = rank
        local = get_dcp_local_seq_lens(
            torch.tensor(totals), world, rank, interleave
        ).tolist()
        cache, table = utils.make_cache(local, seed=rank)
        metadata = trimmed_metadata(
            query_lens, local, table, tokens=q.shape[0], causal_lens=totals
        )
        out, lse = impl.forward_mqa(q, cache, metadata, utils.make_layer())
        expected, expected_lse = reference(
            q,
            cache,
            table,
            query_lens,
            local,
            impl.scale,
            totals=totals,
            cp=(world, rank, interleave),
        )
        check(out, expected, q.shape[0])
        live = expected.shape[0]
        torch.testing.assert_close(lse[:live], expected_lse, rtol=1e-4, atol=1e-4)
        assert torch.all(lse[live:] == -math.inf)


def test_same_buffers_with_other_lengths(impl, core):
    """What a graph replays: one shape, new contents, one plan a forward."""
    config = utils.make_config(speculative=7)
    cache, table = utils.make_cache([200, 200, 200])
    q = utils.make_query(9, HEADS)
    seq_lens = torch.zeros(3, dtype=torch.int32)
    metadata = trimmed_metadata([9], [0, 0, 0], table)
    metadata.decode.seq_lens = seq_lens
    for number, (query_lens, lengths) in enumerate(
        [([8, 1], [100, 9]), ([1, 2, 6], [20, 200, 64]), ([3], [3])], 1
    ):
        seq_lens.zero_()
        seq_lens[: len(lengths)] = torch.tensor(lengths)
        metadata.decode.query_start_loc.copy_(starts_of(query_lens, 3, 9))
        with utils.forward(config):
            for _ in range(2):
                out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
        assert core.count("plan") == number
        expected, _ = reference(q, cache, table, query_lens, lengths, impl.scale)
        check(out, expected, 9)


def test_other_trimming_in_one_forward_plans_again(impl, core):
    cache, table = utils.make_cache([200, 100])
    lengths = torch.tensor([200, 100], dtype=torch.int32)
    with utils.forward(utils.make_config()):
        for number, query_lens in enumerate(([8, 1], [1, 8], [2, 8]), 1):
            q = utils.make_query(sum(query_lens), HEADS)
            metadata = trimmed_metadata(query_lens, [200, 100], table)
            metadata.decode.seq_lens = lengths
            out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
            expected, _ = reference(q, cache, table, query_lens, [200, 100], impl.scale)
            check(out, expected, q.shape[0])
            assert core.count("plan") == number


def test_nothing_is_allocated_from_the_workspace_after_the_lock(impl):
    workspace.lock_workspace()
    cache, table = utils.make_cache([200] * 16)
    query_lens = [8, 1] * 8
    q = utils.make_query(sum(query_lens), HEADS)
    metadata = trimmed_metadata(query_lens, [200] * 16, table)
    out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    assert torch.all(torch.isfinite(out))


def test_a_layer_without_buffers_for_it_refuses(core):
    for options in (dict(), dict(adaptive=True, non_causal=True)):
        impl = utils.make_impl(utils.make_config(speculative=7, **options))
        cache, table = utils.make_cache([20, 20])
        metadata = trimmed_metadata([3, 1], [20, 20], table)
        with pytest.raises(ValueError, match="enable_adaptive_verification"):
            impl.forward_mqa(utils.make_query(4, HEADS), cache, metadata, None)


# --- the builder ------------------------------------------------------------------


def adaptive_builder(**options):
    builder = make_builder(adaptive=True, **options)
    assert builder.reorder_batch_threshold == LONGEST
    return builder


def test_the_hosts_split_is_not_believed(impl):
    """Host 5, 5, 5, 5; device 8, 2, 6, 4."""
    seq_lens = [200, 64, 129, 65]
    cache, table = utils.make_cache(seq_lens)
    batch = common([5, 5, 5, 5], seq_lens, table=table)
    batch.max_query_len = LONGEST
    batch.query_start_loc = starts_of([8, 2, 6, 4], 4, 20)
    metadata = adaptive_builder().build(0, batch)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 20)
    assert metadata.decode.query_len == LONGEST
    q = utils.make_query(20, HEADS)
    out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    expected, _ = reference(q, cache, table, [8, 2, 6, 4], seq_lens, impl.scale)
    check(out, expected, 20)


def test_lengths_that_the_total_fixes_run_as_uniform():
    builder = adaptive_builder()
    for query_lens, qlen in (([1, 1, 1], 1), ([8, 8, 8], 8), ([8, 8, 0], 8)):
        metadata = builder.build(0, common(query_lens, [90, 20, 30]))
        assert metadata.decode.query_start_loc is None
        assert metadata.decode.query_len == qlen


def test_uneven_hosts_lengths_stay_decodes_and_prefills_follow():
    batch = common([5, 5, 4, 4, 300], [100, 70, 64, 90, 300])
    metadata = adaptive_builder().build(0, batch)
    assert (metadata.num_decodes, metadata.num_prefills) == (4, 1)
    assert metadata.decode.query_start_loc.tolist() == [0, 5, 10, 14, 18]


def test_a_capture_takes_any_lengths():
    builder = adaptive_builder()
    metadata = builder.build_for_cudagraph_capture(common([1] * 4, [1] * 4))
    assert metadata.decode.query_start_loc is not None
    assert metadata.decode.query_len == LONGEST
    # The next step is no capture.
    assert builder.build(0, common([1, 1], [9, 9])).decode.query_start_loc is None


def test_a_draft_is_never_trimmed():
    builder = make_builder(adaptive=True, layers={"draft": layer(non_causal=True)})
    metadata = builder.build(0, common([7, 7], [90, 20], causal=False))
    assert metadata.decode.query_start_loc is None
    assert metadata.decode.query_len == 7


def test_capturing_fills_the_maps_in_the_graph(impl, core, monkeypatch):
    """An eager run of the same forward before it must not stand in for them."""
    cache, table = utils.make_cache([20, 20])
    metadata = trimmed_metadata([3, 1], [20, 20], table)
    q = utils.make_query(4, HEADS)
    with utils.forward(utils.make_config()):
        impl.forward_mqa(q, cache, metadata, utils.make_layer())
        buffers, _, _ = impl.decode._buffers()
        buffers.rows.row_of_token.zero_()
        monkeypatch.setattr(decode_module, "_is_capturing", lambda: True)
        out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    expected, _ = reference(q, cache, table, [3, 1], [20, 20], impl.scale)
    check(out, expected, 4)
