# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FLASHINFER_MLA_SPARSE_SM90 through vLLM's own classes, on the CPU.

FlashInfer is a stand-in that follows the work list in its integer workspace, so wrong
lengths or a wrong schedule give wrong numbers. Our own kernel runs under the emulator
of its tests. What needs the planner's kernel runs in Triton's interpreter;
``test_in_the_interpreter`` of the plan's tests starts it.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90 as backend
from tests.v1.attention import flashinfer_mla_sparse_sm90_utils as utils
from tests.v1.attention import test_flashinfer_mla_sparse_sm90_bf16 as bf16_tests
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backends.mla import (
    flashinfer_mla_sparse_sm90_flashinfer as flashinfer_module,
)
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_select as select
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    PLAN_INFO_FIELDS,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and HAS_TRITON
needs_kernel = pytest.mark.skipif(
    not INTERPRETED, reason="needs Triton's interpreter: TRITON_INTERPRET=1"
)
pytestmark = pytest.mark.skip_global_cleanup
CPU = torch.device("cpu")
TOPK, WIDTH = 128, 256


class RecordingPlanner:
    """Stands for ``DevicePlanner`` where the schedule itself isn't the subject."""

    def __init__(self, *args):
        self.calls = []

    def __call__(self, num_rows, *batch):
        self.calls.append((num_rows, *batch))

    def limit(self, counts):
        raise AssertionError("no forward here")


@pytest.fixture
def made(monkeypatch):
    """FlashInfer's stand-in; the wrappers that were made."""
    return utils.install(monkeypatch)


@pytest.fixture(params=["many", "few"])
def rows_are(request, monkeypatch, made):
    """As many rows as FlashInfer's kernel reads, or few enough for our own."""
    few = request.param == "few"
    monkeypatch.setattr(backend, "own_rows", lambda heads: 64 if few else 0)
    bf16_tests.emulate(monkeypatch)
    return request.param


@pytest.fixture
def planned(monkeypatch, made):
    """No kernel: the planner records, and the check of the kernel is left out."""
    monkeypatch.setattr(flashinfer_module, "DevicePlanner", RecordingPlanner)
    monkeypatch.setattr(
        flashinfer_module.FlashInferSparseDecode, "_check_kernel", lambda *_: None
    )
    monkeypatch.setattr(backend, "own_rows", lambda heads: 0)
    return made


def mapped(query_lens, seq_lens):
    """A batch whose rows' requests are known: finding them takes a Triton kernel."""
    cam = utils.common_metadata(query_lens, seq_lens)
    requests = torch.arange(len(query_lens), dtype=torch.int32)
    cam._token_to_req_indices_cache = requests.repeat_interleave(
        torch.tensor(query_lens)
    )
    return cam


class RecordingDecode:
    """Stands for a kernel of our own."""

    def __init__(self, *args):
        self.made_with = args
        self.calls = []
        self.warm = 0

    def warm_up(self):
        self.warm += 1

    def decode(self, *args):
        self.calls.append(args)
        args[7].fill_(2.0)


def step(query_lens, seq_lens, *, heads=4, rope=64, kpool=None, padding=0, **options):
    """Build and run one forward on the stand-in; compare it with float64."""
    random = torch.Generator().manual_seed(0)
    builder, layer = utils.make_builder(
        backend, CPU, heads, rope, topk=TOPK, width=WIDTH, kpool=kpool, **options
    )
    cam = utils.common_metadata(query_lens, seq_lens, padding)
    metadata = builder.build(0, cam)
    rows = metadata.num_mqa_rows
    chosen, lengths = utils.select(cam, rows, WIDTH, TOPK, kpool or 1, random)
    layer.impl.topk_indices_buffer[:rows] = chosen
    cache, slots = utils.make_cache(cam, chosen, rope, False, random, stride=2)
    q = torch.randn(rows, heads, 512 + rope, generator=random).to(torch.bfloat16)
    query = (q[..., :512], q[..., 512:])
    out, lse = layer.impl.forward_mqa(query, cache, metadata, layer)
    want, want_lse = utils.reference(q, slots, chosen, cam, layer.impl.scale, 128)
    torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0.02)
    if lse is not None:
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-3)
    state = builder.state.flashinfer
    if rows > builder.state.own_rows:
        assert state.planner.row_lengths[:rows].tolist() == lengths
    return SimpleNamespace(out=out, lse=lse, state=state, metadata=metadata)


