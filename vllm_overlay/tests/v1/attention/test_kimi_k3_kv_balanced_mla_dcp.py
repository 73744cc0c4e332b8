# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``KIMI_K3_KV_BALANCED_MLA`` under DCP, merged by vLLM's own ``MLADCPManager``.

One process plays all ranks in turn. The query is gathered and the outputs are merged
by vLLM's code, by its Triton kernels: on a Hopper GPU after the real decode kernel,
elsewhere (``TRITON_INTERPRET=1``) after the CPU stand-in.
"""

import functools
import math

import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_promises as promises
from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

try:
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

MISSING = promises.triton_missing()
if pytest is not None:
    pytestmark = [
        pytest.mark.skip_global_cleanup,
        pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    ]

BF16_STEP = 2.0**-8  # largest relative error of one rounding to bf16
TOLERANCE = 1e-3
LSE_TOLERANCE = 1e-4
MAX_ERROR = 0.03  # of the kernel itself, where weights are not powers of two


def totals_for(world: int, interleave: int, qlen: int) -> list[int]:
    """Global lengths from 0 to 4097 around every border of a configuration."""
    if not promises.ON_GPU:
        return [0, qlen - 1, qlen, interleave + 1, 129]
    round_ = world * interleave
    borders = {qlen, interleave, round_, 2 * round_, 64 * world, 128 * world}
    borders |= {64, 128, 512, 1024, 4096}
    near = {b + d for b in borders for d in (-1, 0, 1)}
    return sorted(n for n in near | {0, 1, 2, 3, 5, 9, 515, 3333} if 0 <= n <= 4097)


class Ranks:
    """The step of every rank for one batch: its shard, its metadata, its query."""

    def __init__(self, config, heads, totals, qlen, interleave, causal, exact):
        self.world = config.parallel_config.decode_context_parallel_size
        self.totals, self.qlen, self.causal = totals, qlen, causal
        tokens, seed = len(totals) * qlen, qlen + interleave
        self.keys = promises.exact_keys(len(totals), max(*totals, 1), seed)
        self.q = promises.exact_query(tokens, heads)
        if not exact:
            generator = torch.Generator(promises.DEVICE).manual_seed(seed)
            shape = (tokens, heads, utils.HEAD)
            self.q = torch.randn(shape, device=promises.DEVICE, generator=generator).to(
                utils.FP8
            )
        q_scale = promises.LOG2_UNITS if exact else 0.5
        self.layer = utils.make_layer(q_scale=q_scale)
        self.scale = utils.SCALE * q_scale
        self.bounds = promises.bounds_of(totals, qlen, causal)
        self.shards = [self._shard(rank, interleave) for rank in range(self.world)]

    def _shard(self, rank, interleave):
        local = get_dcp_local_seq_lens(
            torch.tensor(self.totals), self.world, rank, interleave
        ).tolist()
        where = promises.local_positions(max(*local, 1), self.world, rank, interleave)
        rows = self.keys[:, where.clamp_max(self.keys.shape[1] - 1)]
        cache, table = promises.paged(rows, local, seed=rank)
        return local, where, rows, cache, table

    def metadata(self, rank):
        local, _, _, _, table = self.shards[rank]
        made = utils.make_metadata(
            local, self.qlen, table.cpu(), causal=self.causal, causal_lens=self.totals
        )
        return to_device(made, table)

    @functools.cached_property
    def expected_lse(self):
        """float64 LSE of every rank's shard."""
        return [
            promises.attend(self.q, rows, where, local, self.bounds, self.scale)[1]
            for local, where, rows, _, _ in self.shards
        ]

    def whole(self):
        """float64 output and LSE without DCP."""
        where = torch.arange(self.keys.shape[1], device=promises.DEVICE)
        return promises.attend(
            self.q, self.keys, where, self.totals, self.bounds, self.scale
        )


def to_device(metadata, table):
    """Move a step's metadata to this machine's device."""
    decode, device = metadata.decode, promises.DEVICE
    decode.block_table = table
    decode.seq_lens = decode.seq_lens.to(device)
    if decode.dcp_tot_seq_lens is not None:
        decode.dcp_tot_seq_lens = decode.dcp_tot_seq_lens.to(device)
    metadata.query_start_loc = metadata.query_start_loc.to(device)
    return metadata


def unsharded(heads, ranks):
    """The same decode without DCP, on this backend."""
    config = promises.make_config(speculative=7, max_num_seqs=256)
    impl = utils.make_impl(config, num_heads=heads)
    cache, table = promises.paged(ranks.keys, ranks.totals, seed=99)
    metadata = utils.make_metadata(
        ranks.totals, ranks.qlen, table.cpu(), causal=ranks.causal
    )
    metadata = to_device(metadata, table)
    impl.need_to_return_lse_for_decode = True
    out, lse = impl.forward_mqa(ranks.q, cache, metadata, ranks.layer)
    return out.float(), lse


