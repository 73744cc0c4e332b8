# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``KIMI_K3_KV_BALANCED_MLA``: vLLM's builder, impl and workspace on the real kernels.

What only a GPU can show of the backend: CUDA graphs, synchronisations, bytes really
allocated, plans that lanes keep apart. The kernel alone is tested in
``test_kimi_k3_kv_balanced_mla_kernel.py``.
"""

import functools
import gc
from contextlib import contextmanager
from unittest import mock

import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_promises as promises
from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.worker import workspace

try:
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

DEVICE, ON_GPU = promises.DEVICE, promises.ON_GPU
MISSING = promises.hopper_missing()
if pytest is not None:
    pytestmark = [
        pytest.mark.skip_global_cleanup,
        pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    ]

MAX_ERROR = 0.03  # P in e4m3; see test_kimi_k3_kv_balanced_mla_kernel.py
HEADS, QLEN = (12, 8) if ON_GPU else (1, 8)
LONGEST = 8192 if ON_GPU else 256
SLOTS = 16 if ON_GPU else 4


def random_keys(requests, tokens, seed=0):
    """``[requests, tokens, 576]`` FP8 of latent mean 0.3."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (requests, tokens, utils.HEAD)
    keys = torch.randn(shape, device=DEVICE, generator=generator)
    keys[..., : utils.LATENT] += 0.3
    return keys.to(utils.FP8)


def random_query(tokens, heads, seed=1):
    return utils.make_query(tokens, heads, seed).to(DEVICE)


