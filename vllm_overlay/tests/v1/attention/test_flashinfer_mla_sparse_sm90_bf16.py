# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode over a bf16 cache on Hopper, against float64.

The cases and the emulator are those of the FP8 kernel's tests. On a Hopper GPU the same
cases run on the compiled kernels.
"""

import pytest
import torch

from tests.v1.attention import test_flashinfer_mla_sparse_sm90_fp8 as fp8
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_bf16 as module
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_decode as shared

LATENT, ROPE, DEVICE = fp8.LATENT, fp8.ROPE, fp8.DEVICE
pytestmark = pytest.mark.skip_global_cleanup


class Case(fp8.Case):
    decode_class, dtype = module.SparseBf16Decode, torch.bfloat16
    max_error = 0.0035
    """Relative to the output's norm: the output's rounding is 0.0017, P's 0.0011."""


def emulate(monkeypatch):
    """Without a Hopper GPU, run the kernels under the emulator."""
    if fp8.ON_HOPPER:
        return
    emulator = fp8.Emulator()
    emulator.operand = torch.bfloat16
    fp8.emulate(monkeypatch, emulator, module)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    emulate(monkeypatch)


TILES = [
    module.choose_tile(8),
    module.choose_tile(8, few=True),
    module.choose_tile(16),
    module.choose_tile(16, few=True),
    shared.Tile(8, 32, 3, 2, pair_step=128, token_step=32, value_bytes=2),
    shared.Tile(16, 64, 2, 4, value_bytes=2),
]


@pytest.mark.parametrize("rope", [0, ROPE])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_lengths(rope, splits):
    width = 150
    lens = [0, 1, 31, 32, 33, 63, 64, 65, 127, 129, width]
    Case(lens, width, 8, rope).check(splits=splits)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 12, 16, 17, 128])
def test_heads(heads):
    Case([70, 0, 3], 80, heads, ROPE).check()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles(tile, splits):
    """A row shorter than the pipeline, one that fills it, and one beyond it."""
    assert tile.shared_bytes(ROPE) <= shared.SHARED_BYTES  # the emulator has no limit
    lens = [1, tile.tokens * tile.stages, 5 * tile.tokens + 1]
    Case(lens, 700, 8, ROPE).check(tile=tile, splits=splits)


@pytest.mark.parametrize("k_scale", [0.25, 4.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_scale_covers_latent_rope_and_value(k_scale, splits):
    Case([70], 80, 8, ROPE, k_scale=k_scale).check(splits=splits)


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_flat_and_peaked_scores(spread):
    """Nearly equal weights, and one key that takes nearly all of it."""
    Case([150, 65], 150, 8, ROPE, spread=spread).check(splits=2)


def test_large_queries():
    """Past the f16 that the FP8 kernel takes."""
    case = Case([150], 150, 8, ROPE)
    case.q_nope *= 2.0**20
    case.q_pe *= 2.0**20
    case.scale *= 2.0**-20
    case.check(splits=2)


@pytest.mark.parametrize("splits", [1, 2])
def test_scores_that_rise_and_fall_along_the_row(splits):
    """The running maximum moves in every tile, then never again."""
    case = Case([300, 300], 300, 8, ROPE, spread=8.0)
    kv = case.cache[case.slots[:, :300].long()].float()
    s = torch.einsum("rd,rnd->rn", case.q_nope[:, 0].float(), kv[..., :LATENT])
    order = s.argsort(dim=1)
    order[1] = order[1].flip(0)
    case.slots[:, :300] = case.slots[:, :300].gather(1, order)
    case.check(splits=splits)


@pytest.mark.parametrize("splits", [1, 7])
def test_permuted_rows_give_permuted_bits(splits):
    fp8.check_permuted_rows(Case, splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_without_lse(splits):
    case = Case([70, 0], 80, 8, ROPE)
    out, _ = case.run(splits=splits)
    same, untouched = case.run(splits=splits, lse=False)
    assert torch.equal(same, out)
    assert untouched.isnan().all()


def test_no_rows():
    Case([], 80, 8, ROPE).run(max_rows=4)


@pytest.mark.parametrize("heads", [8, 16])
def test_splits_fill_the_device_and_scratch_is_bounded(heads):
    limit = module.own_rows(heads)
    decoder = module.SparseBf16Decode(limit, heads, ROPE, 2048, DEVICE)
    assert decoder.scratch_bytes < 16 << 20
    for rows in range(1, limit + 1):
        splits = decoder.num_splits(rows)
        assert 1 < splits <= shared.MAX_SPLITS
        assert rows * splits <= 2 * 132
        assert rows * splits * heads * LATENT <= decoder._part.numel()
    assert decoder.num_splits(1) >= 32


def test_few_rows_take_a_tile_of_their_own():
    """Unless the tile is given."""
    decoder = module.SparseBf16Decode(16, 8, ROPE, 2048, DEVICE)
    assert decoder.tile_of(4) == module.choose_tile(8, few=True) != decoder.tile
    assert decoder.tile_of(5) == decoder.tile == module.choose_tile(8)
    tile = module.choose_tile(8)
    forced = module.SparseBf16Decode(16, 8, ROPE, 2048, DEVICE, tile=tile)
    assert forced.tile_of(1) == tile


def test_another_cache_is_refused():
    """By its type, and by rows or a pool that aren't 16-byte aligned."""
    case = Case([1], 80, 8, 0)
    good = case.cache
    for cache in (
        good.to(torch.float16),
        torch.zeros(100, LATENT + 4, dtype=torch.bfloat16, device=DEVICE)[:, :LATENT],
        good.contiguous().view(-1)[4:-508].view(-1, LATENT),
    ):
        case.cache = cache
        with pytest.raises(ValueError, match="SparseBf16Decode can't run: .*cache"):
            case.run()


def test_construction_names_every_reason():
    with pytest.raises(ValueError, match="SparseBf16Decode can't be built") as info:
        module.SparseBf16Decode(0, 129, 32, 0, DEVICE, splits=65)
    for word in ("max_rows", "heads", "rope_dim", "topk_width", "splits"):
        assert word in str(info.value)


def test_slots_past_four_gib():
    width, rows = 80, (5 << 30) // 1152
    case = Case([width], width, 8, ROPE)
    small = case.cache
    large = torch.empty(rows, 576, dtype=torch.bfloat16, device=DEVICE)
    large[0] = torch.nan
    shift = rows - small.shape[0]
    large[shift:] = small
    case.cache = large
    case.slots += shift
    case.check(splits=2)


@pytest.mark.skipif(not fp8.ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("splits", [1, 4])
def test_graph_replays_with_other_lengths_and_slots(splits):
    fp8.check_graph_replays(Case, splits)
