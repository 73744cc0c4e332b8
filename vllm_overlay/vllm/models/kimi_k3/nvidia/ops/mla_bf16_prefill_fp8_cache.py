# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3 prefill with a bf16 query and a plain FP8 KV cache.

The FP8 prefill kernels run on Blackwell only. Elsewhere the new tokens attend in
bf16, and the latent is quantized as it enters the cache:

    k[t, h]        = [k_nope[t, h] | rope(k_pe[t])]                       bf16
    cache[slot(t)] = e4m3([kv_c_normed[t] | rope(k_pe[t])] / k_scale)     FP8

The cache row is written by the decode epilogue's kernel with one head, so a
token's bytes do not depend on whether prefill or decode stored it.
"""

import torch

from vllm.model_executor.layers.attention.mla_attention import (
    backend_supports_prefill_query_quantization,
)
from vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache import (
    fused_mla_decode_q_concat_kv_cache_insert,
    fused_mla_key_concat_kv_cache_insert,
    fused_mla_kv_concat,
)

_PLAIN_FP8_E4M3 = ("fp8", "fp8_e4m3")
_NO_SLOT = -1


def use_bf16_prefill_with_fp8_cache(kv_cache_dtype: str, fp8_prefill: bool) -> bool:
    """Say whether a prefill keeps a bf16 query beside a plain FP8 cache.

    Args:
        kv_cache_dtype: The layer's cache type, as configured.
        fp8_prefill: Whether the prefill query is FP8.

    Returns:
        True for a plain FP8 cache where no FP8 prefill is to be had. Where one
        is (Blackwell), the layer asks for it as before.

    """
    return (
        not fp8_prefill
        and kv_cache_dtype in _PLAIN_FP8_E4M3
        and not backend_supports_prefill_query_quantization()
    )


def fused_mla_key_concat_kv_cache_quant_fp8_insert(
    q: torch.Tensor,  # [T, H, qk_head_dim], RoPE is applied in place
    k_nope: torch.Tensor,  # [T, H, qk_nope_head_dim]
    k_pe: torch.Tensor,  # [T, rope] or [T, 1, rope]
    kv_c_normed: torch.Tensor,  # [T, kv_lora_rank]
    kv_cache: torch.Tensor,  # [num_blocks, block_size, kv_lora_rank + rope] FP8
    slot_mapping: torch.Tensor,  # [T] int64, negative: not stored
    k_scale_inv: torch.Tensor,  # [1] fp32, 1 / scale of the cache
    positions: torch.Tensor | None = None,  # [T] int64
    cos_sin_cache: torch.Tensor | None = None,  # [max_position, rope] fp32
) -> torch.Tensor:
    """Build the bf16 key of new tokens and store their latent in FP8.

    With ``positions`` and ``cos_sin_cache``, the rope parts of ``q`` (in place),
    of the key and of the cache row are rotated.

    Returns:
        The key ``[T, H, qk_nope_head_dim + rope]`` in ``k_nope``'s dtype;
        ``kv_cache`` is written in place.

    """
    k_pe = k_pe.reshape(k_pe.shape[0], -1)
    if positions is None:
        k = fused_mla_kv_concat(k_nope, k_pe)
    else:
        # This kernel also stores the latent, but in bf16: no slot, no store.
        k = fused_mla_key_concat_kv_cache_insert(
            q,
            k_nope,
            k_pe,
            kv_c_normed,
            kv_c_normed.new_empty((1, 1, kv_c_normed.shape[1] + k_pe.shape[1])),
            torch.full_like(slot_mapping, _NO_SLOT),
            positions,
            cos_sin_cache,
        )
    fused_mla_decode_q_concat_kv_cache_insert(
        kv_c_normed.unsqueeze(1),
        k_pe.unsqueeze(1),
        kv_c_normed,
        k_pe,
        kv_cache,
        slot_mapping,
        q_scale_inv=k_scale_inv,
        cache_scale_inv=k_scale_inv,
        positions=positions,
        cos_sin_cache=cos_sin_cache,
    )
    return k
