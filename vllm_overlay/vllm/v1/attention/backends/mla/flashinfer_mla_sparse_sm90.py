# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA on Hopper, planned on the device.

With page size 1 the slots that the indexer selects are the page table: each query token
is a batch row whose KV length is its count of valid slots. Causality is already in the
selection. Who reads the cache:

- An FP8 cache and few rows of a bf16 cache: kernels of our own
  (``flashinfer_mla_sparse_sm90_fp8``, ``.._bf16``; ``.._decode`` is what they share).
  They take the counts of the slot conversion and need no plan; a padded row is what the
  indexer left in its buffer, -1 for nothing.
- More rows of a bf16 cache: FlashInfer's FA3 MLA kernel, under a schedule that one
  launch computes from device lengths (``flashinfer_mla_sparse_sm90_plan``), so a step
  costs the host the same for any batch and never waits for the device. Padded rows of a
  captured graph have length 0: their output is 0.

The rows of a call decide; a graph keeps the kernel that it was captured with. So a step
isn't planned only if no graph that may be replayed on it has enough rows for
FlashInfer's kernel (``flashinfer_mla_sparse_sm90_graphs``).

FP8 cache (``fp8``, ``fp8_e4m3``): one scale ``k_scale`` for the whole row, latent and
rope part. That holds for every writer of this cache layout: ``concat_and_cache_mla``
and ``concat_and_cache_mla_grouped`` (csrc/cache_kernels.cu; the latter with one scale a
layer), ``concat_and_cache_mla_rope_fused`` (csrc/cache_kernels_fused.cu) and
``fused_norm_rope`` of the DeepSeek-V3.2 family (models/deepseek_v32/common/kernels.py),
all of which divide both parts by ``k_scale``. Layouts with another treatment of the
rope part (``fp8_ds_mla``, ``nvfp4_ds_mla``) are not accepted here.

