# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3's MLA layer with an FP8 cache and a bf16 prefill query, on a CPU.

The layer's own attention code runs; the CUDA ops that it calls are replaced by torch
functions with the ops' schemas, the backends of prefill and decode by exact
attention. What the layer must hold: new tokens attend in bf16, the cache gets E4M3
values of latent and rotated rope part divided by the scale, context comes back
multiplied by it, and a decode's query is FP8 or not as its backend asks.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonPrefillMetadata,
    build_mla_chunked_context_metadata,
)
from vllm.models.kimi_k3.nvidia import mla
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.models.kimi_k3.nvidia.ops import mla_bf16_prefill_fp8_cache
from vllm.v1.worker import workspace

pytestmark = pytest.mark.skip_global_cleanup

HEADS, NOPE, ROPE, LATENT, V = 4, 128, 64, 512, 128
BLOCK = 64
CHUNK_TOKENS = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE = (NOPE + ROPE) ** -0.5
CPU = torch.device("cpu")


# --- CPU versions of the CUDA ops -------------------------------------------------


def quantize(values, scale_inv):
    scaled = (values.float() * scale_inv.float()).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(FP8)


def rotate(values, positions, cos_sin_cache):
    """GPT-J style rotation of the last dimension in fp32; the rest broadcasts."""
    if positions is None:
        return values.float()
    table = cos_sin_cache[positions]
    cos, sin = table[:, : ROPE // 2], table[:, ROPE // 2 :]
    while cos.dim() < values.dim():
        cos, sin = cos[:, None], sin[:, None]
    x, y = values.float()[..., 0::2], values.float()[..., 1::2]
    return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1).flatten(-2)


