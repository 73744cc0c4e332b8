# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How ``KIMI_K3_KV_BALANCED_MLA`` is found, what it says of itself and refuses."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import AttentionConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import backend as backend_module
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

pytestmark = pytest.mark.skip_global_cleanup

Backend = backend_module.KimiK3KvBalancedMLABackend
HOPPER = DeviceCapability(9, 0)


def kimi_config(**overrides):
    text = dict(model_type="kimi_linear", kv_lora_rank=512, qk_rope_head_dim=64)
    text.update(overrides)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**text))
    )


@pytest.fixture(autouse=True)
def _kimi_on_a_machine_with_the_dsl(monkeypatch):
    monkeypatch.setattr(
        backend_module, "get_current_vllm_config_or_none", lambda: kimi_config()
    )
    monkeypatch.setattr(backend_module, "_dsl_reason", lambda: None)


def reasons(**overrides):
    """What the selector's own check answers for Kimi K3 on an H200, with changes."""
    options = dict(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="fp8",
        block_size=None,
        use_mla=True,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=HOPPER,
        attn_type="decoder",
    )
    options.update(overrides)
    return Backend.validate_configuration(**options)


# --- found by name ----------------------------------------------------------------


def test_the_registry_resolves_the_class():
    member = AttentionBackendEnum.KIMI_K3_KV_BALANCED_MLA
    assert member.get_class() is Backend
    assert Backend.get_name() == member.name
    assert AttentionConfig(backend="kimi_k3_kv_balanced_mla").backend is member


def test_a_fresh_process_imports_it_without_gpu_and_without_the_dsl():
    """Blocks the CuTe DSL and hides the GPU; the name must resolve all the same."""
    code = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Packages that bring the DSL along by themselves are none of this backend's business,
# so what counts is what this import adds.
import vllm.model_executor.layers.attention.mla_attention
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "cuda", "tvm_ffi"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
print(AttentionBackendEnum["KIMI_K3_KV_BALANCED_MLA"].get_class().get_name())
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] == "KIMI_K3_KV_BALANCED_MLA"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_no_automatic_choice_contains_it(capability):
    cuda = pytest.importorskip(
        "vllm.platforms.cuda", reason="needs the compiled extension", exc_type=Exception
    )
    for head_size in (512, 576):
        priorities = cuda._get_backend_priorities(
            True,
            DeviceCapability(*capability),
            num_heads=12,
            kv_cache_dtype="fp8",
            head_size=head_size,
        )
        assert AttentionBackendEnum.KIMI_K3_KV_BALANCED_MLA not in priorities


# --- what it says of itself -------------------------------------------------------


def test_capabilities():
    impl, builder = Backend.get_impl_cls(), Backend.get_builder_cls()
    assert Backend.supported_dtypes == [torch.bfloat16]
    assert Backend.supported_kv_cache_dtypes == ["fp8", "fp8_e4m3"]
    assert Backend.get_supported_head_sizes() == [576]
    assert Backend.get_supported_kernel_block_sizes() == [MultipleOf(64)]
    assert Backend.is_mla() and not Backend.is_sparse()
    assert Backend.supports_non_causal() and Backend.supports_non_causal_dcp()
    assert Backend.supports_dcp() and not Backend.supports_pcp()
    assert impl.can_return_lse_for_decode and not impl.lse_base_on_e
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert builder.query_len_support is QueryLenSupport.UNIFORM
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH


def test_the_cuda_graph_table_lists_it():
    page = Path(__file__).parents[3] / "docs" / "design" / "cuda_graphs.md"
    if not page.exists():
        pytest.skip("the documentation is not beside these tests")
    (row,) = [
        line
        for line in page.read_text().splitlines()
        if line.startswith("| KimiK3KvBalancedMLA |")
    ]
    assert AttentionCGSupport.UNIFORM_BATCH.name in row


def test_signatures_are_those_of_the_base_classes():
    for cls, base, names in (
        (Backend.get_impl_cls(), MLACommonImpl, ["forward_mqa"]),
        (Backend.get_builder_cls(), MLACommonMetadataBuilder, ["_build_decode"]),
        (Backend, Backend.__mro__[2], ["supports_combination"]),
    ):
        for name in names:
            mine = inspect.signature(getattr(cls, name)).parameters
            assert list(mine) == list(inspect.signature(getattr(base, name)).parameters)