# -- the whole way -----------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize("kpool", [None, 1, 4])
def test_contexts_around_topk(rows_are, kpool, rope):
    """Every remainder of a pool of 4; row 0, tails and unselected slots are poison."""
    contexts = [1, 63, 64, 65, *range(TOPK - 1, TOPK + 6), 700]
    step([1] * len(contexts), contexts, rope=rope, kpool=kpool)


@needs_kernel
def test_rows_of_one_request_straddle_topk(rows_are):
    done = step([1, 6, 3, 1], [700, TOPK + 3, 3, 1], kpool=4)
    lengths = done.state.planner.row_lengths
    if rows_are == "many":
        assert lengths[1:7].tolist() == [126, 127, 128, 129, 130, 131]


@needs_kernel
def test_lse_is_base_2(rows_are):
    done = step([1] * 3, [5, 100, 700], return_lse=True, padding=1)
    assert done.lse.shape == (4, 4) and done.lse[3].tolist() == [-torch.inf] * 4


@needs_kernel
def test_padded_rows_give_zero(rows_are):
    done = step([1, 1], [300, 70], padding=5)
    assert done.metadata.num_mqa_rows == 7
    assert bool((done.out[2:] == 0).all())


@needs_kernel
def test_many_heads_take_two_thread_blocks(made):
    done = step([1, 1, 1], [300, 70, 9], heads=96)
    assert done.state.geometry.cluster_size == 2


@needs_kernel
def test_a_selection_shorter_than_its_length_is_exact(rows_are):
    """A draft step that reuses a selection, or a dummy forward: the counts decide."""
    random = torch.Generator().manual_seed(1)
    builder, layer = utils.make_builder(backend, CPU, 4, 64, topk=TOPK, width=WIDTH)
    cam = utils.common_metadata([1] * 4, [700, 700, 100, 100])
    metadata = builder.build(0, cam)
    chosen, _ = utils.select(cam, 4, WIDTH, TOPK, 1, random)
    chosen[0, 40:] = chosen[1, :200] = chosen[2] = -1
    layer.impl.topk_indices_buffer[:4] = chosen
    cache, slots = utils.make_cache(cam, chosen, 64, False, random)
    q = torch.randn(4, 4, 576, generator=random).to(torch.bfloat16)
    query = (q[..., :512], q[..., 512:])
    out, _ = layer.impl.forward_mqa(query, cache, metadata, layer)
    want, _ = utils.reference(q, slots, chosen, cam, layer.impl.scale, 64)
    torch.testing.assert_close(out.double(), want, atol=0.02, rtol=0.02)
    assert bool((out[2] == 0).all())


@needs_kernel
def test_zero_rows(rows_are):
    builder, layer = utils.make_builder(backend, CPU, 4, 64)
    metadata = builder.build(0, utils.common_metadata([], []))
    q = torch.zeros(0, 4, 576, dtype=torch.bfloat16)
    cache = torch.ones(8, 64, 576, dtype=torch.bfloat16)
    query = (q[..., :512], q[..., 512:])
    out, _ = layer.impl.forward_mqa(query, cache, metadata, layer)
    assert out.shape == (0, 4, 512)


@needs_kernel
def test_flashinfer_plans_only_at_construction(made, rows_are):
    builder, _ = utils.make_builder(backend, CPU, 4, 64)
    (wrapper,) = made
    plans = len(wrapper.plans)
    workspace = wrapper._planned_backend._int_workspace_buffer.data_ptr()
    for contexts in ([9, 100], [300, 300], [10]):
        builder.build(0, utils.common_metadata([1] * len(contexts), contexts))
    assert len(wrapper.plans) == plans
    assert builder.state.flashinfer.planner.workspace.data_ptr() == workspace


@needs_kernel
def test_a_kernel_that_reads_the_plan_otherwise_is_refused(monkeypatch):
    class Other(utils.FakeWrapper):
        def run(self, **arguments):
            result = super().run(**arguments)
            return result * 1.1 if len(self.plans) > 4 else result

    utils.install(monkeypatch, wrapper=Other)
    with pytest.raises(RuntimeError, match="FlashInfer 0.7.2.post1.*output.*differs"):
        utils.make_builder(backend, CPU, 4, 64)