def store(cache, rows, slots, block):
    for row, slot in zip(rows, slots.tolist()):
        if slot >= 0:
            cache[slot // block, slot % block] = row


def key_concat(
    q,
    k_nope,
    k_pe,
    kv_c,
    k_out,
    cache,
    slots,
    block,
    positions=None,
    cos_sin=None,
):
    assert cache.dtype == k_nope.dtype
    pe = rotate(k_pe, positions, cos_sin)
    if positions is not None:
        q[..., NOPE:] = rotate(q[..., NOPE:], positions, cos_sin).to(q.dtype)
    k_out[..., :NOPE] = k_nope
    k_out[..., NOPE:] = pe[:, None].to(k_out.dtype)
    store(cache, torch.cat((kv_c, pe.to(kv_c.dtype)), dim=-1), slots, block)


def kv_concat(k_nope, k_pe, k_out):
    assert k_pe.dtype == k_nope.dtype
    k_out[..., :NOPE] = k_nope
    k_out[..., NOPE:] = k_pe[:, None]


def decode_concat(
    ql, q_pe, kv_c, k_pe, mqa_q, cache, slots, block, positions=None, cos_sin=None
):
    mqa_q.copy_(torch.cat((ql, rotate(q_pe, positions, cos_sin).to(ql.dtype)), -1))
    pe = rotate(k_pe, positions, cos_sin).to(kv_c.dtype)
    store(cache, torch.cat((kv_c, pe), dim=-1), slots, block)


def decode_concat_fp8(
    ql,
    q_pe,
    kv_c,
    k_pe,
    mqa_q,
    cache,
    slots,
    q_inv,
    cache_inv,
    block,
    positions=None,
    cos_sin=None,
):
    assert kv_c.is_contiguous() and mqa_q.dtype == cache.dtype == FP8
    assert q_inv.shape == cache_inv.shape == (1,)
    query = torch.cat((ql.float(), rotate(q_pe, positions, cos_sin)), -1)
    mqa_q.copy_(quantize(query, q_inv))
    row = torch.cat((kv_c.float(), rotate(k_pe, positions, cos_sin)), -1)
    store(cache, quantize(row, cache_inv), slots, block)


def gather_dequant(
    cache, dst, table, cu_seq_lens, token_to_seq, tokens, dtype, scale, starts=None
):
    """Pages of the cache, times the scale for an FP8 cache."""
    for r in range(cu_seq_lens.shape[0] - 1):
        begin, end = cu_seq_lens[r : r + 2].tolist()
        first = 0 if starts is None else int(starts[r])
        for i in range(end - begin):
            position = first + i
            row = cache[int(table[r, position // BLOCK]), position % BLOCK].float()
            factor = float(scale) if dtype.startswith("fp8") else 1.0
            dst[begin + i] = (row * factor).to(dst.dtype)


_OPTIONAL = "Tensor? position_ids=None, Tensor? cos_sin_cache=None"
_OPS = {
    "fused_kimi_k3_mla_key_concat_kv_cache_insert": (
        "(Tensor! q, Tensor k_nope, Tensor k_pe, Tensor kv_c, Tensor! k_out, "
        f"Tensor! cache, Tensor slots, int block, {_OPTIONAL}) -> ()",
        key_concat,
    ),
    "fused_kimi_k3_mla_kv_concat": (
        "(Tensor k_nope, Tensor k_pe, Tensor! k_out) -> ()",
        kv_concat,
    ),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert": (
        "(Tensor ql, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor! mqa_q, "
        f"Tensor! cache, Tensor slots, int block, {_OPTIONAL}) -> ()",
        decode_concat,
    ),
    "fused_kimi_k3_mla_decode_q_concat_kv_cache_fp8_insert": (
        "(Tensor ql, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor! mqa_q, "
        "Tensor! cache, Tensor slots, Tensor q_inv, Tensor cache_inv, int block, "
        f"{_OPTIONAL}) -> ()",
        decode_concat_fp8,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _cpu_ops():
    library = torch.library.Library("_C", "FRAGMENT")
    for name, (schema, function) in _OPS.items():
        if not hasattr(torch.ops._C, name):
            library.define(name + schema)
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse):
    """What ``merge_attn_states`` does; LSE ``[heads, tokens]``, base e."""
    total = torch.logaddexp(prefix_lse, suffix_lse)
    a = torch.exp(prefix_lse - total).T[..., None]
    b = torch.exp(suffix_lse - total).T[..., None]
    output.copy_(prefix_output.float() * a + suffix_output.float() * b)


class PrefillBackend:
    """Exact attention with the prefill backends' interface."""

    def __init__(self, starts):
        self.starts = starts
        self.dtypes = []

    def get_name(self):
        return "exact"

    def supports_out(self):
        return False

    def _attend(self, q, k, v, causal):
        self.dtypes.append((q.dtype, k.dtype, v.dtype))
        scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * SCALE
        if causal:
            mask = torch.ones(q.shape[0], k.shape[0]).tril().bool()
            scores = scores.masked_fill(~mask, float("-inf"))
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), v.float())
        return out.to(q.dtype), scores.logsumexp(-1)

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None):
        parts = [
            self._attend(q[a:b], k[a:b], v[a:b], True)
            for a, b in zip(self.starts, self.starts[1:])
        ]
        merged = torch.cat([p[0] for p in parts])
        lse = torch.cat([p[1] for p in parts], dim=1)
        return (merged, lse) if return_softmax_lse else merged

    def run_prefill_context_chunk(self, *, chunk, q, k, v, out=None):
        outs, lses = [], []
        for r in range(chunk.num_requests):
            a, b = chunk.query_start_loc[r : r + 2].tolist()
            c, d = chunk.cu_seq_lens[r : r + 2].tolist()
            o, lse = self._attend(q[a:b], k[c:d], v[c:d], False)
            outs.append(o)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, dim=1)


