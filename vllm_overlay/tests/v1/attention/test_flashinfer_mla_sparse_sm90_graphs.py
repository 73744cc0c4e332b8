# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A step's plan and the kernel in a CUDA graph agree, by vLLM's own dispatchers.

A graph that was captured with FlashInfer's kernel must always find a plan of its step,
whatever padding its batch gets. Nothing here needs a GPU or Triton.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 as backend
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
from tests.v1.attention import flashinfer_mla_sparse_sm90_utils as utils
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.mla import (
    flashinfer_mla_sparse_sm90_flashinfer as flashinfer_module,
)
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

pytestmark = pytest.mark.skip_global_cleanup
CPU = torch.device("cpu")
OWN, MOST_REQUESTS = 16, 40
USUAL = [1, 2, 4, *range(8, 257, 8)]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


class Recorder:
    """Stands for the planner, our kernel and FlashInfer's: what was called."""

    def __init__(self, *args):
        self.rows = []

    def warm_up(self):
        pass

    def __call__(self, num_rows, *batch):
        self.rows.append(num_rows)

    def decode(self, q_nope, *rest):
        self.rows.append(q_nope.shape[0])
        return None, None


class Engine:
    """The real builder, and vLLM's own choice of graphs."""

    def __init__(self, sizes, mode, query_len=1, varlen=False, ranks=1):
        speculative = None
        if query_len > 1:
            speculative = SimpleNamespace(
                num_speculative_tokens=query_len - 1,
                parallel_drafting=False,
                uses_dynamic_speculative_decoding=lambda: False,
            )
        self.builder, self.layer = utils.make_builder(
            backend, CPU, 4, 64, max_tokens=24, graphs=sizes, speculative=speculative
        )
        self.query_len, self.varlen = query_len, varlen
        self.state = self.builder.state
        config = self.config = self.builder.vllm_config
        config.compilation_config.cudagraph_mode = mode
        config.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        config.num_speculative_tokens = query_len - 1
        config.scheduler_config.max_num_seqs = MOST_REQUESTS
        config.parallel_config.data_parallel_size = ranks
        config.lora_config = None
        config.cache_config.use_kda_recoverssm = False
        self.target = self.manager(mode, query_len, varlen)
        full = mode.decode_mode() == FULL
        self.first_draft = self.manager(mode, query_len)
        draft_mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        self.next_draft = self.manager(draft_mode, 1)

    def manager(self, mode, query_len, varlen=False):
        manager = SpeculatorCudaGraphManager(
            self.config, CPU, mode, query_len, varlen_decode=varlen
        )
        manager._graphs_captured = True
        return manager

    def forwards(self, requests):
        """Rows that are built, and rows of the graph or of the eager call."""
        tokens, width = requests * self.query_len, self.query_len
        # Without a full graph for whatever reason, too: the draft may have one.
        for known in (width, None):
            desc = self.target.dispatch(requests, tokens, known, 0, known)
            built = desc.num_tokens if desc.cg_mode == FULL else tokens
            yield built, built
            padded = max(tokens, desc.num_tokens)
            draft = self.first_draft.dispatch(requests, padded, width, 0)
            if width > 1 and draft.cg_mode == FULL:
                yield built, draft.num_tokens
        desc = self.next_draft.dispatch(requests, requests, 1, 0)
        built = desc.num_tokens if desc.cg_mode == FULL else requests
        yield built, built

    def planned(self, rows):
        """Is a step of so many rows planned?"""
        planner = self.state.flashinfer.planner
        planner.rows.clear()
        batch = SimpleNamespace(query_start_loc=None, seq_lens=None, num_reqs=1)
        self.state.plan(rows, batch, None)
        assert planner.rows in ([], [rows])
        return bool(planner.rows)

    def reads_plan(self, rows):
        """Does a call of so many rows run FlashInfer's kernel?"""
        theirs = Recorder()
        flashinfer, self.state.flashinfer = self.state.flashinfer, theirs
        q = torch.empty(rows, 4, 576, dtype=torch.bfloat16)
        self.state.decode(q[..., :512], q[..., 512:], q[0], None)
        self.state.flashinfer = flashinfer
        return bool(theirs.rows)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    utils.install(monkeypatch)
    monkeypatch.setattr(flashinfer_module, "DevicePlanner", Recorder)
    monkeypatch.setattr(
        flashinfer_module.FlashInferSparseDecode, "_check_kernel", lambda *_: None
    )
    monkeypatch.setattr(backend, "SparseBf16Decode", Recorder)
    monkeypatch.setattr(backend, "own_rows", lambda heads: OWN)
    only = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: only)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


def agree(engine):
    """Every forward that reads a plan has one; give how many steps had none."""
    unplanned = 0
    for requests in range(1, MOST_REQUESTS + 1):
        for built, rows in engine.forwards(requests):
            planned = engine.planned(built)
            unplanned += not planned
            assert planned or not engine.reads_plan(rows), (requests, built, rows)
    return unplanned


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4, 6, 17])
@pytest.mark.parametrize("sizes", [[1, 2, 4, 8, 16], [16, 32], [32], [10, 20], USUAL])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL"])
def test_a_graph_that_reads_a_plan_finds_one(mode, sizes, query_len, varlen):
    agree(Engine(sizes, CUDAGraphMode[mode], query_len, varlen))


