# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3 with a DSpark draft, both on ``KIMI_K3_KV_BALANCED_MLA``, in vLLM's groups.

Kimi K3's own attention layers, their specs, vLLM's grouping of KV caches, its attention
groups, builders and step metadata are the real ones; the KDA layers only bring their
cache specs, and the kernel is a CPU stand-in.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.models.kimi_k3.nvidia import mla
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import backend as backend_module
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker import workspace
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
    init_attn_backend,
)

pytestmark = pytest.mark.skip_global_cleanup

HEADS = 12
BLOCK = 1024
# Two KDA layers make groups of two: the MLA layers lie in three of them.
TARGET = tuple(f"model.layers.{i}.self_attn" for i in (1, 3, 4, 5))
DRAFT = tuple(f"model.layers.{i}.self_attn" for i in (6, 7))
KDA = tuple(f"model.layers.{i}.self_attn" for i in (0, 2))


class PrefillBackend:
    """Stands in for the layer's prefill backend."""

    def __init__(self, **kwargs):
        pass

    def clone(self):
        return self

    def get_name(self):
        return "fake"


class KdaBuilder:
    """Stands in for the KDA layers' builder, which needs a GPU."""

    requires_block_table_width = False
    supports_update_block_table = False

    def __init__(self, *args):
        pass

    def build(self, *args, **kwargs):
        return None

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return AttentionCGSupport.ALWAYS


class KdaBackend:
    @staticmethod
    def get_builder_cls():
        return KdaBuilder

    @classmethod
    def full_cls_name(cls):
        return (cls.__module__, cls.__qualname__)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return []


class KdaLayer(AttentionLayerBase):
    def get_attn_backend(self):
        return KdaBackend

    def get_kv_cache_spec(self, vllm_config):
        return kda_spec(BLOCK * utils.HEAD)


def kda_spec(page_bytes):
    return MambaSpec(
        block_size=8192,
        shapes=((3 * 1024, 3), (8, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page_bytes,
    )


@pytest.fixture
def core(monkeypatch):
    return utils.install_fake_core(monkeypatch)


@pytest.fixture
def one_rank(tmp_path):
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    workspace.init_workspace_manager(utils.CPU, num_lanes=2)
    with utils.small_tensors(), set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()
    workspace.reset_workspace_manager()


def make_layer(config, name, draft):
    with set_current_vllm_config(config):
        layer = mla.MultiHeadLatentAttention(
            KimiLinearConfig(hidden_size=256, num_attention_heads=HEADS, head_dim=64),
            256,
            HEADS,
            128,
            64,
            128,
            q_lora_rank=128,
            kv_lora_rank=512,
            cache_config=config.cache_config,
            prefix=name,
            use_rope=draft,
            non_causal_multi_token_decode=draft,
        )
    config.compilation_config.static_forward_context[name] = layer
    return layer


@pytest.fixture(params=[False])
def engine(core, monkeypatch, one_rank, request):
    """Target and draft as the runner has them when it makes attention groups.

    The parameter turns adaptive verification on.
    """
    adaptive = request.param
    config = utils.make_config(speculative=7, adaptive=adaptive)
    draft_config = utils.make_config(speculative=7, adaptive=adaptive, non_causal=True)
    draft_config.compilation_config = config.compilation_config
    for one in (config, draft_config):
        one.cache_config.cache_dtype, one.cache_config.block_size = "fp8", BLOCK
        one.cache_config.kv_cache_layout = "LBNHC"
    monkeypatch.setattr(
        mla,
        "get_attn_backend",
        lambda *args, **kwargs: backend_module.KimiK3KvBalancedMLABackend,
    )
    monkeypatch.setattr(mla, "get_mla_prefill_backend", lambda _: PrefillBackend)
    layers = {name: KdaLayer() for name in KDA}
    layers |= {name: make_layer(config, name, False) for name in TARGET}
    with workspace.use_workspace_lane(1):
        layers |= {name: make_layer(draft_config, name, True) for name in DRAFT}
    config.compilation_config.static_forward_context.update(layers)
    for one in (config, draft_config):
        one.model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=8192,
            get_num_attention_heads=lambda _: HEADS,
            get_head_size=lambda: utils.HEAD,
            is_encoder_decoder=False,
        )
    specs = {name: layers[name].get_kv_cache_spec(config) for name in sorted(layers)}
    groups = get_kv_cache_groups(config, specs)
    cache_config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups
    )
    return SimpleNamespace(
        config=config, draft_config=draft_config, layers=layers, caches=cache_config
    )


def step_metadata(engine, groups, lengths, qlen, table, causal):
    """One step's metadata by layer name, as the runner or the speculator builds it."""
    requests = len(lengths)
    starts = torch.arange(requests + 1, dtype=torch.int32) * qlen
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    count = len(engine.caches.kv_cache_groups)
    return build_attn_metadata(
        attn_groups=groups,
        num_reqs=requests,
        num_tokens=requests * qlen,
        query_start_loc_gpu=starts,
        query_start_loc_cpu=starts,
        max_query_len=qlen,
        seq_lens=seq_lens,
        max_seq_len=max(lengths),
        block_tables=[table] * count,
        slot_mappings=torch.zeros(count, requests * qlen, dtype=torch.int64),
        kv_cache_config=engine.caches,
        seq_lens_cpu_upper_bound=seq_lens,
        causal=causal,
    )


def run(engine, config, names, metadata, cache, q):
    outs = []
    with utils.forward(config):
        for name in names:
            layer = engine.layers[name]
            outs.append(layer.impl.forward_mqa(q, cache, metadata[name], layer)[0])
    return outs