# -- what is planned ---------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rope", [0, 64])
def test_construction_plan(monkeypatch, planned, rope, fp8):
    monkeypatch.setattr(backend, "SparseFp8Decode", RecordingDecode)
    builder, layer = utils.make_builder(
        backend, CPU, 4, rope, fp8=fp8, max_tokens=20, kpool=4
    )
    state = builder.state
    if fp8:
        assert not planned and state.flashinfer is None
        assert state.fp8.made_with == (20, 4, rope, WIDTH, CPU)
        assert state.fp8.warm == 1  # compiled before the first request
        return
    (wrapper,) = planned
    assert wrapper.backend == "fa3"
    lengths, facts = wrapper.plans[-1]
    assert lengths == [WIDTH] * 20  # every row live: the grid fits any batch
    assert facts == dict(
        num_heads=4,
        head_dim_ckv=512,
        head_dim_kpe=rope,
        page_size=1,
        causal=False,
        sm_scale=layer.impl.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        query_layout="split",
        kv_cache_layout="split",
        lse_mode="none",
    )
    indices = wrapper._planned_backend._kv_indices_buf
    assert indices.data_ptr() == state.slots.data_ptr()
    assert state.flashinfer.index_kpool == 4


@pytest.mark.parametrize("heads,max_tokens,most", [(8, 512, 64), (12, 10, 10)])
def test_our_own_kernel_is_made_for_few_rows(
    monkeypatch, planned, heads, max_tokens, most
):
    monkeypatch.setattr(backend, "own_rows", bf16_tests.module.own_rows)
    monkeypatch.setattr(backend, "SparseBf16Decode", RecordingDecode)
    builder, _ = utils.make_builder(backend, CPU, heads, 64, max_tokens=max_tokens)
    state = builder.state
    assert state.bf16.made_with == (most, heads, 64, WIDTH, CPU)
    assert state.bf16.warm == 1  # compiled before the first request
    assert state.own_rows == most and state.flashinfer is not None
    # Where each block of 16 heads would read the cache again, there is none.
    many, _ = utils.make_builder(backend, CPU, 32, 64)
    assert many.state.bf16 is None and many.state.own_rows == 0


@pytest.mark.parametrize("use_mha", [False, True])
@pytest.mark.parametrize("decodes", [0, 1])
def test_rows_that_mha_takes_are_not_planned(planned, decodes, use_mha):
    builder, _ = utils.make_builder(
        backend, CPU, 4, 64, max_tokens=512, use_mha=use_mha
    )
    query_lens, seq_lens = [1] * decodes + [300], [40] * decodes + [300]
    # A long extend isn't short enough to be decoded.
    builder.reorder_batch_threshold = 8
    cam = mapped(query_lens, seq_lens)
    metadata = builder.build(0, cam)
    assert metadata.num_prefills == 1
    (call,) = builder.state.flashinfer.planner.calls
    rows = decodes if use_mha else decodes + 300
    assert call[0] == metadata.num_mqa_rows == rows
    # Lengths come from the device's tensors, the very ones of the batch.
    assert call[1] is cam.query_start_loc and call[2] is cam.seq_lens
    assert call[3] == decodes + 1


def test_a_forward_of_other_rows_than_planned_is_refused(planned):
    builder, layer = utils.make_builder(backend, CPU, 4, 64)
    metadata = builder.build(0, mapped([1, 1], [9, 9]))
    q = torch.zeros(3, 4, 576, dtype=torch.bfloat16)
    cache = torch.zeros(8, 64, 576, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="2 rows are planned, the query has 3"):
        layer.impl.forward_mqa((q[..., :512], q[..., 512:]), cache, metadata, layer)


def test_plan_inside_a_capture_is_an_error(monkeypatch, planned):
    builder, _ = utils.make_builder(backend, CPU, 4, 64)
    builder.state.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside CUDA graphs"):
        builder.build(0, mapped([1], [9]))
    assert not builder.state.flashinfer.planner.calls


def test_a_layer_of_another_backend_is_refused(monkeypatch):
    parent = backend.FlashInferMLASparseMetadataBuilder
    monkeypatch.setattr(parent, "__init__", lambda *_: None)
    layer = SimpleNamespace(impl=SimpleNamespace())
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"attn": layer})
    )
    with pytest.raises(TypeError, match="got SimpleNamespace in attn"):
        backend.FlashInferMLASparseSM90Builder(None, ["attn"], config, CPU)


# -- FP8 ---------------------------------------------------------------------------


