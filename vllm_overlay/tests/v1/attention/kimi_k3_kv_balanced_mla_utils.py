# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPU stand-in for the KV-balanced MLA kernel, and a reference to check against.

``FakeCore`` has the surface of ``kv_balanced_mla/core.py``. Its decode takes the KV
lengths from the *plan*, as the kernel does, so a stale plan gives wrong numbers; the
reference takes nothing but the cache and the lengths.
"""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.backend import (
    KimiK3KvBalancedMLAImpl,
    KvBalancedDecodeMetadata,
)

LATENT = 512
ROPE = 64
HEAD = LATENT + ROPE
BLOCK = 64
SCALE = 192**-0.5
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


def visible(length, qlen, causal, causal_len=None, cp=(1, 0, 1)):
    """Mask ``[qlen, length]`` of the local KV entries that each query token sees."""
    if not causal:
        return torch.ones(qlen, length, dtype=torch.bool)
    local = torch.arange(length)
    world, rank, interleave = cp
    block = local // interleave * world + rank
    position = block * interleave + local % interleave
    total = length if causal_len is None else causal_len
    bounds = total - qlen + 1 + torch.arange(qlen)
    return position[None, :] < bounds[:, None]


def attend(q, keys, mask, scale):
    """``[qlen, heads, 512]`` output and ``[qlen, heads]`` base-2 LSE of a request."""
    scores = torch.einsum("jhd,td->jht", q.double(), keys.double()) * scale
    scores = scores.masked_fill(~mask[:, None, :], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    seen = mask.any(dim=-1)[:, None, None]
    weights = torch.where(seen, torch.exp(scores - lse[..., None]), 0.0)
    out = torch.einsum("jht,td->jhd", weights, keys[:, :LATENT].double())
    return out.float(), (lse / math.log(2)).float()


def gather(cache, block_table, length):
    """The first ``length`` rows ``[length, 576]`` of a request, as fp32."""
    size = cache.shape[1]
    position = torch.arange(length)
    blocks = block_table[position // size].long()
    return cache[blocks, position % size].float()


def reference_decode(
    q,
    cache,
    block_table,
    lengths,
    scale,
    *,
    causal=True,
    causal_lens=None,
    cp=(1, 0, 1),
):
    """fp32 output ``[tokens, heads, 512]`` and base-2 LSE ``[tokens, heads]``.

    ``q`` ``[tokens, heads, 576]`` and ``cache`` hold quantized values; ``scale`` is
    the score scale, the output is not scaled.
    """
    requests = len(lengths)
    qlen = q.shape[0] // requests
    outs, lses = [], []
    for r, length in enumerate(lengths):
        keys = gather(cache, block_table[r], length)
        total = None if causal_lens is None else causal_lens[r]
        mask = visible(length, qlen, causal, total, cp)
        rows = q[r * qlen : (r + 1) * qlen].float()
        out, lse = attend(rows, keys, mask, scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@contextmanager
def small_tensors():
    """One thread: a pool only slows down tensors of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class FakeCore:
    """The surface of ``core.py`` on CPU tensors."""

    def __init__(self, *, max_requests=4096, refuse=None, groups=8):
        self.log: list[tuple] = []
        self._max_requests = max_requests
        self._refuse = refuse
        self._groups = groups
        core = self

        class KvBalancedMla:
            def __init__(self, heads, qlen, max_requests, causal, device):
                core.log.append(("build", heads, qlen, max_requests, causal))
                self.heads, self.qlen, self.causal = heads, qlen, causal

            def plan(self, seq_lens, counts, work):
                assert seq_lens.dtype == torch.int32
                core.log.append(("plan", self.heads, self.qlen, self.causal))
                requests = seq_lens.shape[0]
                counts[0], counts[1] = requests, self.qlen
                work.fill_(-1)
                work[:requests] = seq_lens

            def decode(
                self,
                q,
                cache,
                block_table,
                seq_lens,
                softmax_scale,
                output_scale,
                counts,
                work,
                workspace,
                lse=None,
                causal_lens=None,
                cp=(1, 0, 1),
            ):
                core.log.append(("decode", softmax_scale, output_scale, cp))
                requests = seq_lens.shape[0]
                need = core.workspace_bytes(self.heads, self.qlen, core._max_requests)
                assert workspace.numel() * workspace.element_size() >= need
                assert q.shape == (requests * self.qlen, self.heads, HEAD)
                assert (int(counts[0]), int(counts[1])) == (requests, self.qlen)
                total = None if causal_lens is None else causal_lens.tolist()
                out, log = reference_decode(
                    q,
                    cache,
                    block_table,
                    work[:requests].tolist(),
                    softmax_scale,
                    causal=self.causal,
                    causal_lens=total,
                    cp=cp,
                )
                if lse is not None:
                    assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
                    lse.copy_(log)
                return (out * output_scale).to(torch.bfloat16)

        self.KvBalancedMla = KvBalancedMla

    def check_shape(self, heads, qlen, device=None):
        return self._refuse(heads, qlen) if self._refuse else None

    def supports(self, heads, qlen, device=None):
        return self.check_shape(heads, qlen, device) is None

    def max_planned_requests(self, heads, qlen):
        return self._max_requests

    def max_active_clusters(self, device):
        return self._groups

    def counts_len(self):
        return 4

    def work_list_len(self, heads, qlen, max_requests, clusters):
        return max_requests + 5 * clusters

    def workspace_bytes(self, heads, qlen, max_requests):
        return 2 * self._groups * heads * qlen * (LATENT + 1) * 4

    def count(self, kind):
        """How many logged calls are of one kind."""
        return sum(entry[0] == kind for entry in self.log)


