# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3's KV-cache groups with a draft whose MLA layers join the target's.

The model's class, vLLM's planning, its block sizes and its cache manager are the real
ones; layers only bring their cache specs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.config import VllmConfig
from vllm.models.kimi_k3.nvidia.kv_cache_groups import (
    MAX_EMPTY,
    MAX_GROUPS,
    OPTION,
    regroup,
)
from vllm.models.kimi_k3.nvidia.model import (
    KimiK3ForConditionalGeneration,
    KimiLinearForCausalLM,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.request import Request

pytestmark = pytest.mark.skip_global_cleanup

ROW_BYTES = 576
# Tokens of a block that holds a KDA state: a few heads of it, and many.
BLOCKS = (1536, 8192)


def mla_spec(block, dtype="fp8", draft=False):
    return MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=ROW_BYTES,
        dtype=torch.uint8 if dtype == "fp8" else torch.bfloat16,
        cache_dtype_str=dtype,
        kv_quant_mode=get_kv_quant_mode(dtype),
        non_causal_multi_token_decode=draft,
        is_draft=draft,
    )


def kda_spec(block, speculative=0, mode="none"):
    return MambaSpec(
        block_size=block,
        shapes=((16, 3), (1, 16, 16)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=block * ROW_BYTES,
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative,
    )


def specs(mla=24, kda=69, draft=5, draft_dtype="fp8", block=1536, **state):
    """A model's layers in its order: every fourth is MLA, the draft's come last."""
    kinds = ["kda"] * kda
    for i in range(mla):
        kinds.insert(min(4 * i + 3, len(kinds)), "mla")
    found = {
        f"layers.{i}.{kind}": (
            mla_spec(block) if kind == "mla" else kda_spec(block, **state)
        )
        for i, kind in enumerate(kinds)
    }
    return found | {
        f"draft.{i}.mla": mla_spec(block, draft_dtype, True) for i in range(draft)
    }


@pytest.fixture(params=[KimiK3ForConditionalGeneration, KimiLinearForCausalLM])
def model(request):
    return request.param


def make_config(model=KimiK3ForConditionalGeneration, max_model_len=1024, mode="none"):
    """A real config whose model is `model`."""
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.mamba_cache_mode = mode
    config.model_config = SimpleNamespace(
        supports_kv_cache_grouping=hasattr(model, "get_kv_cache_groups"),
        architectures=[model.__name__],
        registry=SimpleNamespace(resolve_model_cls=lambda *_: (model, model.__name__)),
        max_model_len=max_model_len,
    )
    return config


def group(layers, **options):
    """The groups of an engine that serves these layers."""
    return planning.get_global_kv_cache_groups(make_config(**options), [dict(layers)])


def stock(layers):
    return planning.get_kv_cache_groups(make_config(), dict(layers))


def empty_shares(groups):
    """Share of each kind's slots that hold nothing."""
    size = max(len(group.layer_names) for group in groups)
    kinds: dict[type, list[int]] = {}
    for group in groups:
        kind = kinds.setdefault(type(group.kv_cache_spec), [])
        kind.append(len(group.layer_names))
    return {
        kind: 1 - sum(counts) / (size * len(counts)) for kind, counts in kinds.items()
    }


def slots(groups):
    """Layers that the groups' blocks have room for."""
    return len(groups) * max(len(group.layer_names) for group in groups)


@pytest.mark.parametrize("block", BLOCKS)
def test_an_fp8_draft_leaves_less_than_5_percent_empty(model, block):
    layers = specs(block=block, mode="align")
    groups = group(layers, model=model, mode="align")
    shares = empty_shares(groups)
    assert set(shares) == {MLAAttentionSpec, MambaSpec}
    assert 0 < max(shares.values()) < 0.05
    # 3 groups of MLA layers, 7 of KDA layers.
    assert (len(groups), slots(groups) - len(layers)) == (10, 2)


def test_additional_config_keeps_vllms_groups(model):
    layers = specs()
    for value, groups in ((True, 10), (False, 4)):
        config = make_config(model)
        config.additional_config = {"kimi_k3_kv_cache_groups": value}
        found = planning.get_global_kv_cache_groups(config, [dict(layers)])
        assert len(found) == groups
    config.additional_config = {"kimi_k3_kv_cache_groups": "no"}
    with pytest.raises(ValueError, match="must be true or false, got 'no'"):
        planning.get_global_kv_cache_groups(config, [dict(layers)])


def test_the_option_is_documented():
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = docs / "design" / "hybrid_kv_cache_manager.md"
    if not page.exists():
        pytest.skip("the documentation is not beside these tests")
    assert f"--additional-config '{{\"{OPTION}\": false}}'" in page.read_text()


@pytest.mark.parametrize(
    ("draft", "groups", "empty"),
    [(dict(draft=0), 4, 3), ({}, 4, 18), (dict(draft_dtype="bfloat16"), 20, 2)],
    ids=["no-draft", "fp8-draft", "bf16-draft"],
)
def test_what_vllms_own_groups_leave_empty(draft, groups, empty):
    """The FP8 draft's is the one to change, as long as vLLM keeps it."""
    layers = specs(**draft)
    found = stock(layers)
    assert (len(found), slots(found) - len(layers)) == (groups, empty)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_schedulers_block_is_the_targets(block, caching):
    config = make_config(mode="align" if caching else "none")
    config.cache_config.enable_prefix_caching = caching
    layers = specs(block=block, mode=config.cache_config.mamba_cache_mode)
    groups = planning.get_global_kv_cache_groups(config, [layers])
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    assert resolve_kv_cache_block_sizes(cache, config) == (block, block)


def test_groups_of_a_kind_differ_in_nothing_but_their_layers():
    """So that prefix caching looks them up together, as it did when they were one."""
    layers = specs()
    groups = group(layers)
    assert len({group.kv_cache_spec for group in groups}) == 2
    names = [name for group in groups for name in group.layer_names]
    assert sorted(names) == sorted(layers)
    # Two pipeline stages of equal length have equal shares of every group.
    place = {name: i for i, name in enumerate(layers)}
    for one in groups:
        first = sum(place[name] < len(layers) // 2 for name in one.layer_names)
        assert abs(2 * first - len(one.layer_names)) <= 2


@pytest.mark.parametrize(
    "layers",
    [
        dict(draft=0),
        dict(draft_dtype="bfloat16"),
        dict(draft=1),
        dict(mla=7, kda=20, draft=0),
        dict(mla=2, kda=2, draft=2),
        dict(mla=2, kda=2, draft=0),
    ],
    ids=["no-draft", "bf16-draft", "mtp", "kimi-linear", "tiny-draft", "tiny"],
)
def test_other_layer_counts_keep_vllms_groups(model, layers):
    layers = specs(**layers)
    expected = stock(layers)
    assert group(layers, model=model) == expected
    assert regroup(expected, list(layers)) is expected
    # What is kept either leaves little empty, or would need very many groups.
    assert max(empty_shares(expected).values()) <= MAX_EMPTY or len(layers) == 94


def test_a_small_model_whose_mla_layers_lie_in_three_groups():
    layers = specs(mla=4, kda=8, draft=2)
    assert [len(one.layer_names) for one in stock(layers)] == [8, 6]
    assert [len(one.layer_names) for one in group(layers)] == [2] * 7


def test_mla_layers_that_vllm_gave_two_specs_are_divided_together():
    """One of vLLM's MLA groups has no draft layer, hence a spec of its own."""
    layers = specs(mla=7, kda=5, draft=1)
    assert len({one.kv_cache_spec for one in stock(layers)}) == 3
    groups = group(layers)
    assert [len(one.layer_names) for one in groups] == [1] * 13
    (spec,) = {
        one.kv_cache_spec
        for one in groups
        if isinstance(one.kv_cache_spec, MLAAttentionSpec)
    }
    assert spec.non_causal_multi_token_decode


def test_there_are_never_many_small_groups():
    """13 and 31 fit only one layer a group: 44 groups would cost every step."""
    layers = specs(mla=13, kda=31, draft=0)
    assert max(empty_shares(stock(layers)).values()) > MAX_EMPTY
    assert group(layers) == stock(layers) and len(stock(layers)) <= MAX_GROUPS


def test_recurrent_state_without_mla_layers_is_left_alone():
    layers = {f"one.{i}": kda_spec(64) for i in range(12)}
    layers |= {f"eight.{i}": kda_spec(64, speculative=7) for i in range(20)}
    groups = stock(layers)
    assert max(empty_shares(groups).values()) > MAX_EMPTY
    assert regroup(groups, list(layers)) is groups


def attention_spec(window=None):
    options = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    if window is None:
        return FullAttentionSpec(**options)
    return SlidingWindowSpec(**options, sliding_window=window)


@pytest.mark.parametrize(
    ("full", "others"),
    [
        (12, {f"window.{i}": attention_spec(1024) for i in range(20)}),
        (13, {f"window.{i}": attention_spec(128) for i in range(12)}),
        (12, {f"state.{i}": kda_spec(16) for i in range(20)}),
    ],
    ids=["gemma-like", "gpt-oss-eagle", "attention-and-state"],
)
def test_layers_of_other_models_are_left_alone(full, others):
    layers = {f"full.{i}": attention_spec() for i in range(full)} | others
    groups = stock(layers)
    assert max(empty_shares(groups).values()) > MAX_EMPTY
    before = list(groups)
    assert regroup(groups, list(layers)) is groups and groups == before


def request_shares(groups, layers, tokens):
    """Blocks' bytes of one request, and the share of them that no layer uses."""
    config = make_config(max_model_len=tokens)
    held = planning._max_memory_usage_bytes_from_groups(
        get_kv_cache_config_builder(config), config, groups
    )
    used = planning.max_memory_usage_bytes(config, layers.values())
    return held, round(100 * (1 - used / held), 1)


K = 1024


@pytest.mark.parametrize(
    ("block", "drafts", "tokens", "vllm_percent", "percent", "change"),
    [
        (8192, 7, 8 * K, 19.9, 1.5, -18.6),
        (8192, 7, 32 * K, 17.7, 1.8, -16.3),
        (8192, 7, 128 * K, 12.4, 2.3, -10.3),
        (8192, 7, 1024 * K, 3.3, 3.1, -0.2),
        (8192, 0, 8 * K, 15.5, 2.0, -13.8),
        (8192, 0, 32 * K, 8.9, 2.6, -6.4),
        (8192, 0, 128 * K, 3.3, 3.1, -0.2),
        (8192, 0, 1024 * K, 0.5, 3.3, 2.9),
        (1536, 7, 8 * K, 16.6, 1.9, -14.9),
        (1536, 7, 32 * K, 10.8, 2.5, -8.5),
        (1536, 7, 128 * K, 4.5, 3.0, -1.6),
        (1536, 7, 136 * 1536, 3.1, 3.1, 0.0),
        (1536, 7, 1024 * K, 0.7, 3.3, 2.7),
    ],
)
def test_what_a_request_wastes(block, drafts, tokens, vllm_percent, percent, change):
    """Slots are not bytes: the longer a request, the more its MLA layers weigh.

    The percentages are of the bytes that a request of `tokens` holds, with vLLM's
    groups and with ours; `change` is what ours add to these bytes. `drafts` is how many
    states a KDA layer keeps beyond one: none without speculation, or with RecoverSSM.
    """
    layers = specs(block=block, speculative=drafts)
    before, wasted = request_shares(stock(layers), layers, tokens)
    after, wasted_now = request_shares(group(layers), layers, tokens)
    assert (wasted, wasted_now) == (vllm_percent, percent)
    assert round(100 * (after / before - 1), 1) == change
    # However long: no more than the larger share of the two kinds.
    assert wasted_now <= 100 * MAX_EMPTY


def make_manager(groups, block):
    return KVCacheManager(
        KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=64 * block,
        scheduler_block_size=block,
        hash_block_size=block,
        enable_caching=True,
    )


def make_request(name, tokens, block):
    parameters = SamplingParams(max_tokens=8)
    parameters.update_from_generation_config({}, eos_token_id=1)
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=parameters,
        pooling_params=None,
        block_hasher=get_request_block_hasher(block, sha256),
    )


def hit_length(groups, block):
    """Tokens that a request finds cached of one before it with a common start."""
    manager = make_manager(groups, block)
    first = make_request("first", list(range(5 * block)), block)
    for end in range(block, 5 * block + 1, block):
        assert manager.allocate_slots(first, block) is not None
        first.num_computed_tokens = end
        manager.new_step_starts()
    manager.free(first)
    again = list(range(3 * block)) + [7] * (2 * block)
    blocks, found, _ = manager.get_computed_blocks(make_request("2", again, block))
    for one in blocks.blocks:
        assert len(one) == found // block
    return found


def test_prefix_hits_are_as_long_as_with_vllms_groups():
    init_none_hash(sha256)
    layers = specs(block=64, speculative=7, mode="align")
    found = hit_length(group(layers, mode="align"), 64)
    assert found == hit_length(stock(layers), 64) == 3 * 64
