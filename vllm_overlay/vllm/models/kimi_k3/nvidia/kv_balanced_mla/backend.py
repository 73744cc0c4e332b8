# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention backend ``KIMI_K3_KV_BALANCED_MLA`` (Hopper, FP8 KV cache).

The decode of Kimi K3's MLA layers on a KV-balanced split-KV kernel: the target's
verify (causal, up to ``1 + num_speculative_tokens`` query tokens) and the DSpark
draft (a non-causal block), each with or without decode context parallelism.

Prefill is the layer's own; this module only decides whether the backend fits,
sorts decodes from prefills and hands decode steps to :class:`KvBalancedDecode`.
Importing it needs neither a GPU nor the CuTe DSL.
"""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.config import get_current_vllm_config_or_none
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.config import LATENT, ROPE
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.decode import (
    BACKEND_NAME,
    KvBalancedDecode,
    verifies_adaptively,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

_KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
# Kimi K3's text config; KimiK3Config wraps it, KimiLinearForCausalLM is it.
_TEXT_MODEL_TYPES = ("kimi_linear",)
_BLOCK_SIZE_MULTIPLE = 64


@dataclass
class KvBalancedDecodeMetadata(MLACommonDecodeMetadata):
    """Decode metadata of one step.

    Attributes:
        query_len: Query tokens of each decoding request, from the host's
            ``query_start_loc``. Requests that pad a CUDA graph have length 0
            there and do not count.
        query_start_loc: ``[num_decodes + 1]`` int32 on the device if only the device
            knows the query lengths, else None. They are then ``query_len`` at most.

    """

    query_len: int = 1
    query_start_loc: torch.Tensor | None = None


class KimiK3KvBalancedMLABackend(MLACommonBackend):
    """Capabilities of ``KIMI_K3_KV_BALANCED_MLA``, as the selector asks for them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["fp8", "fp8_e4m3"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @staticmethod
    def get_name() -> str:
        return "KIMI_K3_KV_BALANCED_MLA"

    @staticmethod
    def get_impl_cls() -> type["KimiK3KvBalancedMLAImpl"]:
        return KimiK3KvBalancedMLAImpl

    @staticmethod
    def get_builder_cls() -> type["KimiK3KvBalancedMLAMetadataBuilder"]:
        return KimiK3KvBalancedMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major == 9

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Adaptive verification trims the lengths on the device: see trimmed.py.
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Say in one string all that does not fit, or None.

        The base class reports the same refusals as bare words ("dtype not
        supported"); these sentences add what was found and what to change.
        """
        reasons = [
            reason
            for reason in (
                _device_reason(device_capability),
                _kv_cache_dtype_reason(kv_cache_dtype),
                _shape_reason(head_size, dtype, block_size),
                _model_reason(),
                _dsl_reason(),
            )
            if reason is not None
        ]
        return "; ".join(reasons) or None


def _device_reason(capability: DeviceCapability) -> str | None:
    if capability.major == 9:
        return None
    return (
        f"{BACKEND_NAME} is a Hopper kernel (compute capability 9.0), this GPU has "
        f"{capability.as_version_str()}: choose another --attention-backend"
    )


def _kv_cache_dtype_reason(kv_cache_dtype: str | None) -> str | None:
    if kv_cache_dtype is None or kv_cache_dtype in _KV_CACHE_DTYPES:
        return None
    return (
        f"{BACKEND_NAME} reads an FP8 E4M3 KV cache only, got kv_cache_dtype="
        f"{kv_cache_dtype!r}: start with --kv-cache-dtype fp8"
    )


def _shape_reason(
    head_size: int, dtype: torch.dtype, block_size: int | None
) -> str | None:
    wrong = []
    if head_size != LATENT + ROPE:
        wrong.append(
            f"a cache row of {LATENT} + {ROPE} = {LATENT + ROPE} values, got "
            f"{head_size}"
        )
    if dtype != torch.bfloat16:
        wrong.append(f"a bfloat16 model, got {dtype} (set --dtype bfloat16)")
    if block_size is not None and block_size % _BLOCK_SIZE_MULTIPLE:
        wrong.append(
            f"a KV block size that is a multiple of {_BLOCK_SIZE_MULTIPLE}, got "
            f"{block_size} (set --block-size)"
        )
    return f"{BACKEND_NAME} needs " + " and ".join(wrong) if wrong else None


def _model_reason() -> str | None:
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None or vllm_config.model_config is None:
        return None
    text_config = vllm_config.model_config.hf_text_config
    model_type = getattr(text_config, "model_type", None)
    if model_type not in _TEXT_MODEL_TYPES:
        return (
            f"{BACKEND_NAME} serves Kimi K3 (text model_type "
            f"{' or '.join(_TEXT_MODEL_TYPES)}), got {model_type!r}: choose another "
            "--attention-backend"
        )
    latent = getattr(text_config, "kv_lora_rank", None)
    rope = getattr(text_config, "qk_rope_head_dim", None)
    if (latent, rope) != (LATENT, ROPE):
        return (
            f"{BACKEND_NAME} needs kv_lora_rank {LATENT} and qk_rope_head_dim "
            f"{ROPE}, got {latent} and {rope}: choose another --attention-backend"
        )
    return None


def _dsl_reason() -> str | None:
    if importlib.util.find_spec("cutlass") is not None:
        return None
    return (
        f"{BACKEND_NAME} is written in the CuTe DSL, which is not installed: "
        "pip install nvidia-cutlass-dsl"
    )


class KimiK3KvBalancedMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Sorts decodes from prefills; a decode batch has one query length.

    With adaptive verification it has one longest query length instead, and the device
    has the rest (see ``trimmed.py``).

    The runner's groups may hold the causal target's and the non-causal draft's
    layers together: cache specs differ in more than causality before vLLM keeps
    layers apart. The target's steps come through such a builder and are causal; the
    draft's steps come through builders of its own layers alone. So what counts is
    the step: one that is not causal is refused where a causal layer would run it.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(
        self,
        kv_cache_spec: "AttentionSpec",
        layer_names: list[str],
        vllm_config: "VllmConfig",
        device: torch.device,
    ) -> None:
        """Build the metadata builder of one KV-cache group.

        Args:
            kv_cache_spec: The group's cache spec.
            layer_names: Names of the group's layers.
            vllm_config: The configuration of the model that owns the layers.
            device: Where the metadata lives.

        Raises:
            ValueError: If DSpark with decode context parallelism does not fit (base
                class).

        """
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            MLACommonMetadata,
            supports_dcp_with_varlen=True,
        )
        layers = vllm_config.compilation_config.static_forward_context
        self._causal_layers = [
            name
            for name in layer_names
            if not getattr(layers[name], "non_causal_multi_token_decode", False)
        ]
        self._trims = bool(self._causal_layers) and verifies_adaptively(vllm_config)
        if self._trims:
            # The host's lengths are not the real ones: they must not decide which
            # requests are decodes.
            self.query_len_support = QueryLenSupport.VARLEN  # type: ignore[misc]
        self._for_capture = False
        # Here and not while the model is built: the runner collects warm-ups around
        # its builders, which see the draft's layers too, but not around the draft.
        if vllm_config.kernel_config.enable_jit_warmup:
            for name in layer_names:
                layers[name].impl.decode.register_warmup()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        """Build one step's metadata.

        Args:
            common_prefix_len: Not used.
            common_attn_metadata: The step; its ``causal`` holds for all requests.
            fast_build: Not used.

        Returns:
            The metadata, with decodes in front.

        Raises:
            ValueError: If the step is not causal and the group has causal layers,
                which would see the tokens behind their own; or if causality
                differs between requests.

        """
        causal = common_attn_metadata.causal
        if not isinstance(causal, bool):
            raise ValueError(
                f"{BACKEND_NAME} takes one causality for a whole step, True or False, "
                f"got {type(causal).__name__}: choose another --attention-backend."
            )
        if not causal and self._causal_layers:
            raise ValueError(
                f"{BACKEND_NAME} got a non-causal step for a group with the causal "
                f"layers {self._causal_layers}; build it with the draft's layers alone."
            )
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MLACommonMetadata:
        """Build a capture's metadata; its graph replays any query lengths."""
        self._for_capture = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._for_capture = False

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: "VllmConfig", kv_cache_spec: "KVCacheSpec"
    ) -> int | None:
        """Return the longest query that a graph of any lengths replays."""
        if not verifies_adaptively(vllm_config):
            return None
        return max_decode_query_len(vllm_config)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> KvBalancedDecodeMetadata:
        query_lens = query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]
        query_len = max(int(query_lens.max()), 1)
        query_start_loc = None
        if self._trims:
            longest = max_decode_query_len(self.vllm_config)
            total, live = int(query_lens.sum()), int((query_lens > 0).sum())
            # A request has 1 to `longest` tokens, so these totals fix all lengths.
            certain = total in (live, live * longest)
            if self._for_capture or not certain:
                query_len, query_start_loc = longest, query_start_loc_device
        return KvBalancedDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_len=query_len,
            query_start_loc=query_start_loc,
        )