def install_fake_core(monkeypatch, **kwargs) -> FakeCore:
    """Put a fresh ``FakeCore`` and an empty kernel cache under ``decode.py``."""
    core = FakeCore(**kwargs)
    monkeypatch.setattr(decode_module, "core", core)
    monkeypatch.setattr(decode_module, "_KERNEL", decode_module.KvBalancedMlaKernel())
    monkeypatch.setattr(decode_module, "_is_capturing", lambda: False)
    # The workspace manager calls it as it grows; CPU builds of torch may raise.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return core


def make_config(
    *,
    max_num_seqs=16,
    speculative=0,
    dcp=1,
    non_causal=False,
    dbo=False,
    adaptive=False,
):
    """A real ``VllmConfig`` without a model, with the parts that decode.py reads."""
    config = VllmConfig()
    config.device_config = SimpleNamespace(device=CPU, device_type="cpu")
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.enable_dbo = dbo
    config.attention_config.use_non_causal = non_causal
    if speculative:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=speculative,
            parallel_drafting=False,
            method="dspark",
            target_parallel_config=config.parallel_config,
            enable_adaptive_verification=adaptive,
        )
    return config


def make_impl(config, *, num_heads=4, kv_cache_dtype="fp8", rank=0, **overrides):
    """A real impl, built as the layer builds it."""
    options = dict(
        num_heads=num_heads,
        head_size=HEAD,
        scale=SCALE,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=512,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        qk_head_dim=192,
        v_head_dim=128,
        kv_b_proj=torch.nn.Identity(),
    )
    options.update(overrides)
    with set_current_vllm_config(config):
        impl = KimiK3KvBalancedMLAImpl(**options)
    impl.dcp_rank = rank
    impl.need_to_return_lse_for_decode = impl.dcp_world_size > 1
    return impl


def make_layer(q_scale=1.0, k_scale=1.0):
    """The attributes of the attention layer that decode reads."""
    return SimpleNamespace(_q_scale_float=q_scale, _k_scale_float=k_scale)


def make_cache(lengths, *, block=BLOCK, stride=None, extra_blocks=3, seed=0):
    """A paged FP8 cache with scattered blocks.

    Returns the cache ``[blocks, block, 576]`` (bytes that no request owns hold the
    NaN pattern) and the block table (unused entries hold a huge id).
    """
    generator = torch.Generator().manual_seed(seed)
    per_request = [-(-length // block) for length in lengths]
    blocks = sum(per_request) + extra_blocks
    pool = torch.full((blocks, stride or block * HEAD), 0x7F, dtype=torch.uint8)
    order = torch.randperm(blocks, generator=generator).tolist()
    table = torch.full((len(lengths), max(per_request + [1]) + 2), 1 << 30)
    table = table.to(torch.int32)
    cache = pool[:, : block * HEAD].view(FP8).view(blocks, block, HEAD)
    for r, length in enumerate(lengths):
        for b in range(per_request[r]):
            page = order.pop()
            table[r, b] = page
            used = min(block, length - b * block)
            rows = torch.randn(used, HEAD, generator=generator)
            cache.view(torch.uint8)[page, :used] = rows.to(FP8).view(torch.uint8)
    return cache, table


def make_query(tokens, heads, seed=1):
    """FP8 query ``[tokens, heads, 576]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, HEAD, generator=generator).to(FP8)


def make_metadata(
    lengths, qlen, table, *, causal=True, causal_lens=None, seq_lens=None
):
    """Metadata of a decode-only step, as the builder makes it."""
    requests = len(lengths)
    if seq_lens is None:
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
    if causal_lens is not None:
        causal_lens = torch.tensor(causal_lens, dtype=torch.int32)
    starts = torch.arange(requests + 1, dtype=torch.int32) * qlen
    return MLACommonMetadata(
        num_reqs=requests,
        max_query_len=qlen,
        max_seq_len=max([*lengths, 1]),
        num_actual_tokens=requests * qlen,
        query_start_loc=starts,
        slot_mapping=torch.zeros(requests * qlen, dtype=torch.int64),
        num_decodes=requests,
        num_decode_tokens=requests * qlen,
        num_prefills=0,
        causal=causal,
        decode=KvBalancedDecodeMetadata(
            block_table=table,
            seq_lens=seq_lens,
            dcp_tot_seq_lens=causal_lens,
            query_len=qlen,
        ),
    )


@contextmanager
def forward(config):
    """One model forward, as the runner enters it."""
    with set_forward_context(None, config, num_tokens=1):
        yield