class DecodeBackend:
    """Exact causal attention over the cache, with the part of an impl that decodes.

    Query and cache come as they are stored: a quantized query is ``q / q_scale``.
    """

    def __init__(self, quantized_query):
        self.supports_quant_query_input = quantized_query

    def forward_mqa(self, q, cache, metadata, layer):
        quantized = self.supports_quant_query_input
        assert q.dtype == (FP8 if quantized else torch.bfloat16)
        assert cache.dtype == FP8
        k_scale = layer._k_scale_float
        scale = SCALE * k_scale * (layer._q_scale_float if quantized else 1.0)
        decode = metadata.decode
        starts = metadata.query_start_loc.tolist()
        outs = []
        for r, length in enumerate(decode.seq_lens.tolist()):
            position = torch.arange(length)
            pages = decode.block_table[r, position // BLOCK].long()
            rows = cache[pages, position % BLOCK].float()
            query = q[starts[r] : starts[r + 1]].float()
            bounds = length - query.shape[0] + torch.arange(query.shape[0])
            scores = torch.einsum("jhd,td->jht", query, rows) * scale
            hidden = position[None] > bounds[:, None]
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            latent = rows[:, :LATENT] * k_scale
            outs.append(torch.einsum("jht,tl->jhl", scores.softmax(-1), latent))
        return torch.cat(outs).bfloat16(), None


class Projection(torch.nn.Module):
    """``kv_b_proj`` in bf16."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(HEADS * (NOPE + V), LATENT, generator=generator)
        self.weight = torch.nn.Parameter((weight * LATENT**-0.5).bfloat16(), False)

    def forward(self, x):
        assert x.dtype == torch.bfloat16
        return torch.nn.functional.linear(x, self.weight), None


class Layer:
    """The attention half of the layer: its real methods on the attributes they read."""

    _attention: Any = MultiHeadLatentAttention._attention
    _attn_read_kv_cache = MultiHeadLatentAttention._attn_read_kv_cache
    _compute_prefill_context = MultiHeadLatentAttention._compute_prefill_context
    _decode_concat_cache = MultiHeadLatentAttention._decode_concat_cache
    _forward_prefill_fused = MultiHeadLatentAttention._forward_prefill_fused
    _gather_context_latent = MultiHeadLatentAttention._gather_context_latent
    _v_up_proj = MultiHeadLatentAttention._v_up_proj

    def __init__(self, impl, cache, cache_dtype, q_scale, k_scale, rope):
        self.layer_name = "layer"
        self.impl = impl
        self.kv_cache, self.kv_cache_dtype = cache, cache_dtype
        self.kv_b_proj = Projection()
        self.num_local_heads, self.kv_lora_rank = HEADS, LATENT
        self.qk_nope_head_dim, self.qk_rope_head_dim = NOPE, ROPE
        self.v_head_dim = V
        self.dcp_world_size = 1
        weight = self.kv_b_proj.weight.view(HEADS, NOPE + V, LATENT)
        self.W_UK_T = weight[:, :NOPE].contiguous()
        self.W_UV = weight[:, NOPE:].transpose(1, 2).contiguous()
        self._q_scale, self._k_scale = torch.tensor(q_scale), torch.tensor(k_scale)
        self._q_scale_float, self._k_scale_float = q_scale, k_scale
        self._q_scale_inv = self._q_scale.reciprocal().reshape(1)
        self._k_scale_inv = self._k_scale.reciprocal().reshape(1)
        self._one_scale = torch.ones(1)
        angles = torch.arange(1024)[:, None] * 10.0 ** (-torch.arange(ROPE // 2) / 8)
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1) if rope else None
        self.rotary_emb = SimpleNamespace(cos_sin_cache=self.table) if rope else None


class Batch:
    """Requests of ``(context, new tokens)``, the decodes first."""

    def __init__(self, decodes, prefills, seed=2):
        self.decodes, self.prefills = decodes, prefills
        self.requests = [*decodes, *prefills]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).bfloat16()

        self.tokens = sum(n for _, n in self.requests)
        totals = [c + n for c, n in self.requests]
        self.latent = [normal(t, LATENT) for t in totals]
        self.rope = [normal(t, ROPE) for t in totals]
        self.q = normal(self.tokens, HEADS, NOPE + ROPE)
        self.positions = torch.cat([torch.arange(c, c + n) for c, n in self.requests])
        pages = [-(-t // BLOCK) for t in totals]
        self.table = torch.zeros(len(totals), max(pages), dtype=torch.int32)
        page = 1
        for r, count in enumerate(pages):
            self.table[r, :count] = torch.arange(page, page + count)
            page += count
        self.pages = page
        self.slots = torch.cat(
            [
                self.table[r, torch.arange(c, c + n) // BLOCK].long() * BLOCK
                + torch.arange(c, c + n) % BLOCK
                for r, (c, n) in enumerate(self.requests)
            ]
        )

    def new(self, values):
        """The new tokens' rows of a per-request list."""
        return torch.cat([v[c : c + n] for v, (c, n) in zip(values, self.requests)])

    def decode_metadata(self):
        """The decodes' part of the metadata; a backend may want its own class."""
        count = len(self.decodes)
        lengths = [c + n for c, n in self.decodes]
        return MLACommonDecodeMetadata(
            block_table=self.table[:count],
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            dcp_tot_seq_lens=None,
        )

    def metadata(self, q_dtype):
        count = len(self.decodes)
        decode = prefill = None
        lengths = torch.tensor([c + n for c, n in self.requests], dtype=torch.int32)
        starts = torch.tensor([0, *(n for _, n in self.requests)]).cumsum(0)
        if count:
            decode = self.decode_metadata()
        if self.prefills:
            prefill_starts = (starts[count:] - starts[count]).int()
            backend = PrefillBackend(prefill_starts.tolist())
            contexts = torch.tensor([c for c, _ in self.prefills])
            chunked = build_mla_chunked_context_metadata(
                context_lens_cpu=contexts,
                prefill_query_start_loc_cpu=prefill_starts,
                chunked_prefill_workspace=torch.empty(
                    CHUNK_TOKENS, LATENT + ROPE, dtype=q_dtype
                ),
                chunked_prefill_workspace_size=CHUNK_TOKENS,
                block_size=BLOCK,
                align_chunk_to_block=True,
                device=CPU,
                dcp_world_size=1,
                dcp_local_block_size=1,
                dcp_virtual_block_size=1,
            )
            prefill = MLACommonPrefillMetadata(
                block_table=self.table[count:],
                query_start_loc=prefill_starts,
                max_query_len=max(n for _, n in self.prefills),
                chunked_context=chunked,
                q_data_type=q_dtype,
                output_dtype=torch.bfloat16,
                prefill_backend=backend,
            )
        decode_tokens = int(starts[count])
        return MLACommonMetadata(
            num_reqs=len(self.requests),
            max_query_len=max(n for _, n in self.requests),
            max_seq_len=int(lengths.max()),
            num_actual_tokens=self.tokens,
            query_start_loc=starts.int(),
            slot_mapping=self.slots,
            num_decodes=count,
            num_decode_tokens=decode_tokens,
            num_prefills=len(self.prefills),
            prefill=prefill,
            decode=decode,
        )


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    workspace.init_workspace_manager(CPU)
    monkeypatch.setattr(mla, "merge_attn_states", merge)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge_into_prefix)
    monkeypatch.setattr(mla.ops, "gather_and_maybe_dequant_cache", gather_op)
    cached = mla_attention.backend_supports_prefill_query_quantization
    cached.cache_clear()
    # The workspace manager calls it as it grows; CPU builds of torch may raise.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool only slows down tensors of this size
    yield
    torch.set_num_threads(threads)
    cached.cache_clear()
    workspace.reset_workspace_manager()