@pytest.mark.parametrize(
    "sizes,mode,rows,planned",
    [
        ([1, 2, 4, 8, 16], "FULL_AND_PIECEWISE", 5, False),
        ([1, 2, 4, 8, 16], "FULL_AND_PIECEWISE", 16, False),
        ([1, 2, 4, 8, 16], "FULL_AND_PIECEWISE", 17, True),
        ([16, 32], "FULL_DECODE_ONLY", 5, False),
        ([16, 32], "FULL_DECODE_ONLY", 17, True),
        ([32], "FULL_AND_PIECEWISE", 5, True),
        ([12, 20], "FULL", 12, False),
        ([12, 20], "FULL", 13, True),
        ([32], "PIECEWISE", 5, False),
        ([32], "PIECEWISE", 17, True),
        ([], "NONE", 16, False),
        ([], "NONE", 17, True),
    ],
)
def test_few_rows_are_planned_only_if_a_graph_may_have_more(sizes, mode, rows, planned):
    """By the rows built, even if they weren't padded to the graph's."""
    engine = Engine(sizes, CUDAGraphMode[mode])
    assert engine.planned(rows) == planned
    # An eager call of as many rows.
    assert engine.reads_plan(rows) == (rows > OWN)


@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_usual_sizes_leave_few_rows_unplanned(query_len):
    engine = Engine(USUAL, CUDAGraphMode.FULL_AND_PIECEWISE, query_len)
    assert agree(engine) >= OWN // query_len


def test_speculators_over_several_ranks_are_always_planned():
    """Another rank's batch decides the size of the draft's graph."""
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert Engine(USUAL, mode, 2, ranks=2).planned(2)
    # Without a speculator a step is built with its graph's rows.
    assert not Engine(USUAL, mode, 1, ranks=2).planned(2)


def test_sizes_are_read_after_they_are_settled():
    """The builder is made before the graphs' mode and sizes are."""
    engine = Engine(USUAL, CUDAGraphMode.FULL_AND_PIECEWISE)
    engine.config.compilation_config.cudagraph_capture_sizes = [32]
    assert engine.planned(5)


@pytest.mark.parametrize("query_len", [1, 3])
def test_the_first_model_runner_s_dispatcher(monkeypatch, query_len):
    """Its sizes are multiples of the query length; full graphs are built padded."""
    sizes = sorted({-(-s // query_len) * query_len for s in USUAL})
    engine = Engine(sizes, CUDAGraphMode.FULL_AND_PIECEWISE, query_len)
    compilation = engine.config.compilation_config
    compilation.is_attention_compiled_piecewise = lambda: True
    compilation.compile_sizes = None
    dispatcher = CudagraphDispatcher(engine.config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, query_len)
    for requests in range(1, MOST_REQUESTS + 1):
        tokens = requests * query_len
        mode, desc = dispatcher.dispatch(tokens, uniform_decode=True)
        assert mode == FULL
        for built in (tokens, desc.num_tokens):
            assert engine.planned(built) or not engine.reads_plan(desc.num_tokens)


@pytest.mark.parametrize("mode,rows", [(FULL, 24), (PIECEWISE, 17)])
def test_a_full_graph_s_step_is_built_with_its_rows(mode, rows):
    """Through vLLM's own ``prepare_attn``: 17 requests in a graph of 24."""
    engine = Engine(USUAL, CUDAGraphMode.FULL_AND_PIECEWISE)
    planner = engine.state.flashinfer.planner
    live, padded = 17, 24
    starts = np.minimum(np.arange(padded + 1), live).astype(np.int32)
    group: Any = SimpleNamespace(
        get_metadata_builder=lambda ubatch: engine.builder,
        kv_cache_spec=engine.builder.kv_cache_spec,
        layer_names=["attn"],
        build_metadata=lambda cam, ubatch: engine.builder.build(0, mapped(cam)),
    )
    batch = SimpleNamespace(
        num_reqs=live,
        num_tokens=live,
        num_reqs_after_padding=padded,
        num_tokens_after_padding=padded,
        query_start_loc_np=starts,
        query_start_loc=torch.from_numpy(starts),
        max_query_len=1,
        seq_lens=torch.ones(padded, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.ones(padded, dtype=torch.int32),
        dcp_local_seq_lens=None,
        positions=torch.zeros(padded, dtype=torch.int64),
        is_prefilling_np=np.zeros(padded, dtype=bool),
        prompt_lens=None,
        idx_mapping_np=np.arange(padded),
        fast_prefill=None,
        pcp=None,
    )
    model = SimpleNamespace(supports_mm_inputs=False, max_model_len=4096)
    metadata = DefaultModelState.prepare_attn(
        model,
        batch,
        mode,
        (torch.zeros(padded, 4, dtype=torch.int32),),
        torch.zeros(1, padded, dtype=torch.int64),
        [[group]],
        SimpleNamespace(kv_cache_groups=[None]),
    )
    assert metadata["attn"].num_mqa_rows == rows
    assert planner.rows == [rows]


def mapped(cam):
    """Without the Triton kernel that finds the rows' requests."""
    tokens = torch.zeros(cam.num_actual_tokens, dtype=torch.int32)
    cam._token_to_req_indices_cache = tokens
    return cam