def decode_and_combine(group, config, impl, ranks, backend, dtype):
    """Gather, decode and combine on every rank, as Kimi K3's layer does.

    Returns:
        The merged output ``[tokens, heads, 512]``, and each rank's partial output
        and LSE before the merge.

    """
    manager = promises.dcp_manager(config, impl, backend, dtype)
    local_q = ranks.q.chunk(ranks.world, 1)
    partials = {}

    def step(rank):
        impl.dcp_rank = rank
        # Collectives take bytes: CPU builds of torch can't concatenate FP8.
        mine = local_q[rank].contiguous().view(torch.uint8)
        q = manager.query_gather(mine).view(utils.FP8)
        assert torch.equal(q.view(torch.uint8), ranks.q.view(torch.uint8))
        if rank not in partials:
            metadata = ranks.metadata(rank)
            cache = ranks.shards[rank][3]
            out, lse = impl.forward_mqa(q, cache, metadata, ranks.layer)
            partials[rank] = metadata, out, lse
        metadata, out, lse = partials[rank]
        merged = manager.combine(
            out.to(dtype, copy=True),
            lse.clone(),
            seq_lens=metadata.decode.seq_lens,
            query_start_loc=metadata.query_start_loc,
        )
        return merged[0] if isinstance(merged, tuple) else merged

    merged = torch.cat(group.run(step), 1).float()
    return merged, [partials[rank][1:] for rank in range(ranks.world)]


def check_shards(ranks, partials):
    """LSE of every shard, and what an empty one gives; returns the largest error."""
    worst = 0.0
    for rank, (out, lse) in enumerate(partials):
        want = ranks.expected_lse[rank]
        assert torch.isfinite(out).all(), f"rank {rank}: not finite"
        empty = want.isinf()
        assert torch.equal(lse.isneginf(), empty), f"rank {rank}: LSE of empty rows"
        assert (out[empty] == 0).all(), f"rank {rank}: output of empty rows"
        if not empty.all():
            worst = max(worst, (lse.double() - want)[~empty].abs().max().item())
    return worst


def check_merged(ranks, merged, partials, other, roundings):
    """Merged and unsharded differ by ``TOLERANCE`` beside what bf16 rounds.

    ``roundings`` steps to bf16 lie between the kernels' sums and the two results; each
    adds at most half a unit in the last place of the pieces that are merged.
    """
    lse = torch.stack([lse for _, lse in partials]).double()
    top = lse.amax(0)
    weight = torch.exp2(lse - torch.where(top.isinf(), 0.0, top))
    weight = weight / weight.sum(0).clamp_min(1e-300)
    size = sum(
        weight[r][..., None] * out.double().abs() for r, (out, _) in enumerate(partials)
    )
    gap = (merged - other).double().abs()
    excess = (gap - roundings * BF16_STEP * size).max().item()
    assert excess <= TOLERANCE, excess
    assert (merged[top.isinf()] == 0).all() and (other[top.isinf()] == 0).all()
    return excess, gap.max().item()


def dcp_configs():
    """World, heads of a rank, interleave and query tokens."""
    if not promises.ON_GPU:  # an interpreter runs the Triton kernels
        yield from ((2, 1, 1, 1), (2, 1, 16, 5), (4, 1, 1, 5))
        return
    for world, heads in ((2, 8), (4, 12), (8, 12)):
        for interleave in (1, 16, 64):
            for qlen in (1, 5, 8):
                yield world, heads, interleave, qlen


def make_ranks(world, heads, interleave, qlen, causal=True, exact=True):
    """Config, impl of one rank and the batch; the interleave size comes last."""
    config = promises.make_config(speculative=7, dcp=world, max_num_seqs=256)
    config.parallel_config.cp_kv_cache_interleave_size = 1
    impl = utils.make_impl(config, num_heads=heads)
    assert impl.dcp_world_size == world and impl.need_to_return_lse_for_decode
    assert impl.decode.heads == heads * world
    # Disaggregated prefill settles it after the model is built.
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    totals = totals_for(world, interleave, qlen)
    ranks = Ranks(config, heads * world, totals, qlen, interleave, causal, exact)
    return config, impl, ranks


def test_vllms_combine_of_the_shards_equals_the_unsharded_decode():
    count, worst_lse, worst, widest = 0, 0.0, -1.0, 0.0
    for world, heads, interleave, qlen in dcp_configs():
        # All-gather with reduce-scatter and all-to-all, in fp32 and as served. Steps:
        # the two kernels' outputs, then what vLLM rounds on the way.
        merges = [
            ("ag_rs", torch.float32, 2),
            ("ag_rs", torch.bfloat16, 3 + world),
            ("a2a", torch.float32, 2),
            ("a2a", torch.bfloat16, 3),
        ]
        with promises.machine(), promises.dcp_group(world) as group:
            config, impl, ranks = make_ranks(world, heads, interleave, qlen)
            where = f"world {world}, interleave {interleave}, {qlen} query tokens"
            with promises.without_dcp():
                other, other_lse = unsharded(heads * world, ranks)
            _, want_lse = ranks.whole()
            seen = ~want_lse.isinf()
            error = (other_lse.double() - want_lse)[seen].abs().max().item()
            assert error <= LSE_TOLERANCE, (where, error)
            for backend, dtype, roundings in merges:
                merged, partials = decode_and_combine(
                    group, config, impl, ranks, backend, dtype
                )
                lse_error = check_shards(ranks, partials)
                assert lse_error <= LSE_TOLERANCE, (where, backend, lse_error)
                excess, gap = check_merged(ranks, merged, partials, other, roundings)
                worst, widest = max(worst, excess), max(widest, gap)
                worst_lse = max(worst_lse, lse_error)
                count += len(ranks.totals)
    return (
        f"{count} merges of a request; beyond bf16 rounding {max(worst, 0):.1e}, "
        f"largest gap {widest:.1e}, LSE {worst_lse:.1e}"
    )