def draft_groups(engine):
    return init_attn_backend(
        engine.caches, engine.draft_config, utils.CPU, active_layer_names=set(DRAFT)
    )[0]


def test_vllm_puts_target_and_draft_into_one_attention_group(engine):
    """What the runner really does; the tests below stand on it."""
    groups, support, _ = init_attn_backend(engine.caches, engine.config, utils.CPU)
    names = [group.layer_names for row in groups for group in row]
    assert [TARGET[1], DRAFT[0]] in names and [TARGET[2], DRAFT[1]] in names
    assert [TARGET[0], TARGET[3]] in names
    assert support.min_cg_support is AttentionCGSupport.UNIFORM_BATCH


def test_causal_target_and_non_causal_draft_in_one_server(engine, core):
    target = init_attn_backend(engine.caches, engine.config, utils.CPU)[0]
    draft = draft_groups(engine)
    lengths = [200, 64]
    cache, table = utils.make_cache(lengths)
    q = utils.make_query(2 * 7, HEADS)
    scale = engine.layers[TARGET[0]].impl.scale
    results = {}
    for causal, config, groups, names, lane in (
        (True, engine.config, target, TARGET, 0),
        (False, engine.draft_config, draft, DRAFT, 1),
    ):
        metadata = step_metadata(engine, groups, lengths, 7, table, causal)
        assert set(names) <= set(metadata)
        with workspace.use_workspace_lane(lane):
            outs = run(engine, config, names, metadata, cache, q)
        expected, _ = utils.reference_decode(
            q, cache, table, lengths, scale, causal=causal
        )
        for out in outs:
            torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
        results[causal] = expected
    # The two differ by far more than the tolerance: the mask matters here.
    assert (results[True] - results[False]).abs().max() > 0.1
    # One plan per forward, shared by its layers in three groups and in two.
    assert core.count("plan") == 2 and core.count("decode") == 4 + 2


def test_a_non_causal_step_for_causal_layers_is_refused(engine):
    groups = init_attn_backend(engine.caches, engine.config, utils.CPU)[0]
    _, table = utils.make_cache([200])
    with pytest.raises(ValueError, match="non-causal step") as error:
        step_metadata(engine, groups, [200], 8, table, False)
    assert TARGET[0] in str(error.value) and DRAFT[0] not in str(error.value)


def test_causality_by_request_is_refused(engine):
    _, table = utils.make_cache([200])
    with pytest.raises(ValueError, match="one causality for a whole step"):
        step_metadata(
            engine, draft_groups(engine), [200], 8, table, torch.tensor([False])
        )


def test_target_and_draft_kernels_are_warmed_up_before_capture(
    engine, core, monkeypatch
):
    """The runner collects warm-ups around its builders; nothing is left to compile."""
    registry = JitWarmupRegistry(engine.config)
    with registry.activate():
        target = init_attn_backend(engine.caches, engine.config, utils.CPU)[0]
    draft = draft_groups(engine)
    registry.warmup()
    built = {entry[1:] for entry in core.log if entry[0] == "build"}
    expected = {(HEADS, q, 16, True) for q in range(1, 9)}
    assert built == expected | {(HEADS, q, 16, False) for q in (7, 8)}
    monkeypatch.setattr(decode_module, "_is_capturing", lambda: True)
    cache, table = utils.make_cache([200])
    for qlen, causal, config, groups, names, lane in (
        (8, True, engine.config, target, TARGET, 0),
        (7, False, engine.draft_config, draft, DRAFT, 1),
    ):
        metadata = step_metadata(engine, groups, [200], qlen, table, causal)
        with workspace.use_workspace_lane(lane):
            run(engine, config, names, metadata, cache, utils.make_query(qlen, HEADS))
    assert core.count("build") == len(built)


def test_nothing_is_registered_when_warm_up_is_off(engine):
    engine.config.kernel_config.enable_jit_warmup = False
    registry = JitWarmupRegistry(engine.config)
    with registry.activate():
        init_attn_backend(engine.caches, engine.config, utils.CPU)
    assert len(registry) == 0


# --- adaptive verification --------------------------------------------------------


@pytest.mark.parametrize("engine", [True, False], indirect=True)
def test_the_runners_checks_of_adaptive_verification(engine):
    groups = init_attn_backend(engine.caches, engine.config, utils.CPU)[0]
    targets = set(TARGET)
    assert get_query_lens_mismatch_unsupported_backend(groups, targets) is None
    unsupported = get_varlen_cudagraph_unsupported_backend(
        groups, engine.config, 8, targets
    )
    if engine.config.speculative_config.enable_adaptive_verification:
        assert unsupported is None
    else:
        assert unsupported == ("KimiK3KvBalancedMLABackend", None)


@pytest.mark.parametrize("engine", [True], indirect=True)
def test_only_the_targets_steps_are_trimmed(engine):
    target = init_attn_backend(engine.caches, engine.config, utils.CPU)[0]
    lengths = [200, 64]
    _, table = utils.make_cache(lengths)
    for groups, names, causal, trimmed in (
        (target, TARGET, True, True),
        (draft_groups(engine), DRAFT, False, False),
    ):
        metadata = step_metadata(engine, groups, lengths, 7, table, causal)
        for name in names:
            decode = metadata[name].decode
            assert (decode.query_start_loc is not None) is trimmed
            assert decode.query_len == (8 if trimmed else 7)
