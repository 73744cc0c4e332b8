# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``KIMI_K3_KV_BALANCED_MLA`` decode through the real impl and workspace manager.

The kernel is a CPU stand-in that reads its lengths from the plan; everything between
vLLM and the kernel is the real code.
"""

import math
import threading

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops.dcp import _lse_weighted_combine
from vllm.v1.worker import ubatching, workspace

pytestmark = pytest.mark.skip_global_cleanup

LENGTHS = [0, 1, 3, 63, 64, 65, 129, 500]


@pytest.fixture(autouse=True)
def _workspace():
    workspace.init_workspace_manager(utils.CPU, num_ubatches=1, num_lanes=2)
    with utils.small_tensors():
        yield
    workspace.reset_workspace_manager()


@pytest.fixture
def core(monkeypatch):
    return utils.install_fake_core(monkeypatch)


def run(impl, config, lengths, qlen, *, scales=(1.0, 1.0), causal=True, seed=0):
    cache, table = utils.make_cache(lengths, seed=seed)
    q = utils.make_query(len(lengths) * qlen, impl.decode.heads, seed=seed + 1)
    metadata = utils.make_metadata(lengths, qlen, table, causal=causal)
    with utils.forward(config):
        out, lse = impl.forward_mqa(q, cache, metadata, utils.make_layer(*scales))
    score_scale = impl.scale * scales[0] * scales[1]
    expected, expected_lse = utils.reference_decode(
        q, cache, table, lengths, score_scale, causal=causal
    )
    return out, lse, expected * scales[1], expected_lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("qlen", [1, 5, 8])
def test_matches_reference(core, qlen, causal):
    config = utils.make_config(speculative=7)
    impl = utils.make_impl(config)
    out, lse, expected, _ = run(impl, config, LENGTHS, qlen, causal=causal)
    assert lse is None
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0), (2.0, 0.25), (1.0, 4.0)])
def test_scales_reach_scores_and_output(core, scales):
    config = utils.make_config()
    impl = utils.make_impl(config)
    out, _, expected, _ = run(impl, config, [70, 200], 1, scales=scales)
    torch.testing.assert_close(
        out.float(), expected, rtol=0.01, atol=0.01 * max(scales[1], 1)
    )
    assert core.log[-1][1:3] == (
        pytest.approx(impl.scale * scales[0] * scales[1]),
        scales[1],
    )


def test_scale_changed_after_the_first_step_is_used(core):
    config = utils.make_config()
    impl = utils.make_impl(config)
    for scales in ((1.0, 1.0), (1.0, 4.0)):
        out, _, expected, _ = run(impl, config, [100], 1, scales=scales)
        torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.05)


def test_more_query_tokens_than_kv_gives_zero_and_minus_infinity(core):
    config = utils.make_config(speculative=7)
    impl = utils.make_impl(config)
    impl.need_to_return_lse_for_decode = True
    out, lse, expected, expected_lse = run(impl, config, [3, 70, 0], 8)
    assert torch.all(out[:5] == 0) and torch.all(lse[:5] == -math.inf)
    assert torch.all(out[16:] == 0) and torch.all(lse[16:] == -math.inf)
    assert torch.all(torch.isfinite(lse[5:16])) and torch.all(torch.isfinite(out))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_graph_padding_has_length_zero_and_stale_block_ids(core):
    config = utils.make_config()
    impl = utils.make_impl(config)
    out, _, expected, _ = run(impl, config, [65, 129, 513, 0], 1)
    assert torch.all(torch.isfinite(out)) and torch.all(out[3] == 0)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


def test_padded_block_stride(core):
    config = utils.make_config()
    impl = utils.make_impl(config)
    lengths = [100, 64]
    cache, table = utils.make_cache(lengths, block=128, stride=128 * utils.HEAD + 4096)
    assert not cache.is_contiguous()
    q = utils.make_query(2, impl.decode.heads)
    metadata = utils.make_metadata(lengths, 1, table)
    out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    expected, _ = utils.reference_decode(q, cache, table, lengths, impl.scale)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


# --- decode context parallelism ---------------------------------------------------


def shard(cache, table, length, world, rank, interleave):
    """Rows of one request that a rank holds, in order."""
    rows = utils.gather(cache, table, length)
    position = torch.arange(length)
    return rows[(position // interleave) % world == rank]


@pytest.mark.parametrize("qlen", [1, 5, 8])
@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_dcp_shards_merge_to_the_whole(core, world, interleave, qlen):
    """Rank by rank, then vLLM's own combine, against the unsharded reference."""
    config = utils.make_config(speculative=7, dcp=world)
    totals = [0, 3, world * interleave - 1, world * interleave + 1, 300]
    full, table = utils.make_cache(totals, seed=3)
    heads = 2
    q = utils.make_query(len(totals) * qlen, heads * world, seed=4)
    # Built with another interleave size: disaggregation settles it afterwards.
    config.parallel_config.cp_kv_cache_interleave_size = 1
    impl = utils.make_impl(config, num_heads=heads)
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    assert not impl.lse_base_on_e
    outs, lses = [], []
    for rank in range(world):
        impl.dcp_world_size, impl.dcp_rank = world, rank
        impl.need_to_return_lse_for_decode = True
        local = get_dcp_local_seq_lens(
            torch.tensor(totals), world, rank, interleave
        ).tolist()
        blocks = [-(-n // utils.BLOCK) for n in local]
        cache = torch.full((sum(blocks) + 1, utils.BLOCK, utils.HEAD), float("nan")).to(
            utils.FP8
        )
        local_table = torch.full((len(totals), max(blocks) + 1), 1 << 30)
        local_table = local_table.to(torch.int32)
        page = 1
        for r, total in enumerate(totals):
            rows = shard(full, table[r], total, world, rank, interleave)
            assert rows.shape[0] == local[r]
            for b in range(blocks[r]):
                part = rows[b * utils.BLOCK : (b + 1) * utils.BLOCK]
                cache[page, : part.shape[0]] = part.to(utils.FP8)
                local_table[r, b] = page
                page += 1
        metadata = utils.make_metadata(local, qlen, local_table, causal_lens=totals)
        out, lse = impl.forward_mqa(q, cache, metadata, utils.make_layer())
        empty = torch.tensor(local).repeat_interleave(qlen) == 0
        assert torch.all(out[empty] == 0) and torch.all(lse[empty] == -math.inf)
        outs.append(out.float())
        lses.append(lse)
    merged = _lse_weighted_combine(
        torch.stack(outs), torch.stack(lses), is_lse_base_on_e=impl.lse_base_on_e
    )
    expected, _ = utils.reference_decode(q, full, table, totals, impl.scale)
    torch.testing.assert_close(merged, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("world", "rank", "interleave", "bounds", "seen"),
    [
        (2, 1, 1, [8, 9, 10], [4, 4, 5]),
        (8, 0, 64, range(508, 516), [64, 64, 64, 64, 64, 65, 66, 67]),
        (8, 7, 64, range(508, 516), [60, 61, 62, 63, 64, 64, 64, 64]),
        (4, 0, 1, range(9, 17), [3, 3, 3, 3, 4, 4, 4, 4]),
    ],
)
def test_local_bound_comes_from_each_tokens_global_bound(
    core, world, rank, interleave, bounds, seen
):
    bounds = list(bounds)
    qlen, total = len(bounds), bounds[-1]
    config = utils.make_config(speculative=qlen - 1, dcp=world)
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    impl = utils.make_impl(config, num_heads=1, rank=rank)
    impl.dcp_world_size = world
    impl.need_to_return_lse_for_decode = True
    local = int(get_dcp_local_seq_lens(torch.tensor([total]), world, rank, interleave))
    # All keys alike: the LSE is the logarithm of the number of visible entries.
    cache = torch.zeros(4, utils.BLOCK, utils.HEAD).to(utils.FP8)
    table = torch.arange(4, dtype=torch.int32)[None]
    q = utils.make_query(qlen, world)
    metadata = utils.make_metadata([local], qlen, table, causal_lens=[total])
    _, lse = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    assert torch.round(torch.exp2(lse[:, 0])).int().tolist() == seen


def test_planned_heads_are_those_of_all_dcp_ranks(core):
    impl = utils.make_impl(utils.make_config(dcp=4), num_heads=3)
    assert impl.decode.heads == 12


def test_draft_reads_the_interleave_size_of_the_targets_config(core):
    """A draft is built with a copy of the parallel config that nobody updates."""
    config = utils.make_config(speculative=7, dcp=2, non_causal=True)
    engine = utils.make_config().parallel_config
    config.speculative_config.target_parallel_config = engine
    impl = utils.make_impl(config, num_heads=2)
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = 2, True
    engine.cp_kv_cache_interleave_size = 64
    cache, table = utils.make_cache([64])
    metadata = utils.make_metadata([64], 8, table, causal=False, causal_lens=[128])
    impl.forward_mqa(utils.make_query(8, 4), cache, metadata, utils.make_layer())
    assert core.log[-1][3] == (2, 0, 64)


# --- one plan per forward ---------------------------------------------------------


def step(impl, config, metadata, cache, qlen, *, layers=1):
    q = utils.make_query(qlen * metadata.num_decodes, impl.decode.heads)
    with utils.forward(config):
        for _ in range(layers):
            out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    return out, q


def test_one_plan_for_all_layers_of_a_forward(core):
    config = utils.make_config()
    impls = [utils.make_impl(config) for _ in range(24)]
    cache, table = utils.make_cache([100, 200])
    metadata = utils.make_metadata([100, 200], 1, table)
    q = utils.make_query(2, 4)
    for number in (1, 2, 3):
        with utils.forward(config):
            for impl in impls:
                impl.forward_mqa(q, cache, metadata, utils.make_layer())
        assert core.count("plan") == number
    assert core.count("build") == 1


def test_calls_outside_a_forward_always_plan(core):
    config = utils.make_config()
    impl = utils.make_impl(config)
    cache, table = utils.make_cache([100])
    metadata = utils.make_metadata([100], 1, table)
    for _ in range(3):
        impl.forward_mqa(utils.make_query(1, 4), cache, metadata, utils.make_layer())
    assert core.count("plan") == 3


def test_same_buffers_with_new_lengths(core):
    """Lengths 64 -> 200 -> 64 in one buffer: results follow, addresses stay."""
    config = utils.make_config()
    impl = utils.make_impl(config)
    cache, table = utils.make_cache([200])
    seq_lens = torch.zeros(1, dtype=torch.int32)
    pointers = set()
    for length in (64, 200, 64):
        seq_lens.fill_(length)
        metadata = utils.make_metadata([length], 1, table, seq_lens=seq_lens)
        out, q = step(impl, config, metadata, cache, 1, layers=2)
        expected, _ = utils.reference_decode(q, cache, table, [length], impl.scale)
        torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
        buffers, scratch, _ = impl.decode._buffers()
        pointers.add(
            (buffers.counts.data_ptr(), buffers.work.data_ptr(), scratch.data_ptr())
        )
    assert core.count("plan") == 3 and len(pointers) == 1


def test_other_lengths_or_another_kernel_in_one_forward_plan_again(core):
    config = utils.make_config(speculative=7)
    impl = utils.make_impl(config)
    cache, table = utils.make_cache([200])
    shared = torch.tensor([100], dtype=torch.int32)
    cases = [
        utils.make_metadata([200], 8, table),
        utils.make_metadata([100], 8, table, seq_lens=shared),
        utils.make_metadata([100], 8, table, seq_lens=shared, causal=False),
        utils.make_metadata([100], 1, table, seq_lens=shared),
        utils.make_metadata([200], 8, table),
    ]
    with utils.forward(config):
        for number, metadata in enumerate(cases, 1):
            qlen = metadata.max_query_len
            length = int(metadata.decode.seq_lens[0])
            q = utils.make_query(qlen, 4, seed=number)
            out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
            expected, _ = utils.reference_decode(
                q, cache, table, [length], impl.scale, causal=metadata.causal
            )
            torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
            assert core.count("plan") == number


def test_capture_plans_even_after_the_same_forward_ran_eagerly(core, monkeypatch):
    config = utils.make_config()
    impl = utils.make_impl(config)
    cache, table = utils.make_cache([100])
    metadata = utils.make_metadata([100], 1, table)
    q = utils.make_query(1, 4)
    with utils.forward(config):
        impl.forward_mqa(q, cache, metadata, utils.make_layer())
        monkeypatch.setattr(decode_module, "_is_capturing", lambda: True)
        impl.forward_mqa(q, cache, metadata, utils.make_layer())
        impl.forward_mqa(q, cache, metadata, utils.make_layer())
    assert core.count("plan") == 2


def test_target_draft_target(core):
    """Two lanes, interleaved inside one step: each keeps its own plan."""
    config = utils.make_config(speculative=7)
    draft_config = utils.make_config(speculative=7, non_causal=True)
    target = utils.make_impl(config)
    with workspace.use_workspace_lane(1):
        draft = utils.make_impl(draft_config)
    cache, table = utils.make_cache([200, 90])
    verify = utils.make_metadata([200, 90], 8, table)
    block = utils.make_metadata([150, 40], 7, table, causal=False)
    with utils.forward(config):
        step_q = utils.make_query(16, 4)
        first, _ = target.forward_mqa(step_q, cache, verify, utils.make_layer())
        with workspace.use_workspace_lane(1):
            q = utils.make_query(14, 4)
            out, _ = draft.forward_mqa(q, cache, block, utils.make_layer())
        again, _ = target.forward_mqa(step_q, cache, verify, utils.make_layer())
    assert core.count("plan") == 2
    assert torch.equal(first, again)
    expected, _ = utils.reference_decode(
        q, cache, table, [150, 40], draft.scale, causal=False
    )
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


# --- workspace --------------------------------------------------------------------


def test_nothing_is_allocated_after_the_lock(core):
    config = utils.make_config(speculative=7)
    impl = utils.make_impl(config)
    manager = workspace.current_workspace_manager()
    sizes = [0 if w is None else w.numel() for w in manager._current_workspaces]
    keys = [set(r) for r in manager._persistent_resources]
    workspace.lock_workspace()
    for lengths, qlen in (([500], 8), ([1] * 16, 8), ([64, 0], 1)):
        run(impl, config, lengths, qlen)
    assert sizes == [0 if w is None else w.numel() for w in manager._current_workspaces]
    assert keys == [set(r) for r in manager._persistent_resources]
    assert sizes[0] >= core.workspace_bytes(4, 8, 16)


@pytest.mark.parametrize("locked", [False, True])
def test_a_lane_that_was_not_reserved_raises(core, locked):
    config = utils.make_config()
    impl = utils.make_impl(config)
    cache, table = utils.make_cache([10])
    metadata = utils.make_metadata([10], 1, table)
    if locked:
        workspace.lock_workspace()
    with (
        workspace.use_workspace_lane(1),
        pytest.raises((ValueError, AssertionError), match=r"reserved no|not allocated"),
    ):
        impl.forward_mqa(utils.make_query(1, 4), cache, metadata, utils.make_layer())


def test_every_ubatch_has_its_own_buffers_and_plan(core):
    workspace.init_workspace_manager(utils.CPU, num_ubatches=2)
    config = utils.make_config(dbo=True)
    impl = utils.make_impl(config)
    assert ubatching._THREAD_ID_TO_CONTEXT == {}
    workspace.lock_workspace()
    cache, table = utils.make_cache([200, 90])
    turns = [threading.Event() for _ in range(4)]
    results, errors = {}, []

    def ubatch(number, lengths):
        ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = number
        metadata = utils.make_metadata(lengths, 1, table[number : number + 1])
        q = utils.make_query(1, 4, seed=number)
        try:
            for layer in range(2):
                turns[2 * layer + number].wait(60)
                buffers, _, _ = impl.decode._buffers()
                out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
                if 2 * layer + number + 1 < len(turns):
                    turns[2 * layer + number + 1].set()
            expected, _ = utils.reference_decode(
                q, cache, table[number : number + 1], lengths, impl.scale
            )
            torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
            results[number] = buffers.work.data_ptr()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            for turn in turns:
                turn.set()
        finally:
            del ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()]

    with utils.forward(config):
        threads = [
            threading.Thread(target=ubatch, args=(i, [n]))
            for i, n in enumerate((200, 90))
        ]
        for thread in threads:
            thread.start()
        turns[0].set()
        for thread in threads:
            thread.join(60)
    assert not errors, errors
    assert results[0] != results[1]
    assert core.count("plan") == 2


@pytest.mark.parametrize("max_num_seqs", [1, 2, 1024])
def test_any_batch_up_to_max_num_seqs(core, max_num_seqs):
    config = utils.make_config(max_num_seqs=max_num_seqs)
    impl = utils.make_impl(config, num_heads=1)
    lengths = [(7 * i) % 3 for i in range(max_num_seqs)]
    out, _, expected, _ = run(impl, config, lengths, 1)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


def test_scratch_size_is_logged_once(core, caplog_vllm):
    config = utils.make_config(speculative=7)
    utils.make_impl(config, num_heads=5)
    utils.make_impl(config, num_heads=5)
    lines = [r for r in caplog_vllm.records if "MiB of split-KV scratch" in r.message]
    assert len(lines) == 1
    mib = core.workspace_bytes(5, 8, 16) / 2**20
    assert f"{mib:.1f} MiB" in lines[0].message