class KimiK3KvBalancedMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """One MLA layer's attention; decode goes to :class:`KvBalancedDecode`."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    # Kimi K3's layer has no prefill context parallelism.
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    # The kernel's softmax works in base 2.
    lse_base_on_e: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        # MLA Specific Arguments
        **mla_args,
    ) -> None:
        """Build the layer's attention and reserve its decode buffers.

        Raises:
            NotImplementedError: For a feature or a cache type that the backend
                does not have.
            ValueError: For a shape or a number of requests that the kernel cannot
                plan (see :class:`KvBalancedDecode`).

        """
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        features = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        unsupported = [f"{name}={value!r}" for name, value in features.items() if value]
        if attn_type != AttentionType.DECODER:
            unsupported.append(f"attn_type={attn_type!r} (only decoder attention)")
        if self.kv_cache_dtype not in _KV_CACHE_DTYPES:
            unsupported.append(
                f"kv_cache_dtype={self.kv_cache_dtype!r} (use --kv-cache-dtype fp8)"
            )
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (LATENT, ROPE):
            unsupported.append(
                f"kv_lora_rank={self.kv_lora_rank}, qk_rope_head_dim="
                f"{self.qk_rope_head_dim} (only {LATENT} and {ROPE})"
            )
        if unsupported:
            raise NotImplementedError(
                f"{BACKEND_NAME} does not support " + "; ".join(unsupported) + "."
            )
        self.decode = KvBalancedDecode(num_heads)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.decode(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