The kernels give the LSE in base 2. Under decode context parallelism how many of the
selected tokens a rank owns depends on the selection, so lengths would have to be
counted in the forward; until that has run on two GPUs, ``can_return_lse_for_decode``
and ``supports_dcp`` stay False.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.flashinfer import has_flashinfer_sm90_nope_mla
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionLayer,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseMetadata,
    FlashInferMLASparseMetadataBuilder,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_bf16 import (
    SparseBf16Decode,
    own_rows,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_decode import (
    SparseDecode,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_flashinfer import (
    LATENT,
    FlashInferSparseDecode,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_fp8 import (
    SparseFp8Decode,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_graphs import (
    GraphRows,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_select import (
    MIN_FLASHINFER,
    kernel_reason,
    version_reason,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)
from vllm.v1.kv_cache_interface import AttentionSpec

_FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
_ROPE_DIMS = (0, 64)


class FlashInferMLASparseSM90Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA_SPARSE_SM90"

    @staticmethod
    def get_builder_cls() -> type["FlashInferMLASparseSM90Builder"]:
        return FlashInferMLASparseSM90Builder

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl]:
        return FlashInferMLASparseSM90Impl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        # The latent's 512 and a rope part of 0 or 64.
        return [512, 576]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major == 9

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
        """Why the backend can't serve this model here, or None if it can."""
        name = cls.get_name()
        if not has_flashinfer_sm90_nope_mla():
            return (
                f"{name} requires FlashInfer's BatchMLAPagedAttentionWrapper: "
                f"flashinfer-python >= {MIN_FLASHINFER}, and flashinfer-cubin or both "
                "nvcc and ninja"
            )
        if not use_sparse:
            return f"{name} requires sparse MLA"
        from vllm.config import get_current_vllm_config

        model_config = get_current_vllm_config().model_config
        if model_config is None:
            return None
        hf = model_config.hf_text_config
        if hf.kv_lora_rank != LATENT:
            return f"{name} requires kv_lora_rank={LATENT}, got {hf.kv_lora_rank}"
        if hf.qk_rope_head_dim not in _ROPE_DIMS:
            return (
                f"{name} requires qk_rope_head_dim in {_ROPE_DIMS}, got "
                f"{hf.qk_rope_head_dim}"
            )
        if kv_cache_dtype in _FP8_KV_DTYPES:
            return None  # our own kernel
        return version_reason() or kernel_reason(hf.qk_rope_head_dim)


class _SM90State:
    """Slot table and decode of one attention group; every layer of it shares them.

    Args:
        device: Where it runs.
        num_heads: Query heads of a layer.
        kv_dtype: Logical cache type: ``torch.bfloat16`` or ``torch.float8_e4m3fn``.
        max_tokens: The most query tokens of a forward.
        topk_width: Entries of a row of the indexer's buffer.
        kv_lora_rank: 512.
        qk_rope_head_dim: 0 or 64.
        sm_scale: Softmax scale.
        index_topk: Tokens that the indexer keeps of a longer context.
        index_kpool: Tokens that it pools; 1 without pooling.
        return_lse: Also compute the base-2 LSE.
        graph_rows: The most rows of a CUDA graph that may run on a step built with so
            many rows, or None if unknown; by default there are no graphs.

    Raises:
        ValueError: Another latent width or cache type, or a shape that the decode of
            that cache can't take.

    """

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        kv_dtype: torch.dtype,
        max_tokens: int,
        topk_width: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        sm_scale: float,
        index_topk: int,
        index_kpool: int,
        return_lse: bool = False,
        graph_rows: Callable[[int], int | None] = lambda rows: rows,
    ) -> None:
        if kv_lora_rank != LATENT:
            raise ValueError(f"kv_lora_rank must be {LATENT}, got {kv_lora_rank}")
        if kv_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(
                f"FLASHINFER_MLA_SPARSE_SM90 reads a bfloat16 or float8_e4m3fn KV "
                f"cache, got {kv_dtype}; set kv_cache_dtype to bfloat16 or fp8"
            )
        self.device = device
        self.kv_dtype = kv_dtype
        self.index_topk = index_topk
        self.index_kpool = max(index_kpool, 1)
        # Captured graphs read both, so they are made once.
        self.slots = torch.zeros(
            max_tokens, topk_width, dtype=torch.int32, device=device
        )
        self.counts = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.sm_scale = sm_scale
        self.return_lse = return_lse
        self.flashinfer: FlashInferSparseDecode | None = None
        self.fp8: SparseFp8Decode | None = None
        self.bf16: SparseBf16Decode | None = None
        self.own_rows = 0
        self.graph_rows = graph_rows
        if kv_dtype == torch.float8_e4m3fn:
            self.fp8 = SparseFp8Decode(
                max_tokens, num_heads, qk_rope_head_dim, topk_width, device
            )
            # Compile now, not in the first request.
            self.fp8.warm_up()
        else:
            self.flashinfer = FlashInferSparseDecode(
                device,
                num_heads,
                max_tokens,
                qk_rope_head_dim,
                sm_scale,
                self.slots,
                index_topk,
                self.index_kpool,
                return_lse,
            )
            self.own_rows = min(own_rows(num_heads), max_tokens)
            if self.own_rows:
                self.bf16 = SparseBf16Decode(
                    self.own_rows, num_heads, qk_rope_head_dim, topk_width, device
                )
                self.bf16.warm_up()

    def plan(
        self,
        num_rows: int,
        cam: CommonAttentionMetadata,
        req_id_per_token: torch.Tensor,
    ) -> None:
        """Plan rows ``[0, num_rows)`` of a batch from its device lengths.

        Does nothing where FlashInfer's kernel can't run: with an FP8 cache, and if
        every graph that may be replayed on this step has few rows.

        Raises:
            RuntimeError: Called while a CUDA graph is captured: the lengths would be
                those of the capture for ever.

        """
        if (
            self.device.type == "cuda"
            and torch.cuda.is_current_stream_capturing()  # a query, not a sync
        ):
            raise RuntimeError(
                "FLASHINFER_MLA_SPARSE_SM90 plans outside CUDA graphs; build the "
                "metadata before the capture"
            )
        most = self.graph_rows(num_rows)
        few = self.bf16 is not None and most is not None and most <= self.own_rows
        if self.flashinfer is not None and not few:
            self.flashinfer.plan(
                num_rows,
                cam.query_start_loc,
                cam.seq_lens,
                cam.num_reqs,
                req_id_per_token,
            )

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        k_scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the slots in ``slots``, ``counts`` of them in each row.

        Args:
            q_nope: ``[rows, heads, 512]`` bf16.
            q_pe: ``[rows, heads, 0 or 64]`` bf16.
            cache: All slots, ``[slots, 512 or 576]``, of the KV dtype.
            k_scale: Scale of an FP8 cache, else None.

        Returns:
            Output ``[rows, heads, 512]`` bf16 and, with ``return_lse``, the base-2 LSE
            ``[rows, heads]`` fp32. A row without slots gives 0 and -inf.

        """
        rows, heads = q_nope.shape[:2]
        counts = self.counts[:rows]
        kernel: SparseDecode | None = self.bf16 if rows <= self.own_rows else self.fp8
        if kernel is None:
            assert self.flashinfer is not None
            return self.flashinfer.decode(q_nope, q_pe, cache, counts)
        assert k_scale is not None or self.fp8 is None
        # The query may be a transposed view; the output is packed.
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
        lse = (
            torch.empty(rows, heads, dtype=torch.float32, device=q_nope.device)
            if self.return_lse
            else None
        )
        kernel.decode(
            q_nope,
            q_pe if q_pe.shape[-1] else None,
            cache,
            self.slots[:rows],
            counts,
            self.sm_scale,
            1.0 if k_scale is None else k_scale,
            out,
            lse,
        )
        return out, lse


@dataclass
class FlashInferMLASparseSM90Metadata(FlashInferMLASparseMetadata):
    """Adds the group's state and how many rows it decodes."""

    state: _SM90State | None = None
    num_mqa_rows: int = 0


class FlashInferMLASparseSM90Builder(FlashInferMLASparseMetadataBuilder):
    """The common sparse metadata, plus one schedule a step."""

    metadata_cls = FlashInferMLASparseSM90Metadata

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl = layer.impl
        if not isinstance(impl, FlashInferMLASparseSM90Impl):
            raise TypeError(
                "FlashInferMLASparseSM90Builder serves layers with "
                f"FlashInferMLASparseSM90Impl, got {type(impl).__name__} in "
                f"{layer_names[0]}"
            )
        self._attention_layer = layer
        assert impl.topk_indices_buffer is not None
        hf_config = vllm_config.model_config.hf_text_config
        # An FP8 cache is stored as bytes.
        kv_dtype = kv_cache_spec.dtype
        if kv_dtype == torch.uint8:
            kv_dtype = torch.float8_e4m3fn
        self.state = _SM90State(
            device,
            impl.num_heads,
            kv_dtype,
            vllm_config.scheduler_config.max_num_batched_tokens,
            impl.topk_indices_buffer.shape[1],
            kv_lora_rank=impl.kv_lora_rank,
            qk_rope_head_dim=impl.qk_rope_head_dim,
            sm_scale=impl.scale,
            index_topk=int(hf_config.index_topk),
            index_kpool=int(getattr(hf_config, "index_kpool", None) or 1),
            return_lse=getattr(impl, "need_to_return_lse_for_decode", False),
            graph_rows=GraphRows(vllm_config),
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMLASparseSM90Metadata:
        """Build a step's metadata, and its plan. Never waits for the device."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        assert isinstance(metadata, FlashInferMLASparseSM90Metadata)
        num_rows = metadata.num_actual_tokens
        # The layer takes prefill rows away before forward_mqa if MHA does them.
        if metadata.num_prefills > 0 and self._attention_layer._use_sparse_mha(
            metadata
        ):
            num_rows = metadata.num_decode_tokens
        self.state.plan(num_rows, common_attn_metadata, metadata.req_id_per_token)
        metadata.state = self.state
        metadata.num_mqa_rows = num_rows
        return metadata


class FlashInferMLASparseSM90Impl(SparseMLACommonImpl[FlashInferMLASparseSM90Metadata]):
    # Tested on one GPU only; see the module's docstring.
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
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
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any | None = None,
        **mla_args: Any,
    ) -> None:
        given = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        if refused := {name: value for name, value in given.items() if value}:
            raise NotImplementedError(
                f"FLASHINFER_MLA_SPARSE_SM90 has no {', '.join(refused)}, got {refused}"
            )
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
            indexer=indexer,
            topk_indices_buffer=topk_indices_buffer,
            **mla_args,
        )
        assert self.topk_indices_buffer is not None
        self.supports_quant_query_input = False
        self.use_fp8_kv_cache = self.kv_cache_dtype in _FP8_KV_DTYPES

    @staticmethod
    def _k_scale(layer: AttentionLayer) -> float:
        """The FP8 cache's scale.

        Raises:
            ValueError: It is missing, zero, negative or not finite. Taking 1.0 instead
                would give wrong attention without a sign.

        """
        scale = getattr(layer, "_k_scale_float", None)
        if scale is None or not math.isfinite(scale) or scale <= 0:
            raise ValueError(
                "FLASHINFER_MLA_SPARSE_SM90 needs a finite k_scale above 0 for an FP8 "
                f"KV cache, got {scale!r}; load a checkpoint with KV scales or use "
                "kv_cache_dtype=auto"
            )
        return float(scale)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FlashInferMLASparseSM90Metadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the selected tokens.

        Args:
            q: ``(q_nope [rows, heads, 512], q_pe [rows, heads, 0 or 64])``, bf16.
            kv_c_and_k_pe_cache: ``[blocks, block_size, 512 or 576]``; blocks may lie
                further apart than their size, by whole rows.
            attn_metadata: This step's metadata.
            layer: Has the FP8 cache's scale.

        Returns:
            Output ``[rows, heads, 512]``, and the base-2 LSE ``[rows, heads]`` if the
            layer needs it.

        """
        if not isinstance(q, tuple):
            raise NotImplementedError(
                "FLASHINFER_MLA_SPARSE_SM90 takes the query as (nope, rope), got one "
                f"tensor {tuple(q.shape)}"
            )
        q_nope, q_pe = q
        rows = q_nope.shape[0]
        state = attn_metadata.state
        assert state is not None and self.topk_indices_buffer is not None
        # More rows would be left unwritten, fewer would be written out of bounds.
        assert rows == attn_metadata.num_mqa_rows, (
            f"{attn_metadata.num_mqa_rows} rows are planned, the query has {rows}"
        )
        k_scale = self._k_scale(layer) if self.use_fp8_kv_cache else None
        if rows == 0:
            return torch.empty_like(q_nope), None

        cache, block_stride_rows = flat_kv_row_view(
            kv_c_and_k_pe_cache, attn_metadata.block_size
        )
        selected = self.topk_indices_buffer[:rows]
        # With counts it packs the valid slots to the front of each row.
        triton_convert_req_index_to_global_index(
            attn_metadata.req_id_per_token[:rows],
            attn_metadata.block_table,
            selected,
            BLOCK_SIZE=attn_metadata.block_size,
            BLOCK_STRIDE_ROWS=block_stride_rows,
            NUM_TOPK_TOKENS=selected.shape[1],
            return_valid_counts=True,
            out=state.slots[:rows],
            valid_counts_out=state.counts[:rows],
        )
        if self.use_fp8_kv_cache:
            cache = cache.view(torch.float8_e4m3fn)
        q_pe = q_pe.reshape(rows, self.num_heads, self.qk_rope_head_dim)
        return state.decode(q_nope, q_pe, cache, k_scale)
