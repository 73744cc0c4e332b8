# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels that the KV-balanced MLA benchmark times, behind one interface.

A contender is built from a ``Batch`` and raises whatever keeps it from running. Its
``plan`` is the work that a step does once for all layers, ``call(i)`` one layer; both
may be captured in a CUDA graph. ``call`` returns ``[requests * qlen, heads, 512]``.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from kimi_k3_mla_cases import BLOCK_SIZE, HEAD_DIM, LATENT, ROPE, Batch

try:
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import core
except ImportError:  # no vLLM with the backend here: take the package alone
    _ROOT = Path(__file__).parents[2] / "vllm" / "models" / "kimi_k3" / "nvidia"
    sys.path.insert(0, str(_ROOT))
    from kv_balanced_mla import core  # type: ignore[no-redef]

FLASHMLA = "FLASHMLA fp8"
OURS = "KV-balanced fp8"
MAX_REQUESTS = 1024
FLASHINFER_WORKSPACE_BYTES = 512 << 20
FLASH_ATTN_SPLITS = 32
"""vLLM's default bound of the splits under CUDA graphs."""
FLASHMLA_OPS = ("get_mla_decoding_metadata_dense_fp8", "fwd_kvcache_mla_fp8")


@functools.cache
def kernel(heads: int, qlen: int) -> "core.KvBalancedMla":
    """Our kernel for a shape, compiled once."""
    return core.KvBalancedMla(heads, qlen, MAX_REQUESTS, True, torch.device("cuda"))


class Contender:
    """Base: a batch, and the defaults of a kernel without a plan."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.setup()

    def setup(self) -> None:
        """Build buffers; called once, outside any capture."""

    def plan(self) -> None:
        """What a step does once for all of its layers."""

    def call(self, layer: int) -> torch.Tensor:
        """One layer's decode."""
        raise NotImplementedError

    def table(self, layer: int) -> torch.Tensor:
        """The block table of a layer: layers walk different copies of the KV."""
        return self.batch.tables[layer % len(self.batch.tables)]


class KvBalanced(Contender):
    """Planner, decode and combine of this backend; the LSE is written too."""

    def setup(self) -> None:
        shape = self.batch.shape
        self.kernel = kernel(shape.heads, shape.qlen)
        device = self.kernel.device
        clusters = core.max_active_clusters(device)
        size = core.work_list_len(shape.heads, shape.qlen, MAX_REQUESTS, clusters)
        scratch = core.workspace_bytes(shape.heads, shape.qlen, MAX_REQUESTS)
        self.counts = torch.zeros(core.counts_len(), dtype=torch.int32, device=device)
        self.work = torch.zeros(size, dtype=torch.int32, device=device)
        self.workspace = torch.empty(scratch, dtype=torch.uint8, device=device)
        tokens = len(shape.lens) * shape.qlen
        self.lse = torch.empty((tokens, shape.heads), device=device)

    def plan(self) -> None:
        self.kernel.plan(self.batch.lens, self.counts, self.work)

    def call(self, layer: int) -> torch.Tensor:
        batch = self.batch
        return self.kernel.decode(
            batch.q, batch.cache, self.table(layer), batch.lens, batch.scale, 1.0,
            self.counts, self.work, self.workspace, self.lse,
        )  # fmt: skip


class FlashMlaFp8(Contender):
    """vLLM's FLASHMLA decode with an FP8 cache and query."""

    def setup(self) -> None:
        missing = flashmla_missing()
        if missing is not None:
            raise RuntimeError(missing)
        self.ops = torch.ops._flashmla_extension_C
        batch = self.batch
        shape = batch.shape
        self.q = batch.q.view(len(shape.lens), shape.qlen, shape.heads, HEAD_DIM)
        self.cache = batch.cache.unsqueeze(2)
        self.one = torch.ones(1, device=batch.q.device)

    def plan(self) -> None:
        self.tiles, self.splits = self.ops.get_mla_decoding_metadata_dense_fp8(
            self.batch.lens, self.batch.shape.rows, 1
        )

    def call(self, layer: int) -> torch.Tensor:
        batch = self.batch
        out, _ = self.ops.fwd_kvcache_mla_fp8(
            self.q, self.cache, LATENT, batch.lens, self.table(layer), batch.scale,
            True, self.tiles, self.splits, self.one, self.one,
        )  # fmt: skip
        return out.reshape(-1, batch.shape.heads, LATENT)