def fp8_step(monkeypatch, k_scale, rope=64):
    monkeypatch.setattr(backend, "SparseFp8Decode", RecordingDecode)

    def convert(req_id, table, selected, **facts):
        facts["out"].copy_(selected)
        facts["valid_counts_out"].copy_((selected >= 0).sum(-1))
        assert facts["return_valid_counts"] and facts["BLOCK_STRIDE_ROWS"] == 128

    monkeypatch.setattr(backend, "triton_convert_req_index_to_global_index", convert)
    monkeypatch.setattr(
        backend.FlashInferMLASparseMetadataBuilder, "build", fake_parent_build
    )
    builder, layer = utils.make_builder(
        backend, CPU, 4, rope, fp8=True, k_scale=k_scale
    )
    layer.impl.topk_indices_buffer[0, :3] = torch.tensor([5, 6, 7])
    layer.impl.topk_indices_buffer[1, :1] = 9
    metadata = builder.build(0, utils.common_metadata([1, 1], [3, 1]))
    cache = torch.zeros(4, 2, 64, 512 + rope, dtype=torch.uint8)[:, 0]
    q = torch.zeros(2, 4, 512 + rope, dtype=torch.bfloat16)
    result = layer.impl.forward_mqa(
        (q[..., :512], q[..., 512:]), cache, metadata, layer
    )
    return builder, layer, q, result


def fake_parent_build(self, prefix, cam, fast_build=False):
    return backend.FlashInferMLASparseSM90Metadata(
        num_reqs=cam.num_reqs,
        max_query_len=1,
        max_seq_len=9,
        num_actual_tokens=cam.num_actual_tokens,
        query_start_loc=cam.query_start_loc,
        slot_mapping=cam.slot_mapping,
        block_table=cam.block_table_tensor,
        req_id_per_token=torch.zeros(cam.num_actual_tokens, dtype=torch.int32),
    )


@pytest.mark.parametrize("rope", [0, 64])
def test_fp8_gets_counts_slots_and_one_scale(monkeypatch, rope):
    builder, layer, q, (out, lse) = fp8_step(monkeypatch, 0.25, rope)
    state = builder.state
    ((nope, pe, cache, slots, counts, scale, k_scale, got, got_lse),) = state.fp8.calls
    assert nope.shape == (2, 4, 512)
    assert pe is None if rope == 0 else pe.shape == (2, 4, 64)
    assert cache.dtype == torch.float8_e4m3fn
    assert cache.shape == (3 * 128 + 64, 512 + rope)
    assert slots[0, :4].tolist() == [5, 6, 7, -1] and counts.tolist() == [3, 1]
    assert slots.data_ptr() == state.slots.data_ptr()
    assert (scale, k_scale) == (layer.impl.scale, 0.25)
    assert got is out and lse is None and got_lse is None and out.dtype == q.dtype


@pytest.mark.parametrize("k_scale", [0.0, None, -1.0, float("nan"), float("inf")])
def test_fp8_without_a_scale_is_an_error(monkeypatch, k_scale):
    with pytest.raises(ValueError, match="finite k_scale above 0"):
        fp8_step(monkeypatch, k_scale)


# -- FlashInfer is not what it was -------------------------------------------------


def wrapper_with(change):
    """A stand-in whose plans are changed after they are made."""

    class Changed(utils.FakeWrapper):
        def plan(self, **arguments):
            super().plan(**arguments)
            change(self._planned_backend)

    return Changed


def swap(first, second):
    left, right = (PLAN_INFO_FIELDS.index(name) for name in (first, second))

    def change(planned):
        info = planned._plan_info
        info[left], info[right] = info[right], info[left]

    return change


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda p: p._plan_info.append(0), "19 fields"),
        (lambda p: setattr(p, "_plan_info", None), "no _plan_info"),
        (lambda p: delattr(p, "_int_workspace_buffer"), "_int_workspace_buffer"),
        (lambda p: p._plan_info.__setitem__(0, 2), "grid"),
        (swap("kv_start", "kv_end"), "doesn't read as expected"),
        (swap("q_indptr", "kv_indptr"), "expected|doesn't read"),
        (swap("q_len", "q_start"), "doesn't read as expected"),
        (swap("merge_partial_start", "merge_partial_end"), "doesn't read"),
        (
            lambda p: setattr(p, "_kv_indices_buf", p._kv_indices_buf.clone()),
            "copy of the slot table",
        ),
    ],
)
def test_another_plan_is_refused_at_construction(monkeypatch, change, message):
    """Each with FlashInfer's version and what to install."""
    utils.install(monkeypatch, wrapper=wrapper_with(change), version="0.7.9")
    with pytest.raises(RuntimeError, match=message) as error:
        utils.make_builder(backend, CPU, 4, 64)
    assert "FlashInfer 0.7.9" in str(error.value)
    assert "flashinfer-python==0.7.2.post1" in str(error.value)