# --- reasons ----------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("block_size", [None, 64, 128, 1536])
@pytest.mark.parametrize("use_dcp", [False, True])
@pytest.mark.parametrize("use_non_causal", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_kimi_k3_on_hopper_fits(
    kv_cache_dtype, block_size, use_dcp, use_non_causal, adaptive
):
    assert not reasons(
        use_adaptive_verification=adaptive,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        use_dcp=use_dcp,
        use_non_causal=use_non_causal,
    )


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"device_capability": DeviceCapability(8, 0)}, ["Hopper", "8.0"]),
        ({"device_capability": DeviceCapability(10, 0)}, ["Hopper", "10.0"]),
        ({"device_capability": DeviceCapability(12, 0)}, ["Hopper", "12.0"]),
        ({"kv_cache_dtype": "auto"}, ["'auto'", "--kv-cache-dtype fp8"]),
        ({"kv_cache_dtype": "bfloat16"}, ["'bfloat16'", "E4M3"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["'fp8_e5m2'"]),
        ({"kv_cache_dtype": "fp8_ds_mla"}, ["'fp8_ds_mla'"]),
        ({"head_size": 512}, ["512 + 64 = 576 values, got 512"]),
        ({"dtype": torch.float16}, ["bfloat16 model, got torch.float16"]),
        ({"block_size": 16}, ["multiple of 64, got 16", "--block-size"]),
        ({"block_size": 96}, ["multiple of 64, got 96"]),
        ({"use_sparse": True}, ["sparse not supported"]),
        ({"use_mla": False}, ["non-MLA not supported"]),
        ({"has_sink": True}, ["sinks"]),
        ({"use_pcp": True}, ["PCP not supported"]),
        ({"use_batch_invariant": True}, ["batch invariance"]),
        ({"attn_type": "encoder"}, ["encoder"]),
    ],
)
def test_a_misfit_has_its_reason(overrides, parts):
    found = reasons(**overrides)
    assert found and all(isinstance(reason, str) for reason in found)
    for part in parts:
        assert part in " | ".join(found)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (kimi_config(model_type="deepseek_v3"), ["Kimi K3", "'deepseek_v3'"]),
        (kimi_config(kv_lora_rank=256), ["kv_lora_rank 512", "got 256 and 64"]),
        (kimi_config(qk_rope_head_dim=0), ["qk_rope_head_dim 64", "got 512 and 0"]),
    ],
)
def test_another_model_has_its_reason(monkeypatch, config, parts):
    monkeypatch.setattr(
        backend_module, "get_current_vllm_config_or_none", lambda: config
    )
    (found,) = reasons()
    for part in parts:
        assert part in found


def test_missing_dsl_has_its_reason(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(backend_module, "get_current_vllm_config_or_none", lambda: None)
    monkeypatch.setattr(backend_module.importlib.util, "find_spec", lambda name: None)
    (found,) = reasons()
    assert "CuTe DSL" in found and "pip install nvidia-cutlass-dsl" in found


def test_all_reasons_come_at_once():
    found = " | ".join(
        reasons(
            device_capability=DeviceCapability(10, 0),
            kv_cache_dtype="auto",
            head_size=512,
            block_size=16,
        )
    )
    for part in ("Hopper", "--kv-cache-dtype fp8", "got 512", "got 16"):
        assert part in found


@pytest.mark.parametrize(
    ("capability", "overrides", "reason"),
    [
        (HOPPER, {}, None),
        (HOPPER, {"kv_cache_dtype": "auto"}, "start with --kv-cache-dtype fp8"),
        (HOPPER, {"head_size": 512}, "got 512"),
        (HOPPER, {"use_pcp": True}, "PCP not supported"),
        (DeviceCapability(10, 0), {}, "this GPU has 10.0"),
    ],
)
def test_the_platforms_selection_answers_with_the_reason(capability, overrides, reason):
    """The path of ``--attention-backend``, on a CUDA platform of each capability."""
    cuda = pytest.importorskip(
        "vllm.platforms.cuda", reason="needs the compiled extension", exc_type=Exception
    )

    answer = classmethod(lambda cls, device_id=0: capability)
    platform: Any = type(
        "Platform", (cuda.CudaPlatformBase,), {"get_device_capability": answer}
    )
    options = dict(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="fp8",
        block_size=None,
        use_mla=True,
    )
    options.update(overrides)
    config = AttentionSelectorConfig(**options)
    member = AttentionBackendEnum.KIMI_K3_KV_BALANCED_MLA
    if reason is None:
        path = platform.get_attn_backend_cls(member, config, num_heads=12)
        assert path == f"{Backend.__module__}.{Backend.__qualname__}"
        return
    with pytest.raises(ValueError, match="Selected backend.*not valid") as error:
        platform.get_attn_backend_cls(member, config, num_heads=12)
    assert reason in str(error.value)