class FlashMlaBf16(Contender):
    """FLASHMLA with a bf16 cache."""

    def setup(self) -> None:
        from vllm.v1.attention.ops import flashmla

        self.ops = flashmla
        shape = self.batch.shape
        q = self.batch.q.to(torch.bfloat16)
        self.q = q.view(len(shape.lens), shape.qlen, shape.heads, HEAD_DIM)
        self.cache = self.batch.cache.to(torch.bfloat16).unsqueeze(2)
        self.metadata, _ = flashmla.get_mla_metadata()

    def call(self, layer: int) -> torch.Tensor:
        out, _ = self.ops.flash_mla_with_kvcache(
            self.q, self.cache, self.table(layer), self.batch.lens, LATENT,
            self.metadata, softmax_scale=self.batch.scale, causal=True,
        )  # fmt: skip
        return out.reshape(-1, self.batch.shape.heads, LATENT)


class FlashAttnMla(Contender):
    """FLASH_ATTN_MLA (FlashAttention 3) with a bf16 cache."""

    def setup(self) -> None:
        from vllm.v1.attention.backends import fa_utils

        batch, shape = self.batch, self.batch.shape
        self.attend = fa_utils.flash_attn_varlen_func
        requests = len(shape.lens)
        q = batch.q.to(torch.bfloat16)
        self.q_nope, self.q_pe = q[..., :LATENT], q[..., LATENT:]
        cache = batch.cache.to(torch.bfloat16).unsqueeze(2)
        self.v, self.k = cache[..., :LATENT], cache[..., LATENT:]
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device=q.device)
        self.starts *= shape.qlen
        self.metadata = fa_utils.get_scheduler_metadata(
            batch_size=requests,
            max_seqlen_q=shape.qlen,
            max_seqlen_k=max(shape.lens),
            num_heads_q=shape.heads,
            num_heads_kv=1,
            headdim=ROPE,
            cache_seqlens=batch.lens,
            qkv_dtype=torch.bfloat16,
            headdim_v=LATENT,
            page_size=BLOCK_SIZE,
            cu_seqlens_q=self.starts,
            causal=True,
            num_splits=FLASH_ATTN_SPLITS,
        )

    def call(self, layer: int) -> torch.Tensor:
        shape = self.batch.shape
        return self.attend(
            q=self.q_pe,
            k=self.k,
            v=self.v,
            q_v=self.q_nope,
            max_seqlen_q=shape.qlen,
            cu_seqlens_q=self.starts,
            max_seqlen_k=max(shape.lens),
            seqused_k=self.batch.lens,
            block_table=self.table(layer),
            softmax_scale=self.batch.scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=self.metadata,
            num_splits=FLASH_ATTN_SPLITS,
        )