def test_random_weights_and_the_draft_without_a_mask():
    """Weights that FP8 rounds, causal and not, against float64 on the whole."""
    worst = 0.0
    world, heads = (8, 12) if promises.ON_GPU else (2, 1)
    cases = ((True, 16), (False, 1), (False, 64)) if promises.ON_GPU else ((False, 1),)
    for causal, interleave in cases:
        with promises.machine(), promises.dcp_group(world) as group:
            config, impl, ranks = make_ranks(
                world, heads, interleave, 5, causal, exact=False
            )
            want, want_lse = ranks.whole()
            for backend in ("ag_rs", "a2a"):
                merged, partials = decode_and_combine(
                    group, config, impl, ranks, backend, torch.bfloat16
                )
                check_shards(ranks, partials)
                assert torch.isfinite(merged).all()
                assert (merged[want_lse.isinf()] == 0).all()
                error = ((merged - want).norm() / want.norm()).item()
                assert error < MAX_ERROR, (causal, interleave, backend, error)
                worst = max(worst, error)
    return f"largest relative error {worst:.4f}"


def test_two_shards_of_known_lse_get_their_weights():
    """Natural LSE 10 and 9: 0.7311 of shard 0; read in the wrong base, not."""
    right = 1 / (1 + math.exp(-1))
    for backend in ("ag_rs", "a2a"):
        with promises.machine(), promises.dcp_group(2) as group:
            config = promises.make_config(dcp=2)
            impl = utils.make_impl(config, num_heads=1)
            manager = promises.dcp_manager(config, impl, backend, torch.float32)
            starts = torch.tensor([0, 1], dtype=torch.int32, device=promises.DEVICE)
            shape = (1, 2, utils.LATENT)

            def step(rank, manager=manager, starts=starts, shape=shape):
                natural = torch.full((1, 2), 10.0 - rank, device=promises.DEVICE)
                out = torch.full(shape, 1.0 - rank, device=promises.DEVICE)
                return manager.combine(
                    out,
                    natural / math.log(2),
                    seq_lens=starts[1:] + 4,
                    query_start_loc=starts,
                )

            for merged in group.run(step):
                assert (merged - right).abs().max() < 1e-5, merged.flatten()[0]


def test_empty_shards_do_not_reach_the_result():
    """Short prompts on eight ranks, a padded request, and poisoned empty shards."""
    world = 8 if promises.ON_GPU else 4
    expected = {1: [1, 1, 1] + [0] * (world - 3), 64: [3] + [0] * (world - 1)}
    for interleave, local in expected.items():
        found = [
            int(get_dcp_local_seq_lens(torch.tensor([3]), world, rank, interleave))
            for rank in range(world)
        ]
        assert found == local
    for backend in ("ag_rs", "a2a"):
        for interleave, totals in ((1, [3, 0]), (64, [63, 0])):
            with promises.machine(), promises.dcp_group(world) as group:
                config, impl, ranks = make_ranks(world, 1, interleave, 1)
                ranks = Ranks(config, world, totals, 1, interleave, True, True)
                merged, partials = decode_and_combine(
                    group, config, impl, ranks, backend, torch.bfloat16
                )
                check_shards(ranks, partials)
                want, _ = ranks.whole()
                assert (merged[1] == 0).all()
                gap = (merged[0] - want[0]).abs().max().item()
                assert gap <= 3 * BF16_STEP * 4, (backend, interleave, gap)


def test_the_interleave_size_is_read_at_every_call():
    """One impl, three sizes in turn, each against its own shards."""
    world = 4 if promises.ON_GPU else 2
    with promises.machine(), promises.dcp_group(world) as group:
        config, impl, _ = make_ranks(world, 2, 1, 5)
        for interleave in (64, 1, 16, 64):
            config.parallel_config.cp_kv_cache_interleave_size = interleave
            totals = [0, 4, 65, 200, 513]
            ranks = Ranks(config, 2 * world, totals, 5, interleave, True, True)
            _, partials = decode_and_combine(
                group, config, impl, ranks, "ag_rs", torch.float32
            )
            assert check_shards(ranks, partials) <= LSE_TOLERANCE
