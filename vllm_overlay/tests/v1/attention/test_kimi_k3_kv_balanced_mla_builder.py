# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``KIMI_K3_KV_BALANCED_MLA``'s metadata builder, and steps built by it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.model_executor.layers.attention import mla_attention
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.backend import (
    KimiK3KvBalancedMLAMetadataBuilder as Builder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace

pytestmark = pytest.mark.skip_global_cleanup


@pytest.fixture(autouse=True)
def _workspace():
    workspace.init_workspace_manager(utils.CPU)
    with utils.small_tensors():
        yield
    workspace.reset_workspace_manager()


@pytest.fixture
def core(monkeypatch):
    return utils.install_fake_core(monkeypatch)


class PrefillBackend:
    """Stands in for the layer's prefill backend."""

    def clone(self):
        return self

    def get_name(self):
        return "fake"

    def prepare_metadata(self, metadata):
        self.prepared = metadata


def layer(non_causal=False):
    return SimpleNamespace(
        non_causal_multi_token_decode=non_causal,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        prefill_backend=PrefillBackend(),
        dcp_manager=None,
    )


def make_builder(
    *, speculative=7, dcp=1, interleave=1, layers=None, names=None, adaptive=False
):
    layers = layers or {"target": layer()}
    speculative_config = None
    if speculative:
        speculative_config = SimpleNamespace(
            method="dspark",
            num_speculative_tokens=speculative,
            parallel_drafting=True,
            enable_adaptive_verification=adaptive,
        )
    config = SimpleNamespace(
        speculative_config=speculative_config,
        use_v2_model_runner=True,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=interleave,
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=128,
            get_num_attention_heads=lambda _: 12,
            get_head_size=lambda: utils.HEAD,
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8", block_size=64),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
    )
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=utils.HEAD, dtype=torch.uint8
    )
    return Builder(spec, names or list(layers), config, utils.CPU)


def common(query_lens, seq_lens, *, num_tokens=None, causal=True, table=None):
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    requests = len(query_lens)
    if table is None:
        table = torch.zeros(requests, 70, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=requests,
        num_actual_tokens=int(starts[-1]) if num_tokens is None else num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        causal=causal,
        seq_lens_cpu_upper_bound=lengths,
    )


# --- sorting ----------------------------------------------------------------------


def test_decode_threshold_is_the_longest_query():
    assert make_builder(speculative=7).reorder_batch_threshold == 8
    assert make_builder(speculative=0).reorder_batch_threshold == 1


def test_uniform_verify_batch():
    metadata = make_builder().build(0, common([8, 8, 8], [100, 9, 64]))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 24)
    assert metadata.num_prefills == 0 and metadata.prefill is None
    assert metadata.decode.query_len == 8 and metadata.causal


def test_steps_without_drafts_have_query_length_one():
    metadata = make_builder().build(0, common([1, 1], [100, 9]))
    assert metadata.num_decodes == 2 and metadata.decode.query_len == 1


def test_mixed_lengths_leave_a_uniform_decode_batch():
    metadata = make_builder().build(0, common([8, 8, 3, 1, 0], [4096, 70, 3, 1, 0]))
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (2, 16)
    assert metadata.decode.query_len == 8
    assert metadata.num_prefills == 3
    assert metadata.prefill.q_data_type == torch.bfloat16


def test_prefill_behind_decodes():
    metadata = make_builder().build(0, common([8, 8, 300], [100, 70, 300]))
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.decode.query_len == 8
    assert metadata.prefill.query_lens_cpu.tolist() == [300]


def test_graph_padding_counts_as_decodes():
    metadata = make_builder().build(
        0, common([8, 8, 8, 0], [100, 9, 64, 0], num_tokens=32)
    )
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (4, 32)
    assert metadata.decode.query_len == 8


def test_capture_metadata_is_decode_only():
    metadata = make_builder().build_for_cudagraph_capture(common([8] * 4, [0] * 4))
    assert metadata.num_decodes == 4 and metadata.prefill is None
    with pytest.raises(AssertionError):
        make_builder().build_for_cudagraph_capture(common([9] * 4, [9] * 4))


def test_lengths_stay_the_runners_buffers():
    batch = common([8, 8], [100, 9])
    metadata = make_builder().build(0, batch)
    assert metadata.decode.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
    assert metadata.decode.block_table.data_ptr() == batch.block_table_tensor.data_ptr()


def test_non_causal_draft_block():
    builder = make_builder(layers={"draft": layer(non_causal=True)})
    metadata = builder.build(0, common([7, 7, 0], [90, 20, 0], causal=False))
    assert not metadata.causal
    assert metadata.num_decodes == 3 and metadata.decode.query_len == 7
    with pytest.raises(ValueError, match="non-causal step"):
        make_builder().build(0, common([7, 7], [90, 20], causal=False))


# --- groups and DSpark with DCP ---------------------------------------------------


def test_a_group_with_both_kinds_of_layers_takes_causal_steps_only():
    layers = {"target.0": layer(), "draft.0": layer(non_causal=True)}
    builder = make_builder(layers=layers)
    metadata = builder.build(0, common([8], [64]))
    assert metadata.causal and metadata.num_decodes == 1
    for build in (
        lambda batch: builder.build(0, batch),
        builder.build_for_cudagraph_capture,
    ):
        with pytest.raises(ValueError, match="draft's layers alone") as error:
            build(common([8], [64], causal=False))
        assert "target.0" in str(error.value) and "draft.0" not in str(error.value)
    alone = make_builder(layers=layers, names=["draft.0"])
    assert not alone.build(0, common([8], [64], causal=False)).causal


