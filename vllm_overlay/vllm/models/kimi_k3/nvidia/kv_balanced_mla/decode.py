# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode of one Kimi K3 MLA layer on the KV-balanced split-KV kernel.

Between vLLM and the kernel (``core.py``): checks the shape while the model is
built, reserves the buffers, keeps the compiled kernels, and makes sure that a
forward plans its split of the KV once, however many layers it has.

Buffers, each one per micro-batch (ubatch) and workspace lane:

* ``counts`` and ``work``: the plan, int32, persistent, shared by all layers of a
  shape (backend, heads, longest query), because they run one after another.
* the split-KV scratch: a view of the shared decode workspace.

With adaptive verification the device decides how many draft tokens of a request are
verified; ``trimmed.py`` says how such a batch runs on a kernel of one query length.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel, WarmupChoices
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import core
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.buffers import (
    Buffers,
    Plan,
    in_ubatch,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.config import (
    LATENT,
    QUERY_ALIGNMENT,
    ROPE,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.trimmed import TrimmedRows
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.worker import ubatching
from vllm.v1.worker.workspace import current_workspace_manager

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonImpl,
        MLACommonMetadata,
    )
    from vllm.v1.attention.backend import AttentionLayer

logger = init_logger(__name__)

BACKEND_NAME = "KIMI_K3_KV_BALANCED_MLA"
_FP8 = torch.float8_e4m3fn


def _is_capturing() -> bool:
    # Not is_available(): that asks the driver, and every layer's call comes here.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class KvBalancedMlaKernel(VllmJitKernel["KvBalancedMlaKernel.CompileKey"]):
    """Compiled kernels by shape; the owner that vLLM's JIT warm-up knows."""

    @dataclass(frozen=True)
    class CompileKey:
        heads: int
        qlen: int
        max_requests: int
        causal: bool
        device: torch.device

    def dispatch(  # type: ignore[override]
        self,
        *,
        heads: int,
        qlen: int,
        max_requests: int,
        causal: bool,
        device: torch.device,
    ) -> CompileKey:
        return self.CompileKey(
            heads=heads,
            qlen=qlen,
            max_requests=max_requests,
            causal=causal,
            device=device,
        )

    def get_warmup_keys(
        self,
        heads: int,
        qlens: tuple[int, ...],
        max_requests: int,
        causal: bool,
        device: torch.device,
    ) -> list[CompileKey]:
        """The keys of one layer shape: every query length that it may meet."""
        return self._trace_dispatch(self.dispatch)(
            heads=heads,
            qlen=WarmupChoices(*qlens),
            max_requests=max_requests,
            causal=causal,
            device=device,
        )

    def compile(self, compile_key: CompileKey) -> None:
        if compile_key not in self._compiled_cache:
            self._compiled_cache[compile_key] = core.KvBalancedMla(
                compile_key.heads,
                compile_key.qlen,
                compile_key.max_requests,
                compile_key.causal,
                compile_key.device,
            )

    def __call__(self, compile_key: CompileKey) -> "core.KvBalancedMla":
        """Return the kernel of a shape, building it on first use.

        Raises:
            ValueError: If it would have to be built inside CUDA graph capture.

        """
        if compile_key not in self._compiled_cache and _is_capturing():
            raise ValueError(
                f"{BACKEND_NAME} has no kernel yet for {compile_key} and can't build "
                "one inside CUDA graph capture: run this shape once eagerly before "
                "capturing it, or leave kernel_config.enable_jit_warmup on."
            )
        return self._get_or_compile(compile_key)


_KERNEL = KvBalancedMlaKernel()


class KvBalancedDecode:
    """The decode of one MLA layer.

    Args:
        num_heads: The layer's heads on this rank. Under decode context
            parallelism the query is gathered over the ranks, so the kernel is
            planned for ``num_heads * decode_context_parallel_size``.

    Raises:
        ValueError: If the kernel does not have the shape, or can't plan
            ``max_num_seqs`` requests.

    """

    def __init__(self, num_heads: int) -> None:
        config = get_current_vllm_config()
        self.heads = num_heads * config.parallel_config.decode_context_parallel_size
        self.max_q = max_decode_query_len(config)
        self.max_requests = config.scheduler_config.max_num_seqs
        self.device = torch.device(config.device_config.device)
        self._kv_parallel_config = _kv_parallel_config(config)
        self._draft = config.attention_config.use_non_causal
        # Only the target verifies; the draft's blocks are always whole.
        self._trims = not self._draft and verifies_adaptively(config)
        self._check_shape(num_heads)

        self._key = (BACKEND_NAME, self.heads, self.max_q)
        qlens = range(1, self.max_q + 1)
        clusters = core.max_active_clusters(self.device)
        self._work_len = max(
            core.work_list_len(self.heads, q, self.max_requests, clusters)
            for q in qlens
        )
        self._scratch_bytes = max(
            core.workspace_bytes(self.heads, q, self.max_requests) for q in qlens
        )
        self._max_rows = self.max_requests * self.max_q
        self._query_bytes = self._max_rows * self.heads * (LATENT + ROPE)
        # Matches the number of slots of the worker's workspace manager.
        for ubatch in range(2 if config.parallel_config.enable_dbo else 1):
            with in_ubatch(ubatch):
                self._reserve()
        logger.info_once(
            "%s reserves %.1f MiB of split-KV scratch for %d heads, up to %d query "
            "tokens and %d requests.",
            BACKEND_NAME,
            self._scratch_bytes / 2**20,
            self.heads,
            self.max_q,
            self.max_requests,
        )

    def __call__(
        self,
        impl: "MLACommonImpl",
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: "MLACommonMetadata",
        layer: "AttentionLayer",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one decode step of the layer.

        Args:
            impl: The layer's attention implementation (scale, DCP rank, LSE).
            q: ``[tokens, heads, 576]`` FP8 E4M3, contiguous.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, 576]`` FP8 E4M3; the
                block stride may exceed ``block_size * 576``.
            attn_metadata: The step's metadata; its ``decode`` part is used.
            layer: Gives the query's and the cache's scale.

        Returns:
            ``[tokens, heads, 512]`` bf16, and ``[tokens, heads]`` fp32 LSE in base
            2 if ``impl.need_to_return_lse_for_decode``, else None.

        Raises:
            ValueError: If the step does not fit, naming all reasons.

        """
        decode = attn_metadata.decode
        assert decode is not None, "a step without decodes has no decode metadata"
        qlen = self._check_step(q, attn_metadata)
        assert isinstance(q, torch.Tensor)
        tokens = q.shape[0]
        starts = getattr(decode, "query_start_loc", None)
        requests = tokens // qlen if starts is None else attn_metadata.num_decodes
        causal = bool(attn_metadata.causal)
        seq_lens = decode.seq_lens[:requests]
        buffers, scratch, query = self._buffers()

        compile_key = _KERNEL.CompileKey(
            self.heads, qlen, self.max_requests, causal, self.device
        )
        kernel = _KERNEL(compile_key)
        self._plan(buffers, kernel, compile_key, seq_lens, starts, tokens)
        rows = None if starts is None else buffers.rows
        if rows is not None:
            q = rows.spread(q, requests, qlen, query)

        lse = None
        if impl.need_to_return_lse_for_decode:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        causal_lens, cp = None, (1, 0, 1)
        if impl.dcp_world_size > 1:
            assert decode.dcp_tot_seq_lens is not None
            causal_lens = decode.dcp_tot_seq_lens[:requests]
            cp = (
                impl.dcp_world_size,
                impl.dcp_rank,
                self._kv_parallel_config.cp_kv_cache_interleave_size,
            )
        out = kernel.decode(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table[:requests],
            seq_lens,
            impl.scale * layer._q_scale_float * layer._k_scale_float,
            layer._k_scale_float,
            buffers.counts,
            buffers.work,
            scratch,
            lse=lse,
            causal_lens=causal_lens,
            cp=cp,
        )
        if rows is not None:
            out = rows.pack(out, tokens, 0.0)
            lse = None if lse is None else rows.pack(lse, tokens, -math.inf)
        return out, lse

    def _check_shape(self, num_heads: int) -> None:
        for qlen in range(1, self.max_q + 1):
            if not core.supports(self.heads, qlen, self.device):
                raise ValueError(
                    f"{BACKEND_NAME} can't decode {qlen} query tokens of {self.heads} "
                    f"heads ({num_heads} of this rank x decode_context_parallel_size "
                    f"{self.heads // num_heads}) on {self.device}: "
                    f"{core.check_shape(self.heads, qlen, self.device)}. Change "
                    "num_speculative_tokens, tensor_parallel_size or "
                    "decode_context_parallel_size, or choose another "
                    "--attention-backend."
                )
        most = core.max_planned_requests(self.heads, self.max_q)
        if self.max_requests > most:
            raise ValueError(
                f"{BACKEND_NAME} plans at most {most} requests at once for "
                f"{self.heads} heads and {self.max_q} query tokens, got max_num_seqs="
                f"{self.max_requests}: lower max_num_seqs to {most} or less."
            )

    def _reserve(self) -> None:
        """Claim this ubatch's and lane's buffers before the KV cache is sized."""
        manager = current_workspace_manager()
        counts = manager.get_persistent(
            (*self._key, "counts"), (core.counts_len(),), torch.int32, zero_init=True
        )
        work = manager.get_persistent(
            (*self._key, "work", self._work_len),
            (self._work_len,),
            torch.int32,
            zero_init=True,
        )
        rows = self._reserve_rows() if self._trims else None
        manager.get_persistent_resource(
            (Buffers, *self._key), lambda: Buffers(counts, work, Plan(), rows)
        )
        manager.get_simultaneous(*self._scratch_shapes())

    def _reserve_rows(self) -> TrimmedRows:
        def persistent(name: str, dtype: torch.dtype) -> torch.Tensor:
            key = (*self._key, name, self._max_rows)
            return current_workspace_manager().get_persistent(
                key, (self._max_rows,), dtype, zero_init=True
            )

        return TrimmedRows(
            token_of_row=persistent("token_of_row", torch.int64),
            row_of_token=persistent("row_of_token", torch.int64),
            is_padding=persistent("is_padding", torch.bool),
        )

    def _scratch_shapes(self) -> tuple[tuple[tuple[int], torch.dtype], ...]:
        """Split-KV scratch, then the query's rows if a batch can be trimmed."""
        scratch = ((self._scratch_bytes,), torch.uint8)
        query = ((self._query_bytes if self._trims else 0,), torch.uint8)
        return scratch, query

    def _buffers(self) -> tuple[Buffers, torch.Tensor, torch.Tensor]:
        """This ubatch's and lane's plan buffers.

        With ``[bytes]`` uint8 split-KV scratch and ``[bytes]`` uint8 query rows.
        """
        manager = current_workspace_manager()
        buffers = manager.get_persistent_resource(
            (Buffers, *self._key), self._raise_not_reserved
        )
        scratch, query = manager.get_simultaneous(*self._scratch_shapes())
        return buffers, scratch, query

    def _raise_not_reserved(self) -> Buffers:
        raise ValueError(
            f"{BACKEND_NAME} reserved no buffers for {self.heads} heads and "
            f"{self.max_q} query tokens in ubatch {ubatching.dbo_current_ubatch_id()} "
            "and this workspace lane: build the model in the lane that runs it."
        )

    def _plan(
        self,
        buffers: Buffers,
        kernel: "core.KvBalancedMla",
        compile_key: KvBalancedMlaKernel.CompileKey,
        seq_lens: torch.Tensor,
        starts: torch.Tensor | None,
        tokens: int,
    ) -> None:
        """Plan the split of the KV unless this forward has done it already."""
        forward = get_forward_context() if is_forward_context_available() else None
        # A graph must hold its own plan launch, hence the capture flag: a plan of
        # the eager run before it would never follow the replayed lengths.
        key = (
            compile_key,
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            None if starts is None else (starts.data_ptr(), tokens),
            _is_capturing(),
        )
        plan = buffers.plan
        if plan.is_for(forward, key):
            plan.reused += 1
            return
        kernel.plan(seq_lens, buffers.counts, buffers.work)
        if starts is not None:
            assert buffers.rows is not None
            buffers.rows.fill(starts, compile_key.qlen, tokens)
        plan.set_for(forward, key)
        plan.planned += 1

    def _check_step(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        attn_metadata: "MLACommonMetadata",
    ) -> int:
        """Return the step's query length.

        Raises:
            ValueError: Naming everything that keeps the step from this kernel.

        """
        reasons, tokens = self._query_reasons(q)
        requests = attn_metadata.num_decodes
        qlen = getattr(attn_metadata.decode, "query_len", None)
        if qlen is None:
            qlen = -(-tokens // max(requests, 1))
        trimmed = getattr(attn_metadata.decode, "query_start_loc", None) is not None
        if trimmed and not self._trims:
            reasons.append(
                "the query lengths are on the device, which only a target with "
                "enable_adaptive_verification has buffers for"
            )
        uneven = qlen < 1 or (not trimmed and tokens % qlen)
        if uneven or not 0 < tokens <= requests * qlen:
            reasons.append(
                f"the query length is not uniform: {tokens} query tokens over "
                f"{requests} requests of {qlen} each"
            )
        if qlen > self.max_q:
            reasons.append(
                f"the query length is {qlen}, at most {self.max_q} "
                "(1 + num_speculative_tokens) was planned for"
            )
        if requests > self.max_requests:
            reasons.append(
                f"{requests} requests, at most max_num_seqs={self.max_requests} "
                "were planned for"
            )
        if reasons:
            raise ValueError(
                f"{BACKEND_NAME} can't run this decode step: "
                + "; ".join(reasons)
                + ". There is no fallback; choose another --attention-backend if "
                "the model has such steps."
            )
        return qlen

    def _query_reasons(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[list[str], int]:
        if not isinstance(q, torch.Tensor):
            return [
                "the query is a (nope, pe) tuple, it must be one packed FP8 tensor"
            ], q[0].shape[0]
        reasons = []
        if q.dtype != _FP8:
            reasons.append(f"the query is {q.dtype}, it must be {_FP8}")
        expected = (q.shape[0], self.heads, LATENT + ROPE)
        if tuple(q.shape) != expected:
            reasons.append(
                f"the query has shape {tuple(q.shape)}, it must be [tokens, "
                f"{self.heads}, {LATENT + ROPE}]"
            )
        if not q.is_contiguous():
            reasons.append(f"the query is not contiguous (strides {q.stride()})")
        if q.data_ptr() % QUERY_ALIGNMENT:
            reasons.append(
                f"the query starts at byte {q.data_ptr() % QUERY_ALIGNMENT} of a "
                f"{QUERY_ALIGNMENT}-byte line, it must start at byte 0"
            )
        return reasons, q.shape[0]

    def register_warmup(self) -> None:
        """Have every kernel of this layer's shape compiled at start-up.

        Takes effect where vLLM collects warm-ups, as around its metadata builders.
        With ``kernel_config.enable_jit_warmup`` off (``--enforce-eager`` turns it
        off), a kernel is compiled by the first eager step that needs it, and needing
        one inside CUDA graph capture is an error.
        """
        # A DSpark block is num_speculative_tokens long, one more for drafts that
        # put the last verified token in front. The target also meets the shorter
        # lengths: steps without drafts and short ends of a prompt.
        draft = self._draft
        qlens = (self.max_q - 1, self.max_q) if draft else range(1, self.max_q + 1)
        _KERNEL.register_warmup(
            heads=self.heads,
            qlens=tuple(q for q in qlens if q > 0),
            max_requests=self.max_requests,
            causal=not draft,
            device=self.device,
        )


def verifies_adaptively(config: "VllmConfig") -> bool:
    """Whether the device decides how many draft tokens a step verifies."""
    spec = config.speculative_config
    return bool(getattr(spec, "enable_adaptive_verification", False))


def _kv_parallel_config(config: "VllmConfig") -> "ParallelConfig":
    """Return the object in which the worker settles the interleave size.

    Prefill/decode disaggregation sets ``cp_kv_cache_interleave_size`` after the
    model is built, on the engine's parallel config. A draft model is built with
    a copy of that object; the speculative config still has the original.
    """
    spec = config.speculative_config
    if config.attention_config.use_non_causal and spec is not None:
        return spec.target_parallel_config or config.parallel_config
    return config.parallel_config
