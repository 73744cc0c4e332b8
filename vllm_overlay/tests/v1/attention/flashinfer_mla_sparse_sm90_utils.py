# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPU stand-in for FlashInfer's MLA wrapper, and batches and references for tests.

``FakeWrapper`` plans as FlashInfer 0.7.2 does, into an integer workspace of the same
layout. Its ``run`` takes everything from that workspace, as the kernel does: a schedule
that leaves out a token, follows slot -1 or merges the wrong rows gives wrong numbers or
an assertion. Nothing here needs a GPU.
"""

import heapq
import math
import sys
from types import ModuleType, SimpleNamespace

import torch

from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    MERGE_FIELDS,
    PLAN_INFO_FIELDS,
    WORK_FIELDS,
    Geometry,
    Merge,
    Schedule,
    WorkItem,
    WorkspaceLayout,
    ceil_div,
    row_kv_lengths,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec

LATENT = 512
CAPACITY = 16384
VERSION = "0.7.2.post1"


def plan_info(geometry, capacity=CAPACITY):
    """What FlashInfer reports for this geometry, and the bytes that it uses."""
    info = [geometry.cluster_size, geometry.clusters]
    end = 0
    for name in PLAN_INFO_FIELDS[2:16]:
        info.append(end)
        size = geometry.thread_blocks if name in MERGE_FIELDS else capacity
        end = ceil_div(end + 4 * size, 16) * 16
    return [*info, 0, 2 * LATENT * geometry.partial_rows], end


def host_schedule(lengths, starts, geometry):
    """FlashInfer's own schedule of one query token a row: equal pieces, a heap."""
    clusters, heads = geometry.clusters, geometry.heads
    mean = max(ceil_div(sum(lengths), clusters), 1)
    small = {8: 32, 16: 64, 32: 128, 64: 192}
    limit = next((v for k, v in small.items() if mean <= k), ceil_div(mean, 256) * 256)
    heap = [(0, cluster) for cluster in range(clusters)]
    owned: list[list[WorkItem]] = [[] for _ in range(clusters)]
    merges, partial = [], 0
    for row, length in enumerate(lengths):
        pieces = max(ceil_div(length, limit), 1)
        if pieces > 1:
            blocks = max(length * geometry.cluster_size // limit, 1)
            chunk = ceil_div(heads, blocks)
            for head in range(0, heads, chunk):
                merges.append(
                    Merge(
                        row * heads + head,
                        row * heads + min(head + chunk, heads),
                        partial + head,
                        partial + pieces * heads,
                        heads,
                    )
                )
        for piece in range(pieces):
            begin, end = piece * limit, min((piece + 1) * limit, length)
            cost, cluster = heapq.heappop(heap)
            heapq.heappush(heap, (cost + geometry.row_cost + end - begin, cluster))
            place = partial if pieces > 1 else -1
            owned[cluster].append(
                WorkItem(cluster, row, starts[row], place, 1, length, 0, begin, end)
            )
            partial += heads if pieces > 1 else 0
    bounds = [0]
    for items in owned:
        bounds.append(bounds[-1] + len(items))
    return Schedule(sum(map(tuple, owned), ()), tuple(bounds), tuple(merges))


def write_schedule(schedule, layout, workspace):
    """Store a schedule where the layout says; unused merge entries become zero."""

    def store(name, values):
        begin = layout.offsets[name]
        workspace[begin : begin + len(values)] = torch.tensor(
            values, dtype=torch.int32, device=workspace.device
        )

    for name in WORK_FIELDS:
        store(name, [getattr(item, name) for item in schedule.items])
    store("work_indptr", list(schedule.work_indptr))
    for name in MERGE_FIELDS:
        used = [getattr(merge, name) for merge in schedule.merges]
        store(name, used + [0] * (layout.geometry.thread_blocks - len(used)))


def execute(layout, workspace, slots, query, cache, sm_scale):
    """Do what the kernel does with a workspace: output and base-2 LSE, fp32.

    Rows that no item names keep NaN.
    """
    q, keys = query.float(), cache.float()
    rows, heads = q.shape[:2]
    out = torch.full((rows * heads, LATENT), math.nan)
    lse = torch.full((rows * heads,), math.nan)
    partial_rows = layout.geometry.partial_rows
    partial = torch.full((partial_rows, LATENT), math.nan)
    partial_lse = torch.full((partial_rows,), math.nan)
    schedule = layout.read(workspace)
    for item in schedule.items:
        begin = item.kv_indptr + item.kv_start
        chosen = slots[begin : begin + item.kv_end - item.kv_start].long()
        end_is_loaded = item.kv_end <= max(item.kv_len, item.kv_start)
        assert end_is_loaded, f"the loads stop before {item}"
        assert (chosen >= 0).all(), f"{item} follows slot -1"
        row_keys = keys[chosen]
        scores = q[item.q_indptr] @ row_keys.T * (sm_scale / math.log(2))
        piece_lse = torch.logsumexp(scores * math.log(2), -1) / math.log(2)
        weights = torch.exp2(scores - piece_lse[:, None])
        value = weights @ row_keys[:, :LATENT] if len(chosen) else 0.0
        first = item.q_indptr * heads
        to, to_lse = (out, lse) if item.partial_indptr < 0 else (partial, partial_lse)
        first = first if item.partial_indptr < 0 else item.partial_indptr
        to[first : first + heads] = value
        to_lse[first : first + heads] = piece_lse
    for merge in schedule.merges:
        end, stride = merge.merge_partial_end, merge.merge_stride
        rows_merged = range(merge.merge_packed_start, merge.merge_packed_end)
        for k, row in enumerate(rows_merged):
            pieces = list(range(merge.merge_partial_start + k, end, stride))
            part = partial_lse[pieces]
            lse[row] = torch.logsumexp(part * math.log(2), 0) / math.log(2)
            # Pieces that are all empty merge to 0, as FlashInfer's state_t does.
            out[row] = torch.exp2(part - lse[row]).nan_to_num() @ partial[pieces]
    return out.view(rows, heads, LATENT), lse.view(rows, heads)


class FakeWrapper:
    """``BatchMLAPagedAttentionWrapper`` for one query token a row, on the CPU."""

    made: list["FakeWrapper"] = []

    def __init__(self, float_workspace_buffer, backend):
        self.backend = backend
        self.workspace = float_workspace_buffer
        self.plans = []
        FakeWrapper.made.append(self)

    def plan(self, *, metadata, **facts):
        lengths = metadata.kv_len_arr.tolist()
        starts = metadata.kv_indptr.tolist()
        assert metadata.qo_indptr.tolist() == list(range(len(lengths) + 1))
        assert starts[-1] <= metadata.kv_indices.numel()
        heads = facts["num_heads"]
        cluster = 1 if heads <= 64 else 2
        geometry = Geometry(heads, cluster, current_platform.num_compute_units(0), 0)
        info, used = plan_info(geometry)
        workspace = torch.full((used // 4 + 64,), -77, dtype=torch.int32)
        layout = WorkspaceLayout.from_plan(info, 4 * workspace.numel(), geometry)
        write_schedule(host_schedule(lengths, starts, geometry), layout, workspace)
        assert self.workspace.numel() >= (2 * LATENT + 4) * geometry.partial_rows
        self.plans.append((lengths, facts))
        self.layout = layout
        self._planned_backend = SimpleNamespace(
            _plan_info=info,
            _int_workspace_buffer=workspace.view(torch.uint8),
            _kv_indices_buf=metadata.kv_indices,
        )

    def run(self, *, query, kv_cache, return_lse=False):
        facts = self.plans[-1][1]
        planned = self._planned_backend
        out, lse = execute(
            self.layout,
            planned._int_workspace_buffer.view(torch.int32),
            planned._kv_indices_buf,
            torch.cat(query, -1),
            torch.cat(kv_cache, -1).squeeze(1),
            facts["sm_scale"],
        )
        out = out.to(query[0].dtype)
        return (out, lse) if return_lse else out


def install(monkeypatch, thread_blocks=8, wrapper=FakeWrapper, version=VERSION):
    """Put the stand-in where ``flashinfer`` is imported; give the wrappers made."""
    package, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    csr = SimpleNamespace(csr=lambda **kw: SimpleNamespace(**kw))
    vars(mla).update(BatchMLAPagedAttentionWrapper=wrapper, MLAPlanMetadata=csr)
    vars(package).update(__version__=version, mla=mla)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(
        type(current_platform),
        "num_compute_units",
        classmethod(lambda cls, device_id=0: thread_blocks),
    )
    monkeypatch.setattr(FakeWrapper, "made", [])
    return FakeWrapper.made


def common_metadata(query_lens, seq_lens, padded_tokens=0, block_size=64, device="cpu"):
    """``CommonAttentionMetadata`` with one run of blocks a request.

    Padding adds tokens, not requests. Block 0 belongs to nobody.
    """
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    seq = torch.tensor(seq_lens, dtype=torch.int32)
    blocks = max([ceil_div(n, block_size) for n in seq_lens] + [1])
    requests = len(query_lens)
    table = 1 + torch.arange(requests * blocks, dtype=torch.int32)
    table = table.view(requests, blocks)
    tokens = int(starts[-1]) + padded_tokens
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq.to(device),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max([*query_lens, 1]),
        max_seq_len=max([*seq_lens, 1]),
        block_table_tensor=table.to(device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=seq + 3,
    )


def select(cam, rows, width, topk, kpool, generator):
    """What an indexer leaves in its buffer: token positions ``[rows, width]``, -1.

    Valid entries are spread over the row, as conversion has to pack them.
    """
    starts, seq = cam.query_start_loc.tolist(), cam.seq_lens.tolist()
    lengths = row_kv_lengths(starts, seq, rows, topk, kpool, width)
    chosen = torch.full((rows, width), -1, dtype=torch.int32)
    for request, seq_len in enumerate(seq):
        for row in range(starts[request], min(starts[request + 1], rows)):
            context = seq_len - starts[request + 1] + row + 1
            count = lengths[row]
            tokens = torch.randperm(context, generator=generator)[:count].sort().values
            columns = torch.randperm(width, generator=generator)[:count].sort().values
            chosen[row, columns] = tokens.to(torch.int32)
    return chosen, lengths


def reference(q, slots_cache, chosen, cam, sm_scale, block_stride_rows, block_size=64):
    """float64 attention over each row's selected tokens, and the base-2 LSE.

    Args:
        q: ``[rows, heads, 512 + rope]``.
        slots_cache: All slots, dequantised, ``[slots, 512 + rope]``.
        chosen: Token positions ``[rows, width]``, -1 where nothing is selected.
        cam: The batch; its device lengths count.
        sm_scale: Softmax scale.
        block_stride_rows: Rows from one block to the next.
        block_size: Rows of a block.

    """
    starts = cam.query_start_loc.tolist()
    out = q.new_zeros(*q.shape[:2], LATENT, dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float64)
    for request in range(len(starts) - 1):
        for row in range(starts[request], min(starts[request + 1], q.shape[0])):
            tokens = chosen[row][chosen[row] >= 0].long()
            if not len(tokens):
                continue
            blocks = cam.block_table_tensor[request, tokens // block_size].long()
            slots = blocks * block_stride_rows + tokens % block_size
            keys = slots_cache[slots].double()
            scores = q[row].double() @ keys.T * sm_scale
            lse[row] = torch.logsumexp(scores, -1) / math.log(2)
            out[row] = torch.softmax(scores, -1) @ keys[:, :LATENT]
    return out, lse


def make_builder(
    module,
    device,
    heads,
    rope,
    *,
    fp8=False,
    max_tokens=64,
    topk=128,
    kpool=None,
    width=256,
    speculative=None,
    use_mha=False,
    k_scale=1.0,
    return_lse=False,
    graphs=None,
):
    """The module's real builder on vLLM's real parents: ``(builder, layer)``.

    Works for upstream's file of the same name as well. ``layer.impl`` is the module's
    impl without the parts that need a model. ``graphs`` are the captured sizes.
    """
    impl = object.__new__(module.FlashInferMLASparseSM90Impl)
    impl.num_heads = heads
    impl.head_size = LATENT + rope
    impl.scale = (128 + rope) ** -0.5
    impl.kv_lora_rank = LATENT
    impl.qk_rope_head_dim = rope
    impl.kv_cache_dtype = "fp8_e4m3" if fp8 else "auto"
    impl.use_fp8_kv_cache = fp8
    impl.need_to_return_lse_for_decode = return_lse
    impl.topk_indices_buffer = torch.full(
        (max_tokens, width), -1, dtype=torch.int32, device=device
    )
    layer = SimpleNamespace(
        impl=impl,
        prefill_backend=None,
        _use_sparse_mha=lambda metadata: use_mha,
        _k_scale_float=k_scale,
    )
    hf = SimpleNamespace(
        index_topk=topk,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=rope,
        v_head_dim=128,
    )
    if kpool is not None:
        hf.index_kpool = kpool
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=hf,
            get_num_attention_heads=lambda parallel: heads,
            max_model_len=8192,
            dtype=torch.bfloat16,
            model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_tokens, max_num_seqs=16, async_scheduling=True
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            tensor_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        cache_config=SimpleNamespace(block_size=64, cache_dtype=impl.kv_cache_dtype),
        attention_config=SimpleNamespace(
            hisparse_config=None, sparse_mla_force_mqa=False
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={"attn": layer},
            cudagraph_mode=graphs and CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=graphs,
        ),
        speculative_config=speculative,
    )
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=LATENT + rope,
        dtype=torch.uint8 if fp8 else torch.bfloat16,
    )
    return module.FlashInferMLASparseSM90Builder(spec, ["attn"], config, device), layer


def make_cache(cam, chosen, rope, fp8, generator, stride=1):
    """A poisoned pool with values only where a row selects; all on one device.

    Returns:
        The layer's cache ``[blocks, 64, 512 + rope]`` whose blocks lie ``stride``
        blocks apart, and all of its slots, dequantised at a scale of 1.

    """
    device = chosen.device
    head = LATENT + rope
    blocks = int(cam.block_table_tensor.max()) + 2 if cam.num_reqs else 2
    pool = torch.full((blocks * stride * 64, head), math.nan, device=device)
    starts = cam.query_start_loc.tolist()
    for request in range(cam.num_reqs):
        rows = chosen[starts[request] : starts[request + 1]]
        tokens = rows[rows >= 0].long().unique()
        block = cam.block_table_tensor[request, tokens // 64].long()
        pool[block * stride * 64 + tokens % 64] = torch.randn(
            len(tokens), head, generator=generator, device=device
        )
    pool = pool.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    stored = pool.view(torch.uint8) if fp8 else pool
    return stored.view(blocks, stride, 64, head)[:, 0], pool.float()