class TritonMla(Contender):
    """TRITON_MLA with a bf16 cache: one row of the kernel's batch a query token."""

    def setup(self) -> None:
        from vllm.v1.attention.backends.mla import triton_mla
        from vllm.v1.attention.ops import triton_decode_attention

        batch, shape = self.batch, self.batch.shape
        self.attend = triton_decode_attention.decode_attention_fwd
        self.q = batch.q.to(torch.bfloat16)
        self.cache = batch.cache.to(torch.bfloat16).unsqueeze(2)
        device = self.q.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.splits = triton_mla._compute_num_kv_splits(max(shape.lens), sms)
        rows = len(self.q)
        self.logits = torch.empty(
            (rows, shape.heads, self.splits, LATENT + 1), device=device
        )
        offsets = torch.arange(1 - shape.qlen, 1, dtype=torch.int32, device=device)
        self.row_lens = (batch.lens[:, None] + offsets).flatten().clamp(min=0)
        self.row_tables = [
            table.repeat_interleave(shape.qlen, dim=0) for table in batch.tables
        ]
        self.one = torch.ones((), device=device)

    def call(self, layer: int) -> torch.Tensor:
        shape = self.batch.shape
        rows = len(self.q)
        out = self.q.new_zeros((rows, shape.heads, LATENT))
        lse = self.q.new_zeros((rows, shape.heads))
        self.attend(
            self.q, self.cache, self.cache[..., :LATENT], out, lse,
            self.row_tables[layer % len(self.row_tables)], self.row_lens, self.logits,
            self.splits, self.batch.scale, BLOCK_SIZE, k_scale=self.one,
            v_scale=self.one, is_mla=True,
        )  # fmt: skip
        return out


class FlashInferFa3(Contender):
    """FlashInfer's batch MLA wrapper, FA3, bf16; its plan runs on the host."""

    def setup(self) -> None:
        mla = importlib.import_module("flashinfer.mla")
        batch, shape = self.batch, self.batch.shape
        device = batch.q.device
        requests = len(shape.lens)
        q = batch.q.to(torch.bfloat16)
        self.query = (q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous())
        cache = batch.cache.to(torch.bfloat16)
        self.kv = (cache[..., :LATENT].contiguous(), cache[..., LATENT:].contiguous())
        pages = (batch.lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        counts = pages.tolist()
        table = batch.tables[0]
        indices = torch.cat([table[r, :n] for r, n in enumerate(counts)])
        kv_starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        kv_starts[1:] = pages.cumsum(0)
        q_starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
        q_starts *= shape.qlen
        self.wrapper = mla.BatchMLAPagedAttentionWrapper(
            torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            use_cuda_graph=True,
            qo_indptr=q_starts.clone(),
            kv_indptr=kv_starts.clone(),
            kv_indices=indices.clone(),
            kv_len_arr=batch.lens.clone(),
            backend="fa3",
        )
        self.wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(q_starts, kv_starts, indices, batch.lens),
            num_heads=shape.heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=BLOCK_SIZE,
            causal=True,
            sm_scale=batch.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            query_layout="split",
            kv_cache_layout="split",
        )

    def call(self, layer: int) -> torch.Tensor:
        return self.wrapper.run(query=self.query, kv_cache=self.kv)


CONTENDERS: dict[str, Callable[[Batch], Contender]] = {
    OURS: KvBalanced,
    FLASHMLA: FlashMlaFp8,
    "FLASHMLA bf16": FlashMlaBf16,
    "FLASH_ATTN_MLA bf16": FlashAttnMla,
    "TRITON_MLA bf16": TritonMla,
    "FlashInfer fa3 bf16": FlashInferFa3,
}


def load_flashmla(where: Path | None) -> None:
    """Register FLASHMLA's FP8 operators, from vLLM or from a shared object.

    A process can register them once only, so an importable vLLM comes first.

    Args:
        where: ``_flashmla_extension_C.abi3.so`` or its folder, for a machine without
            vLLM; None: vLLM's own.

    """
    try:
        importlib.import_module("vllm._flashmla_extension_C")
    except ImportError as error:
        if where is None:
            print(f"{FLASHMLA}: not loaded from vLLM: {error}")
            return
        file = where / "_flashmla_extension_C.abi3.so" if where.is_dir() else where
        torch.ops.load_library(str(file))
    else:
        if where is not None:
            print(f"{FLASHMLA}: vLLM's own is used, not {where}")


def flashmla_missing() -> str | None:
    """Why FLASHMLA's FP8 decode can't run here, or None."""
    ops = torch.ops._flashmla_extension_C
    if all(hasattr(ops, name) for name in FLASHMLA_OPS):
        return None
    return (
        "its operators are not registered: install vLLM, or give the path of "
        "_flashmla_extension_C.abi3.so with --flashmla-so"
    )