@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("non_causal", [False, True])
def test_dspark_with_dcp_is_accepted(monkeypatch, non_causal, interleave):
    """Target and draft; the collective itself is not part of this test."""

    class Manager:
        def init_kv_gather(self, workspace, tokens):
            pass

    monkeypatch.setattr(mla_attention, "MLADCPManager", Manager)
    monkeypatch.setattr(
        mla_attention, "get_dcp_group", lambda: SimpleNamespace(world_size=2)
    )
    one = layer(non_causal)
    one.dcp_manager = Manager()
    builder = make_builder(dcp=2, interleave=interleave, layers={"layer": one})
    assert builder.reorder_batch_threshold == 8
    batch = common([8, 8], [300, 65], causal=not non_causal)
    batch.dcp_local_seq_lens = torch.tensor([150, 33], dtype=torch.int32)
    metadata = builder.build(0, batch)
    assert metadata.num_decodes == 2 and metadata.decode.query_len == 8
    assert metadata.decode.seq_lens.tolist() == [150, 33]
    assert metadata.decode.dcp_tot_seq_lens.tolist() == [300, 65]


# --- built steps run --------------------------------------------------------------


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_tokens"),
    [
        ([8, 8, 8], [100, 9, 64], None),
        ([8, 8, 8, 0], [100, 9, 64, 0], 32),
        ([1, 1], [100, 9], None),
        ([3, 3], [3, 200], None),
        # A dummy batch: one token, two requests.
        ([1, 0], [65, 0], None),
    ],
)
def test_built_step_matches_reference(core, query_lens, seq_lens, num_tokens):
    cache, table = utils.make_cache(seq_lens)
    metadata = make_builder().build(
        0, common(query_lens, seq_lens, num_tokens=num_tokens, table=table)
    )
    impl = utils.make_impl(utils.make_config(speculative=7))
    q = utils.make_query(metadata.num_decode_tokens, 4)
    out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    live = metadata.num_decode_tokens // metadata.decode.query_len
    expected, _ = utils.reference_decode(q, cache, table, seq_lens[:live], impl.scale)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("live", [1, 2, 15, 16])
def test_sixteen_requests_of_which_some_are_padding(core, live):
    lengths = [(37 * i) % 200 + 1 for i in range(live)] + [0] * (16 - live)
    cache, table = utils.make_cache(lengths)
    query_lens = [8] * live + [0] * (16 - live)
    metadata = make_builder().build(
        0, common(query_lens, lengths, num_tokens=128, table=table)
    )
    impl = utils.make_impl(utils.make_config(speculative=7))
    q = utils.make_query(128, 4)
    out, _ = impl.forward_mqa(q, cache, metadata, utils.make_layer())
    assert torch.all(torch.isfinite(out)) and torch.all(out[8 * live :] == 0)
    expected, _ = utils.reference_decode(q, cache, table, lengths, impl.scale)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)


def test_host_upper_bounds_are_not_used(core):
    """Async scheduling gives the host lengths as if every draft were accepted."""
    exact = [70, 129]
    cache, table = utils.make_cache([80, 140])
    outs = []
    for extra in (0, 3, 8):
        batch = common([8, 8], exact, table=table)
        batch.seq_lens_cpu_upper_bound = torch.tensor(exact, dtype=torch.int32) + extra
        batch.max_seq_len = max(exact) + extra
        metadata = make_builder().build(0, batch)
        impl = utils.make_impl(utils.make_config(speculative=7))
        q = utils.make_query(16, 4)
        outs.append(impl.forward_mqa(q, cache, metadata, utils.make_layer())[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# --- the real layer ---------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.mark.parametrize("draft", [False, True])
def test_kimi_k3s_layer_is_built_on_the_backend(core, monkeypatch, one_rank, draft):
    """The layer constructs the impl itself; its spec and the builder fit together."""
    from vllm.config import set_current_vllm_config
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import backend
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    config = utils.make_config(speculative=7, non_causal=draft)
    config.cache_config.cache_dtype, config.cache_config.block_size = "fp8", 64
    monkeypatch.setattr(
        mla,
        "get_attn_backend",
        lambda *args, **kwargs: backend.KimiK3KvBalancedMLABackend,
    )
    monkeypatch.setattr(
        mla, "get_mla_prefill_backend", lambda _: lambda **kwargs: PrefillBackend()
    )
    with set_current_vllm_config(config):
        built = mla.MultiHeadLatentAttention(
            KimiLinearConfig(hidden_size=256, num_attention_heads=12, head_dim=64),
            256,
            12,
            128,
            64,
            128,
            q_lora_rank=128,
            kv_lora_rank=512,
            cache_config=config.cache_config,
            prefix="layer",
            use_rope=draft,
            non_causal_multi_token_decode=draft,
        )
        impl: Any = built.impl
        decode = impl.decode
        assert (decode.heads, decode.max_q, decode.max_requests) == (12, 8, 16)
        # The layer quantizes the decode query because of this flag.
        assert impl.supports_quant_query_input
        config.model_config = SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=128,
            get_num_attention_heads=lambda _: 12,
            get_head_size=lambda: utils.HEAD,
        )
        spec = built.get_kv_cache_spec(config)
        assert spec.page_size_bytes == 64 * utils.HEAD
        builder = Builder(spec, ["layer"], config, utils.CPU)
    assert builder.non_causal_multi_token_decode is draft
    assert builder.q_data_type == torch.bfloat16
    assert builder.chunked_prefill_workspace.dtype == torch.bfloat16