def test_more_rows_than_the_plan_holds_are_refused(planned):
    with pytest.raises(ValueError, match="at most 16376.*max_num_batched_tokens 16377"):
        utils.make_builder(backend, CPU, 4, 64, max_tokens=16377, width=128)


def test_more_heads_than_the_kernel_takes_are_refused(planned):
    with pytest.raises(ValueError, match="1 to 128 query heads a GPU, got 129"):
        utils.make_builder(backend, CPU, 129, 64)


def test_another_cache_type_is_refused(made):
    with pytest.raises(ValueError, match="bfloat16 or float8_e4m3fn.*torch.float16"):
        backend._SM90State(
            CPU, 4, torch.float16, 8, WIDTH, 512, 64, 0.1, TOPK, index_kpool=1
        )
    assert not made


# -- selection ---------------------------------------------------------------------


@pytest.fixture
def selection(monkeypatch, tmp_path):
    """A machine where everything is there; tests take parts away."""
    spec = SimpleNamespace(name="batch_mla", is_aot=False, is_compiled=False)
    jit = ModuleType("flashinfer.jit")
    env = SimpleNamespace(FLASHINFER_JIT_DIR=tmp_path / "cache" / "ops")
    vars(jit).update(env=env, gen_batch_mla_module=lambda *args: spec)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    monkeypatch.setattr(backend, "has_flashinfer_sm90_nope_mla", lambda: True)
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    for tool in ("nvcc", "ninja"):
        path = tmp_path / "bin" / tool
        path.write_text("")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(select, "version", lambda name: "0.7.2.post1")
    hf = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64)
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=hf))
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    select.kernel_reason.cache_clear()

    def reason(kv_cache_dtype="auto", use_sparse=True):
        return backend.FlashInferMLASparseSM90Backend.supports_combination(
            576, torch.bfloat16, kv_cache_dtype, 64, True, False, use_sparse, False,
            SimpleNamespace(major=9),
        )  # fmt: skip

    yield SimpleNamespace(
        spec=spec, jit=jit, hf=hf, reason=reason, path=tmp_path, patch=monkeypatch
    )
    select.kernel_reason.cache_clear()


def test_selected_where_the_kernel_can_be_built(selection):
    assert selection.reason() is None


def test_dense_models_and_other_shapes_have_a_reason(selection):
    assert "requires sparse MLA" in selection.reason(use_sparse=False)
    selection.hf.qk_rope_head_dim = 128
    assert "(0, 64), got 128" in selection.reason()
    selection.hf.kv_lora_rank = 256
    assert "kv_lora_rank=512, got 256" in selection.reason()


@pytest.mark.parametrize("version", ["0.6.18", "0.8.0", "0.0.0+unknown", "main"])
def test_another_flashinfer_has_a_reason(selection, version):
    selection.patch.setattr(select, "version", lambda name: version)
    assert f">= 0.7.2, < 0.8; found {version}" in selection.reason()
    # The FP8 kernel is our own.
    assert selection.reason("fp8") is None


def test_no_nvcc_has_a_reason_unless_the_kernel_is_there(selection):
    (selection.path / "bin" / "nvcc").unlink()
    selection.patch.setenv("CUDA_HOME", str(selection.path))
    assert "finds no nvcc" in selection.reason()
    select.kernel_reason.cache_clear()
    selection.spec.is_compiled = True
    assert selection.reason() is None


def test_no_ninja_has_a_reason_unless_the_kernel_is_installed(selection):
    (selection.path / "bin" / "ninja").unlink()
    assert "ninja" in selection.reason()
    select.kernel_reason.cache_clear()
    selection.spec.is_aot = True
    assert selection.reason() is None


def test_a_cache_that_cannot_be_written_has_a_reason(selection):
    # By answer, not by mode: root may write anywhere.
    selection.patch.setattr(select.os, "access", lambda path, mode: mode != os.W_OK)
    assert "can't write FlashInfer's cache" in selection.reason()
    select.kernel_reason.cache_clear()

    def refused(*args):
        raise PermissionError("Read-only file system: '/root/.cache'")

    selection.jit.gen_batch_mla_module = refused
    reason = selection.reason()
    assert "Read-only file system" in reason and "FLASHINFER_WORKSPACE_BASE" in reason


def test_disabled_jit_has_a_reason(selection):
    selection.patch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in selection.reason()


def test_what_a_rank_owns_is_not_known_yet():
    """Until it has run on two GPUs."""
    impl = backend.FlashInferMLASparseSM90Impl
    assert not impl.can_return_lse_for_decode and not impl.supports_dcp
    assert not impl.lse_base_on_e
