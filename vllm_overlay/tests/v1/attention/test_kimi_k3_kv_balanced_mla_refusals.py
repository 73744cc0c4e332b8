# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What ``KIMI_K3_KV_BALANCED_MLA`` refuses, at construction and at a call."""

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
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


def call(impl, q, metadata, cache=None):
    if cache is None:
        cache, _ = utils.make_cache([10])
    return impl.forward_mqa(q, cache, metadata, utils.make_layer())


def metadata_of(requests, qlen):
    table = torch.zeros(requests, 1, dtype=torch.int32)
    return utils.make_metadata([1] * requests, qlen, table)


# --- construction -----------------------------------------------------------------


def test_unsupported_shape_is_refused_when_built(monkeypatch):
    utils.install_fake_core(
        monkeypatch,
        refuse=lambda heads, qlen: "8 are too many" if qlen == 8 else None,
    )
    config = utils.make_config(speculative=7, dcp=2)
    with pytest.raises(ValueError, match="8 query tokens of 6 heads") as error:
        utils.make_impl(config, num_heads=3)
    for part in ("8 are too many", "num_speculative_tokens", "3 of this rank"):
        assert part in str(error.value)


def test_too_many_requests_are_refused_when_built(monkeypatch):
    utils.install_fake_core(monkeypatch, max_requests=32)
    utils.make_impl(utils.make_config(max_num_seqs=32))
    with pytest.raises(ValueError, match="lower max_num_seqs to 32") as error:
        utils.make_impl(utils.make_config(max_num_seqs=33))
    assert "got max_num_seqs=33" in str(error.value)


def test_unsupported_features_are_refused_together(core):
    with pytest.raises(NotImplementedError) as error:
        utils.make_impl(
            utils.make_config(),
            alibi_slopes=[1.0],
            sliding_window=128,
            logits_soft_cap=30.0,
            attn_type="encoder",
            kv_cache_dtype="auto",
            kv_lora_rank=256,
        )
    for part in (
        "alibi_slopes",
        "sliding_window=128",
        "logits_soft_cap=30.0",
        "attn_type='encoder'",
        "kv_cache_dtype='auto'",
        "--kv-cache-dtype fp8",
        "kv_lora_rank=256",
    ):
        assert part in str(error.value)


# --- call -------------------------------------------------------------------------


def test_query_tuple(core):
    impl = utils.make_impl(utils.make_config())
    q = (torch.zeros(1, 4, 512), torch.zeros(1, 4, 64))
    with pytest.raises(ValueError, match=r"\(nope, pe\) tuple"):
        call(impl, q, metadata_of(1, 1))


@pytest.mark.parametrize(
    ("q", "match"),
    [
        (torch.zeros(2, 4, 576, dtype=torch.bfloat16), "bfloat16, it must be"),
        (
            torch.zeros(2, 3, 576).to(utils.FP8),
            r"shape \(2, 3, 576\).*\[tokens, 4, 576",
        ),
        (torch.zeros(2, 4, 512).to(utils.FP8), r"shape \(2, 4, 512\)"),
        (torch.zeros(2, 4, 1152).to(utils.FP8)[..., ::2], "not contiguous"),
        (
            torch.zeros(2 * 4 * 576 + 4).to(utils.FP8)[4:].view(2, 4, 576),
            "starts at byte 4 of a 16-byte line, it must start at byte 0",
        ),
    ],
)
def test_wrong_query(core, q, match):
    impl = utils.make_impl(utils.make_config())
    with pytest.raises(ValueError, match=match):
        call(impl, q, metadata_of(2, 1))
    assert core.count("decode") == 0


def test_query_length_not_uniform(core):
    impl = utils.make_impl(utils.make_config(speculative=7))
    metadata = metadata_of(2, 8)
    with pytest.raises(ValueError, match="not uniform: 11 query tokens over 2"):
        call(impl, utils.make_query(11, 4), metadata)
    # Without the builder's own field the length follows from the token count.
    del metadata.decode.query_len
    object.__setattr__(metadata.decode, "query_len", None)
    with pytest.raises(ValueError, match="not uniform"):
        call(impl, utils.make_query(11, 4), metadata)


def test_query_length_above_the_planned_one(core):
    impl = utils.make_impl(utils.make_config(speculative=4))
    with pytest.raises(ValueError, match="query length is 6, at most 5"):
        call(impl, utils.make_query(6, 4), metadata_of(1, 6))


def test_too_many_requests(core):
    impl = utils.make_impl(utils.make_config(max_num_seqs=2))
    with pytest.raises(ValueError, match="3 requests, at most max_num_seqs=2"):
        call(impl, utils.make_query(3, 4), metadata_of(3, 1))


def test_all_reasons_in_one_error(core):
    impl = utils.make_impl(utils.make_config(max_num_seqs=2, speculative=1))
    q = torch.zeros(14, 3, 1000)[..., ::2]
    with pytest.raises(ValueError) as error:
        call(impl, q, metadata_of(3, 4))
    for part in (
        "torch.float32",
        "shape (14, 3, 500)",
        "not contiguous",
        "not uniform",
        "query length is 4, at most 2",
        "3 requests, at most max_num_seqs=2",
        "There is no fallback",
    ):
        assert part in str(error.value)
    assert core.count("plan") == core.count("decode") == core.count("build") == 0


def test_a_new_shape_inside_capture_is_refused(core, monkeypatch):
    impl = utils.make_impl(utils.make_config(speculative=7))
    cache, table = utils.make_cache([10])
    metadata = utils.make_metadata([10], 8, table)
    q = utils.make_query(8, 4)
    monkeypatch.setattr(decode_module, "_is_capturing", lambda: True)
    with pytest.raises(ValueError, match="once eagerly before capturing"):
        call(impl, q, metadata, cache)
    assert core.count("build") == core.count("plan") == 0
    monkeypatch.setattr(decode_module, "_is_capturing", lambda: False)
    call(impl, q, metadata, cache)
    monkeypatch.setattr(decode_module, "_is_capturing", lambda: True)
    call(impl, q, metadata, cache)
    assert core.count("build") == 1


# --- JIT warm-up ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculative", "non_causal", "lengths"),
    [(0, False, [1]), (4, False, [1, 2, 3, 4, 5]), (7, True, [7, 8])],
)
def test_warm_up_builds_every_kernel_that_a_step_can_ask_for(
    core, speculative, non_causal, lengths
):
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    config = utils.make_config(speculative=speculative, non_causal=non_causal)
    registry = JitWarmupRegistry(config)
    with registry.activate():
        for _ in range(3):
            impl = utils.make_impl(config)
            impl.decode.register_warmup()
    assert len(registry) == 1 and core.count("build") == 0
    registry.warmup()
    built = [entry[1:] for entry in core.log]
    assert built == [(4, q, 16, not non_causal) for q in lengths]
    cache, table = utils.make_cache([10])
    for qlen in lengths:
        metadata = utils.make_metadata([10], qlen, table, causal=not non_causal)
        call(impl, utils.make_query(qlen, 4), metadata, cache)
    assert core.count("build") == len(lengths)