def gather_op(
    *,
    src_cache,
    dst,
    block_table,
    cu_seq_lens,
    token_to_seq,
    num_tokens,
    kv_cache_dtype,
    scale,
    seq_starts=None,
):
    gather_dequant(
        src_cache,
        dst,
        block_table,
        cu_seq_lens,
        token_to_seq,
        num_tokens,
        kv_cache_dtype,
        scale,
        seq_starts,
    )


def merge_into_prefix(
    *, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None
):
    """The chunk-accumulating use of ``merge_attn_states`` (output aliases an input)."""
    total = torch.logaddexp(prefix_lse, suffix_lse)
    merge(output, prefix_output.clone(), prefix_lse, suffix_output, suffix_lse)
    if output_lse is not None:
        output_lse.copy_(total)


def cpu_config():
    """A real ``VllmConfig`` without a model."""
    config = VllmConfig()
    config.device_config = SimpleNamespace(device=CPU, device_type="cpu")
    return config


def run_layer(batch, *, cache_dtype, rope, scales=(1.0, 1.0), impl=None, config=None):
    """Fill the context, run the layer once.

    Returns:
        Output ``[tokens, heads, V]`` in fp32, cache, metadata and layer.

    """
    fp8 = cache_dtype.startswith("fp8")
    impl = impl or DecodeBackend(quantized_query=True)
    config = config or cpu_config()
    dtype = torch.uint8 if fp8 else torch.bfloat16
    cache = torch.zeros(batch.pages, BLOCK, LATENT + ROPE, dtype=dtype)
    layer = Layer(impl, cache, cache_dtype, scales[0], scales[1], rope)
    table = layer.table
    view = cache.view(FP8) if fp8 else cache
    for r, (context, _) in enumerate(batch.requests):
        positions = torch.arange(context)
        pe = rotate(batch.rope[r][:context], positions if rope else None, table)
        rows = torch.cat((batch.latent[r][:context].float(), pe), dim=-1)
        rows = quantize(rows, layer._k_scale_inv) if fp8 else rows.bfloat16()
        slots = batch.table[r, positions // BLOCK].long() * BLOCK + positions % BLOCK
        store(view, rows, slots, BLOCK)
    out = torch.zeros(batch.tokens, HEADS * V, dtype=torch.bfloat16)
    metadata = batch.metadata(torch.bfloat16)
    with set_forward_context(
        {"layer": metadata},
        config,
        num_tokens=batch.tokens,
        slot_mapping={"layer": batch.slots},
    ):
        layer._attention(
            batch.positions,
            batch.q.clone(),
            batch.new(batch.latent),
            batch.new(batch.rope).unsqueeze(1),
            out,
        )
    return out.view(-1, HEADS, V).float(), view, metadata, layer


def exact(batch, layer, scales, fp8):
    """The layer's result from the definition, in fp32.

    Stored tokens (context, and everything for decodes) are seen as the cache keeps
    them; a prefill's own tokens are seen in bf16.
    """
    weight = layer.kv_b_proj.weight.float().view(HEADS, NOPE + V, LATENT)
    table = layer.table
    outs, token = [], 0
    for r, (context, new) in enumerate(batch.requests):
        total = context + new
        positions = torch.arange(total)
        pe = rotate(batch.rope[r], positions if table is not None else None, table)
        rows = torch.cat((batch.latent[r].float(), pe), dim=-1)
        q = batch.q[token : token + new].float()
        q_pe = rotate(
            q[..., NOPE:], positions[context:] if table is not None else None, table
        )
        stored = total if r < len(batch.decodes) else context
        if fp8:
            inv = torch.tensor([1 / scales[1]])
            rows[:stored] = quantize(rows[:stored], inv).float() * scales[1]
        keys = torch.einsum("tl,hdl->thd", rows[:, :LATENT], weight)
        scores = torch.einsum("jhd,thd->jht", q[..., :NOPE], keys[..., :NOPE])
        scores += torch.einsum("jhd,td->jht", q_pe, rows[:, LATENT:])
        mask = positions[None] <= positions[context:, None]
        scores = (scores * SCALE).masked_fill(~mask[:, None], float("-inf"))
        outs.append(torch.einsum("jht,thd->jhd", scores.softmax(-1), keys[..., NOPE:]))
        token += new
    return torch.cat(outs)


def relative_error(a, b):
    return float((a - b).norm() / b.norm())


BATCHES = {
    "new tokens": Batch([], [(0, 5), (0, 70), (0, 1)]),
    "chunked context": Batch([], [(300, 8), (64, 3), (0, 6), (130, 70)]),
    "decode": Batch([(99, 1), (64, 1)], []),
    "verify": Batch([(90, 8), (300, 8)], []),
    "mixed": Batch([(90, 8), (127, 8)], [(200, 9), (0, 20)]),
}


def check_output(batch, out, expected, metadata):
    """Hold a layer's output to `exact`, and its prefill to a bf16 query."""
    # Decode also rounds the query to FP8; prefill rounds to bf16 only.
    decode_tokens = metadata.num_decode_tokens
    assert relative_error(out[decode_tokens:], expected[decode_tokens:]) < 0.02 or (
        decode_tokens == batch.tokens
    )
    if decode_tokens:
        assert relative_error(out[:decode_tokens], expected[:decode_tokens]) < 0.06
    if metadata.prefill is not None:
        kinds = set(metadata.prefill.prefill_backend.dtypes)
        assert kinds == {(torch.bfloat16, torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("rope", [False, True], ids=["nope", "rope"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0), (2.0, 0.25)])
@pytest.mark.parametrize("name", list(BATCHES))
def test_fp8_cache_with_bf16_prefill_query(name, scales, rope):
    batch = BATCHES[name]
    out, cache, metadata, layer = run_layer(
        batch, cache_dtype="fp8", rope=rope, scales=scales
    )
    expected = exact(batch, layer, scales, fp8=True)
    check_output(batch, out, expected, metadata)
    # The new tokens' rows in the cache, bit for bit.
    table = layer.table
    pe = rotate(batch.new(batch.rope), batch.positions if rope else None, table)
    rows = torch.cat((batch.new(batch.latent).float(), pe), dim=-1)
    stored = cache[batch.slots // BLOCK, batch.slots % BLOCK]
    want = quantize(rows, torch.tensor([1 / scales[1]]))
    assert torch.equal(stored.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("rope", [False, True], ids=["nope", "rope"])
@pytest.mark.parametrize("name", ["new tokens", "chunked context"])
def test_prefill_agrees_with_a_bf16_cache(name, rope):
    batch = BATCHES[name]
    fp8, *_ = run_layer(batch, cache_dtype="fp8_e4m3", rope=rope)
    bf16, *_ = run_layer(batch, cache_dtype="auto", rope=rope)
    for a, b in zip(fp8, bf16):
        assert float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) > 0.999


@pytest.mark.parametrize("name", ["decode", "verify", "mixed"])
def test_decode_of_a_backend_that_takes_a_bf16_query(name):
    """The draft's and TRITON_MLA's case: the query's FP8 step is undone."""
    batch, scales = BATCHES[name], (0.5, 2.0)
    impl = DecodeBackend(quantized_query=False)
    out, _, metadata, layer = run_layer(
        batch, cache_dtype="fp8", rope=True, scales=scales, impl=impl
    )
    expected = exact(batch, layer, scales, fp8=True)
    decoded = metadata.num_decode_tokens
    assert relative_error(out[:decoded], expected[:decoded]) < 0.06


def test_tokens_without_a_slot_are_attended_but_not_stored():
    batch = Batch([], [(0, 6)])
    batch.slots[3:] = -1
    out, cache, _, layer = run_layer(batch, cache_dtype="fp8", rope=True)
    assert relative_error(out, exact(batch, layer, (1.0, 1.0), fp8=True)) < 0.02
    assert torch.all(cache.view(torch.uint8)[1, 3:] == 0)
    assert torch.any(cache.view(torch.uint8)[1, :3] != 0)


@pytest.mark.parametrize("flag", [False, True])
def test_query_quantization_flag_changes_nothing_off_blackwell(flag):
    """The flag that stock's assertion asks for; the answer is a bf16 query."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        attention_config=SimpleNamespace(use_prefill_query_quantization=flag),
    )
    dtype = mla_attention.MLACommonMetadataBuilder.determine_prefill_query_data_type(
        config, torch.bfloat16
    )
    assert dtype == torch.bfloat16
    choose = mla_bf16_prefill_fp8_cache.use_bf16_prefill_with_fp8_cache
    assert choose("fp8", fp8_prefill=False) and choose("fp8_e4m3", fp8_prefill=False)


@pytest.mark.parametrize(
    ("cache_dtype", "fp8_prefill", "blackwell", "expected"),
    [
        ("fp8", False, False, True),
        ("fp8", True, False, False),
        ("fp8", False, True, False),
        ("fp8_ds_mla", False, False, False),
        ("fp8_e5m2", False, False, False),
        ("auto", False, False, False),
    ],
)
def test_who_takes_the_bf16_path(
    monkeypatch, cache_dtype, fp8_prefill, blackwell, expected
):
    monkeypatch.setattr(
        mla_bf16_prefill_fp8_cache,
        "backend_supports_prefill_query_quantization",
        lambda: blackwell,
    )
    choose = mla_bf16_prefill_fp8_cache.use_bf16_prefill_with_fp8_cache
    assert choose(cache_dtype, fp8_prefill) is expected


def test_blackwell_keeps_its_assertion(monkeypatch):
    """Where FP8 prefill exists, the layer still asks for it, with stock's advice."""
    monkeypatch.setattr(
        mla, "use_bf16_prefill_with_fp8_cache", lambda *args, **kwargs: False
    )
    with pytest.raises(AssertionError, match="use_prefill_query_quantization"):
        run_layer(BATCHES["new tokens"], cache_dtype="fp8", rope=False)