class Server:
    """The buffers that the runner keeps for a batch of ``slots`` requests."""

    def __init__(self, slots, longest, qlen, heads, *, causal=True, seed=0):
        self.qlen, self.causal = qlen, causal
        self.keys = random_keys(slots, longest, seed)
        self.cache, self.full_table = promises.paged(self.keys, [longest] * slots)
        self.table = self.full_table.clone()
        self.seq_lens = torch.zeros(slots, dtype=torch.int32, device=DEVICE)
        self.q = random_query(slots * qlen, heads, seed + 1)

    def set(self, lengths, stale):
        """Give the first requests these lengths; the others pad the batch.

        Table entries behind a request's last block are huge, or ``stale``: what
        the longest request left there.
        """
        slots, longest = self.keys.shape[:2]
        lengths = [min(n, longest) for n in lengths]
        lengths += [0] * (slots - len(lengths))
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.table.copy_(self.full_table)
        if not stale:
            for r, n in enumerate(lengths):
                self.table[r, -(-n // promises.BLOCK) :] = promises.HUGE_BLOCK
        return lengths

    def metadata(self, config, heads, live=None):
        """The step as the real builder makes it; lengths stay on the device."""
        builder = promises.make_builder(config, heads, not self.causal)
        batch = promises.common_metadata(
            self.seq_lens, self.table, self.qlen, live=live, causal=self.causal
        )
        return builder.build_for_cudagraph_capture(batch)

    def check(self, out, lengths, scale):
        """Relative error to float64; rows of padding must be 0."""
        where = torch.arange(self.keys.shape[1], device=DEVICE)
        bounds = promises.bounds_of(lengths, self.qlen, self.causal)
        want, lse = promises.attend(self.q, self.keys, where, lengths, bounds, scale)
        assert torch.isfinite(out).all(), lengths
        assert (out[lse.isinf()] == 0).all(), lengths
        size = want.norm()
        if size == 0:
            return 0.0
        error = ((out.double() - want).norm() / size).item()
        assert error < MAX_ERROR, (lengths, error)
        return error


def layers_of(config, count, heads=HEADS):
    return [utils.make_impl(config, num_heads=heads) for _ in range(count)]


def forward(config, layers, server, metadata):
    """One model forward over ``layers``; their outputs, fp32 LSE dropped."""
    layer = utils.make_layer()
    with utils.forward(config):
        return [
            impl.forward_mqa(server.q, server.cache, metadata, layer)[0]
            for impl in layers
        ]


# --- CUDA graphs ------------------------------------------------------------------


def replay_cases():
    """(live requests, length): growing to the longest, shrinking, none at all."""
    some = (1, 2, SLOTS - 1, SLOTS)
    lengths = [64, 500, LONGEST // 2 + 1, LONGEST - 1, LONGEST, 129, 64, 1]
    cases = [(live, length) for length in lengths for live in some]
    return [*cases, (0, 0), (SLOTS, LONGEST), (1, 64)]


def test_replays_follow_lengths_tables_and_live_requests():
    """Captured over lengths of 0 and over the longest; two layers share a plan."""
    worst, count = 0.0, 0
    for captured in (0, LONGEST):
        with promises.machine():
            config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
            layers = layers_of(config, 2)
            server = Server(SLOTS, LONGEST, QLEN, HEADS)
            metadata = server.metadata(config, HEADS)
            buffers, scratch, _ = layers[0].decode._buffers()
            server.set([captured] * SLOTS, stale=True)
            planned = buffers.plan.planned
            graph = promises.Graph(
                functools.partial(forward, config, layers, server, metadata)
            )
            # One eager forward and one captured, each with a plan of its own.
            assert buffers.plan.planned - planned == (2 if ON_GPU else 1)
            pointers = buffers.counts.data_ptr(), buffers.work.data_ptr()
            workspace.lock_workspace()
            for number, (live, length) in enumerate(replay_cases()):
                lengths = [max(length - 37 * r, 1) for r in range(live)]
                lengths = server.set(lengths, stale=number % 2 == 0)
                for out in graph.out:
                    out.fill_(float("nan"))
                if ON_GPU:
                    scratch.fill_(0xFF)
                graph.replay()
                first, second = graph.out
                error = server.check(first, lengths, layers[0].scale)
                assert torch.equal(first, second)
                worst, count = max(worst, error), count + 1
            buffers, again, _ = layers[0].decode._buffers()
            assert pointers == (buffers.counts.data_ptr(), buffers.work.data_ptr())
            assert again.data_ptr() == scratch.data_ptr()
    return f"{count} replays, largest error {worst:.4f}"


def test_three_live_of_four_with_everything_poisoned():
    """A captured size of 4 and lengths 65, 129, 513, 0; 1M tokens at capture."""
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=4)
        layers = layers_of(config, 1)
        server = Server(4, 513 if ON_GPU else 256, QLEN, HEADS)
        builder = promises.make_builder(config, HEADS)
        metadata = builder.build_for_cudagraph_capture(
            promises.common_metadata(
                server.seq_lens, server.table, QLEN, longest=1 << 20
            )
        )
        graph = promises.Graph(lambda: forward(config, layers, server, metadata))
        _, scratch, _ = layers[0].decode._buffers()
        for lengths in ([65, 129, 513 if ON_GPU else 255, 0], [0, 0, 0, 0]):
            server.set(lengths, stale=False)
            graph.out[0].fill_(float("nan"))
            if ON_GPU:
                scratch.fill_(0xFF)
            graph.replay()
            server.check(graph.out[0], lengths, layers[0].scale)
            assert (graph.out[0][3 * QLEN :] == 0).all()


def test_replays_under_dcp_follow_both_lengths():
    """A rank's local and global lengths change under the graph; LSE -inf if empty."""
    world, interleave, rank = 2, 16, 1
    heads = HEADS * world
    with promises.machine():
        config = promises.make_config(speculative=7, dcp=world, max_num_seqs=SLOTS)
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        impl = utils.make_impl(config, num_heads=HEADS, rank=rank)
        impl.dcp_world_size, impl.need_to_return_lse_for_decode = world, True
        server = Server(SLOTS, LONGEST, QLEN, heads)
        total = torch.zeros_like(server.seq_lens)
        table = torch.zeros(SLOTS, 1, dtype=torch.int32)
        metadata = utils.make_metadata([1] * SLOTS, QLEN, table, causal_lens=[1])
        metadata.decode.seq_lens, metadata.decode.block_table = (
            server.seq_lens,
            server.table,
        )
        metadata.decode.dcp_tot_seq_lens = total
        layer = utils.make_layer()

        def step():
            with utils.forward(config):
                return impl.forward_mqa(server.q, server.cache, metadata, layer)

        graph = promises.Graph(step)
        where = promises.local_positions(LONGEST, world, rank, interleave)
        for totals in ([3, 15, 17, 64], [2 * LONGEST - 100] * SLOTS, [500], [0]):
            totals = [*totals[:SLOTS], *[0] * (SLOTS - len(totals))]
            local = [int((where < n).sum()) for n in totals]
            server.set(local, stale=False)
            total.copy_(torch.tensor(totals, dtype=torch.int32))
            for buffer in graph.out:
                buffer.fill_(float("nan"))
            graph.replay()
            out, lse = graph.out
            bounds = promises.bounds_of(totals, QLEN, True)
            want, want_lse = promises.attend(
                server.q, server.keys, where, local, bounds, impl.scale
            )
            empty = want_lse.isinf()
            assert torch.equal(lse.isneginf(), empty) and (out[empty] == 0).all()
            if not empty.all():
                assert (out.double() - want).norm() / want.norm() < MAX_ERROR
                gap = (lse - want_lse)[~empty].abs()
                assert (gap <= 18 * 2**-13 * (1 + want_lse[~empty].abs())).all()


@contextmanager
def capturing():
    """A real capture that may end without a launch."""
    if not ON_GPU:
        with mock.patch.object(decode_module, "_is_capturing", lambda: True):
            yield
        return
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        yield


def test_first_use_of_a_shape_inside_a_capture_is_refused():
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=4)
        (impl,) = layers_of(config, 1)
        server = Server(4, 128, QLEN, HEADS)
        server.set([128, 65], stale=False)
        metadata = server.metadata(config, HEADS)
        kernels = decode_module.KvBalancedMlaKernel()
        with mock.patch.object(decode_module, "_KERNEL", kernels):
            with (
                capturing(),
                promises.refused("once eagerly before capturing", "enable_jit_warmup"),
            ):
                forward(config, [impl], server, metadata)
            (out,) = forward(config, [impl], server, metadata)
            server.check(out, [128, 65, 0, 0], impl.scale)
            with capturing():
                forward(config, [impl], server, metadata)


# --- synchronisations and allocations ---------------------------------------------


@contextmanager
def no_synchronisation():
    """Make any synchronisation of the host an error, and prove that it is one."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        with promises.refused(kind=RuntimeError):
            torch.ones(1, device=DEVICE).item()
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_build_plan_and_decode_never_synchronise():
    """Causal verify and non-causal draft; the host sees upper bounds only."""
    for causal in (True, False):
        with promises.machine():
            config = promises.make_config(
                speculative=7, max_num_seqs=SLOTS, non_causal=not causal
            )
            layers = layers_of(config, 2)
            server = Server(SLOTS, LONGEST, QLEN, HEADS, causal=causal)
            builder = promises.make_builder(config, HEADS, not causal)
            lengths = server.set([LONGEST, 70, 3, LONGEST - 1], stale=False)
            batch = promises.common_metadata(
                server.seq_lens, server.table, QLEN, live=4, causal=causal
            )
            forward(config, layers, server, builder.build(0, batch))
            with no_synchronisation():
                for _ in range(3):
                    metadata = builder.build(0, batch)
                    outs = forward(config, layers, server, metadata)
            server.check(outs[-1], lengths, layers[0].scale)


def test_host_bounds_do_not_change_the_result():
    """Asynchronous scheduling: host lengths exact, 3 or 8 tokens too long."""
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        layers = layers_of(config, 1)
        server = Server(SLOTS, LONGEST, QLEN, HEADS)
        builder = promises.make_builder(config, HEADS)
        exact = server.set([70, 129, LONGEST - 8, 5], stale=False)
        outs = []
        for extra in (0, 3, 8):
            batch = promises.common_metadata(
                server.seq_lens, server.table, QLEN, live=4, longest=max(exact) + extra
            )
            batch.seq_lens_cpu_upper_bound = torch.tensor(exact) + extra
            outs += forward(config, layers, server, builder.build(0, batch))
        server.check(outs[0], exact, layers[0].scale)
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def allocator(count):
    """One of torch's counts; 0 without a GPU."""
    if not ON_GPU:
        return 0
    return torch.get_device_module("cuda").memory_stats()[count]


def requested(what):
    """Bytes asked of torch's allocator, ``current`` or ever ``allocated``."""
    return allocator(f"requested_bytes.all.{what}")


def requests():
    """How often torch's allocator was asked so far."""
    return allocator("allocation.all.allocated")


def test_a_step_allocates_nothing_but_its_output():
    """After the lock; so no copy of the cache is made either."""
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        (impl,) = layers_of(config, 1)
        server = Server(SLOTS, LONGEST, QLEN, HEADS)
        server.set([LONGEST] * SLOTS, stale=False)
        metadata = server.metadata(config, HEADS)
        workspace.lock_workspace()
        for with_lse in (False, True):
            impl.need_to_return_lse_for_decode = with_lse
            forward(config, [impl], server, metadata)
            layer = utils.make_layer()
            with utils.forward(config):
                calls, size = requests(), requested("allocated")
                out, lse = impl.forward_mqa(server.q, server.cache, metadata, layer)
                calls, size = requests() - calls, requested("allocated") - size
            want = out.numel() * 2
            if with_lse:
                assert lse is not None
                want += lse.numel() * 4
            if ON_GPU:
                assert (calls, size) == (1 + with_lse, want)


def largest_sizes(core, max_requests):
    """Entries of ``work`` and bytes of scratch, of the query length with the most."""
    clusters = core.max_active_clusters(DEVICE)
    shapes = [(HEADS, q, max_requests) for q in range(1, QLEN + 1)]
    work = max(core.work_list_len(*shape, clusters) for shape in shapes)
    return work, max(core.workspace_bytes(*shape) for shape in shapes)


def test_bytes_allocated_are_those_that_core_states():
    """By torch's allocator, for every ubatch and lane, and in vLLM's profile."""
    sizes = []
    for ubatches, lanes in ((1, 1), (1, 2), (2, 1), (2, 2)):
        for max_num_seqs in (1, 64, 1024):
            with promises.machine(ubatches, lanes) as core:
                config = promises.make_config(
                    speculative=7, max_num_seqs=max_num_seqs, dbo=ubatches == 2
                )
                gc.collect()
                if ON_GPU:
                    torch.accelerator.empty_cache()
                    before = requested("current")
                    profiler = DeviceMemoryProfiler(DEVICE)
                    profiler.__enter__()
                for lane in range(lanes):
                    with workspace.use_workspace_lane(lane):
                        (impl,) = layers_of(config, 1)
                work, scratch = largest_sizes(core, max_num_seqs)
                one = 4 * core.counts_len() + 4 * work + -(-scratch // 256) * 256
                sizes.append((ubatches * lanes, one))
                if ON_GPU:
                    got = requested("current") - before
                    profiler.__exit__(None, None, None)
                    assert got == ubatches * lanes * one, (got, ubatches, lanes, one)
                    assert profiler.consumed_memory >= got
                del impl
    if ON_GPU:
        assert len({one for _, one in sizes}) == 1, sizes
    return f"{sizes[0][1] / 2**20:.2f} MiB a lane, for 1 to 1024 requests alike"


# --- one plan per forward ---------------------------------------------------------


def test_one_plan_serves_24_layers():
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        layers = layers_of(config, 24)
        server = Server(SLOTS, LONGEST, QLEN, HEADS)
        metadata = server.metadata(config, HEADS)
        plan = layers[0].decode._buffers()[0].plan
        for number, length in enumerate((64, LONGEST, 64), 1):
            lengths = server.set([length] * SLOTS, stale=False)
            outs = forward(config, layers, server, metadata)
            server.check(outs[0], lengths, layers[0].scale)
            assert all(torch.equal(outs[0], out) for out in outs)
            assert (plan.planned, plan.reused) == (number, 23 * number)


def test_target_draft_target_on_two_lanes():
    """Interleaved inside one forward, each is as it is alone, bit by bit."""
    with promises.machine(lanes=2):
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        draft_config = promises.make_config(
            speculative=7, max_num_seqs=SLOTS, non_causal=True
        )
        (target,) = layers_of(config, 1)
        verify = Server(SLOTS, LONGEST, QLEN, HEADS, seed=5)
        block = Server(SLOTS, LONGEST, QLEN - 1, HEADS, causal=False, seed=9)
        verify_lens = verify.set([LONGEST, 3, 700][:SLOTS], stale=False)
        block_lens = block.set([64] * (SLOTS - 1), stale=False)
        with workspace.use_workspace_lane(1):
            (draft,) = layers_of(draft_config, 1)
        step = verify.metadata(config, HEADS)
        step_draft = block.metadata(draft_config, HEADS)
        layer = utils.make_layer()
        with utils.forward(config):
            first, _ = target.forward_mqa(verify.q, verify.cache, step, layer)
            with workspace.use_workspace_lane(1):
                out, _ = draft.forward_mqa(block.q, block.cache, step_draft, layer)
            again, _ = target.forward_mqa(verify.q, verify.cache, step, layer)
            plan = target.decode._buffers()[0].plan
        assert (plan.planned, plan.reused) == (1, 1)
        verify.check(first, verify_lens, target.scale)
        block.check(out, block_lens, draft.scale)
        assert torch.equal(first, again)


def test_other_lengths_and_kernels_in_one_lane_plan_again():
    """Target, draft, target on one lane and in one forward; each step plans anew.

    One thing differs from a step to the next: the lengths' buffer, then the mask, then
    the query length, with the same buffer.
    """
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        (impl,) = layers_of(config, 1)
        first, second, draft, single = (
            Server(SLOTS, LONGEST, 8, HEADS, seed=1),
            Server(SLOTS, LONGEST, 8, HEADS, seed=2),
            Server(SLOTS, LONGEST, 8, HEADS, causal=False, seed=2),
            Server(SLOTS, LONGEST, 1, HEADS, seed=2),
        )
        draft.seq_lens = single.seq_lens = second.seq_lens
        lengths_of = {id(first): first.set([LONGEST, 130, 9], stale=False)}
        for server in (second, draft, single):
            lengths_of[id(server)] = server.set([70, LONGEST // 2], stale=False)
        servers = [first, second, draft, single, first]
        steps = [server.metadata(config, HEADS) for server in servers]
        plans = impl.decode._buffers()[0].plan
        layer = utils.make_layer()
        with utils.forward(config):
            for number, (server, metadata) in enumerate(zip(servers, steps), 1):
                out, _ = impl.forward_mqa(server.q, server.cache, metadata, layer)
                server.check(out, lengths_of[id(server)], impl.scale)
                assert plans.planned == number


def test_two_ubatches_keep_their_plans():
    """Plan A, plan B, run A again: as A alone."""
    with promises.machine(ubatches=2):
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS, dbo=True)
        layers = layers_of(config, 2)
        servers = [Server(SLOTS, LONGEST, QLEN, HEADS, seed=s) for s in (3, 4)]
        lengths = [
            servers[0].set([LONGEST, 1, 65], stale=False),
            servers[1].set([64] * SLOTS, stale=False),
        ]
        steps = [server.metadata(config, HEADS) for server in servers]
        outs: dict[tuple[int, int], torch.Tensor] = {}
        with utils.forward(config):
            for number, impl in enumerate(layers):
                for ubatch, server in enumerate(servers):
                    with decode_module.in_ubatch(ubatch):
                        outs[ubatch, number], _ = impl.forward_mqa(
                            server.q, server.cache, steps[ubatch], utils.make_layer()
                        )
        for ubatch, server in enumerate(servers):
            with decode_module.in_ubatch(ubatch):
                plan = layers[0].decode._buffers()[0].plan
            assert (plan.planned, plan.reused) == (1, 1)
            assert torch.equal(outs[ubatch, 0], outs[ubatch, 1])
            server.check(outs[ubatch, 0], lengths[ubatch], layers[0].scale)


# --- scales and trimmed rows ------------------------------------------------------


def test_scales_far_from_one():
    """Query and cache quantised with their scales: scores and output follow."""
    worst = 0.0
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=SLOTS)
        (impl,) = layers_of(config, 1)
        server = Server(SLOTS, 300, QLEN, HEADS)
        lengths = server.set([300, 3, 64, 1], stale=False)
        metadata = server.metadata(config, HEADS)
        for q_scale in (0.01, 0.5, 1.0, 2.0, 50.0):
            for k_scale in (0.02, 0.25, 1.0, 4.0, 64.0):
                if q_scale * k_scale > 100:
                    continue  # one key would take all of the weight
                layer = utils.make_layer(q_scale, k_scale)
                with utils.forward(config):
                    out, _ = impl.forward_mqa(server.q, server.cache, metadata, layer)
                scale = impl.scale * q_scale * k_scale
                error = server.check(out.double() / k_scale, lengths, scale)
                worst = max(worst, error)
    return f"largest error {worst:.4f}"


def test_trimmed_rows_are_those_of_each_request_alone():
    """Adaptive verification: 0 to 8 tokens a request, known on the device only."""
    with promises.machine():
        config = promises.make_config(speculative=7, max_num_seqs=8, adaptive=True)
        (impl,) = layers_of(config, 1)
        query_lens, lengths = [8, 1, 3, 8, 5, 0], [200, 70, 3, 128, 255, 0]
        keys = random_keys(6, 255)
        cache, table = promises.paged(keys, lengths)
        tokens = sum(query_lens)
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0)
        metadata = utils.make_metadata(lengths, 8, table.cpu())
        metadata.decode.block_table = table
        metadata.decode.seq_lens = metadata.decode.seq_lens.to(DEVICE)
        metadata.decode.query_start_loc = starts.int().to(DEVICE)
        q = random_query(tokens, HEADS)
        with utils.forward(config):
            out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
        where = torch.arange(keys.shape[1], device=DEVICE)
        for r, count in enumerate(query_lens):
            if not count:
                continue
            mine = slice(int(starts[r]), int(starts[r + 1]))
            bounds = promises.bounds_of([lengths[r]], count, True)
            want, _ = promises.attend(
                q[mine], keys[r : r + 1], where, [lengths[r]], bounds, impl.scale
            )
            error = (out[mine].double() - want).norm() / want.norm()
            assert error < MAX_ERROR, (r, error.item())
