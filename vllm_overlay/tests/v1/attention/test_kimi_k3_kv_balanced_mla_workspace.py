# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What ``KIMI_K3_KV_BALANCED_MLA`` reserves in vLLM's workspace, and when.

The sizes are those of the real ``core.py`` on a device of 66 clusters (132 SMs), the
manager is vLLM's; only the kernel's launches are left out.
"""

import threading

import pytest
import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import config as tiles
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import core, plan
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.v1.worker import ubatching, workspace

pytestmark = pytest.mark.skip_global_cleanup

CLUSTERS = 66
SLOT_BYTES = 512 * 2 + 4  # one row of a partial: output in fp16, LSE in fp32


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch):
    """The real sizes and limits; a kernel whose plan and decode do nothing."""

    class Kernel:
        def __init__(self, heads, qlen, max_requests, causal, device):
            assert 1 <= max_requests <= core.max_planned_requests(heads, qlen)
            self.geometry = tiles.choose_geometry(heads, qlen)
            self.groups = core.worker_groups(self.geometry, CLUSTERS)
            self.need = core.workspace_bytes(heads, qlen, max_requests)

        def plan(self, seq_lens, counts, work):
            want_counts, want = plan.plan_reference(seq_lens, self.groups)
            assert counts.numel() == want_counts.numel()
            work[: want.numel()] = want  # fails if `work` is too short

        def decode(self, q, cache, table, seq_lens, *args, **kwargs):
            counts, work, scratch = args[2:5]
            assert scratch.numel() >= self.need
            scratch[: self.need].fill_(1)
            return torch.zeros(*q.shape[:2], 512, dtype=torch.bfloat16)

    monkeypatch.setattr(core, "max_active_clusters", lambda device: CLUSTERS)
    monkeypatch.setattr(core, "KvBalancedMla", Kernel)
    real = core.check_shape
    monkeypatch.setattr(
        core, "check_shape", lambda heads, qlen, device=None: real(heads, qlen)
    )
    monkeypatch.setattr(decode_module, "_KERNEL", decode_module.KvBalancedMlaKernel())
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with utils.small_tensors():
        yield
    workspace.reset_workspace_manager()


def manager_of(ubatches=1, lanes=1):
    workspace.init_workspace_manager(utils.CPU, ubatches, lanes)
    return workspace.current_workspace_manager()


def bytes_of(manager):
    """Scratch bytes and persistent tensors' bytes of every ubatch and lane."""
    sizes = []
    for scratch, resources in zip(
        manager._current_workspaces, manager._persistent_resources
    ):
        tensors = [t for t in resources.values() if isinstance(t, torch.Tensor)]
        persistent = sum(t.numel() * t.element_size() for t in tensors)
        sizes.append((manager._workspace_size_bytes(scratch), persistent))
    return sizes


def scratch_of(heads, max_q):
    """The README's size: two slots a group, rows x 513 fp32; the longest query's."""
    most = 0
    for qlen in range(1, max_q + 1):
        geometry = tiles.choose_geometry(heads, qlen)
        groups = core.worker_groups(geometry, CLUSTERS)
        exact = 2 * groups * heads * qlen * SLOT_BYTES
        most = max(most, -(-exact // 128) * 128)
    return -(-most // 256) * 256  # the manager's alignment


def step(impl, requests, qlen, *, causal=True):
    """One decode step of ``requests`` requests."""
    lengths = [(97 * r) % 3000 for r in range(requests)]
    table = torch.zeros(requests, 1, dtype=torch.int32)
    metadata = utils.make_metadata(lengths, qlen, table, causal=causal)
    tokens = requests * qlen
    q = torch.zeros(tokens, impl.decode.heads, utils.HEAD, dtype=torch.uint8)
    cache = torch.zeros(1, utils.BLOCK, utils.HEAD, dtype=torch.uint8)
    return impl.forward_mqa(
        q.view(utils.FP8), cache.view(utils.FP8), metadata, utils.make_layer()
    )


# --- sizes ------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3, 12, 16, 96, 128])
@pytest.mark.parametrize("speculative", [0, 4, 7])
def test_reserved_bytes_are_those_documented(heads, speculative):
    manager = manager_of()
    utils.make_impl(utils.make_config(speculative=speculative), num_heads=heads)
    max_q = 1 + speculative
    groups = max(
        core.worker_groups(tiles.choose_geometry(heads, q), CLUSTERS)
        for q in range(1, max_q + 1)
    )
    work = -(-(2 * (groups + 1) + 3 * (groups - 1)) // 4) * 4
    assert bytes_of(manager) == [(scratch_of(heads, max_q), 4 * (4 + work))]


@pytest.mark.parametrize("heads", [1, 2, 7, 12, 31, 48, 96, 128, 768])
@pytest.mark.parametrize("qlen", [1, 5, 8])
def test_scratch_is_bounded_by_the_device(heads, qlen):
    """Rows a worker holds times workers, whatever the batch."""
    geometry = tiles.choose_geometry(heads, qlen)
    sizes = {core.workspace_bytes(heads, qlen, n) for n in (1, 2, 64, 1024, 4096)}
    assert len(sizes) == 1
    workers = CLUSTERS * (2 if geometry.tile.cluster == 1 else 1)
    rows = geometry.tile.rows_per_cluster
    assert sizes.pop() <= 2 * workers * rows * SLOT_BYTES + 128


@pytest.mark.parametrize(
    "max_num_seqs", [1, 2, 3, 15, 16, 17, 64, 128, 255, 256, 512, 856, 1023, 1024]
)
def test_any_max_num_seqs_up_to_1024(max_num_seqs):
    """Same bytes for all of them, and a full batch runs after the lock."""
    manager = manager_of()
    config = utils.make_config(max_num_seqs=max_num_seqs, speculative=7)
    impl = utils.make_impl(config, num_heads=1)
    before = bytes_of(manager)
    assert before[0][0] == scratch_of(1, 8)
    workspace.lock_workspace()
    for qlen in (1, 8):
        out, _ = step(impl, max_num_seqs, qlen)
        assert out.shape == (max_num_seqs * qlen, 1, 512)
        with pytest.raises(ValueError, match=f"max_num_seqs={max_num_seqs} "):
            step(impl, max_num_seqs + 1, qlen)
    assert bytes_of(manager) == before


def test_more_requests_than_one_plan_holds_are_refused_when_built():
    manager_of()
    most = plan.MAX_REQUESTS
    utils.make_impl(utils.make_config(max_num_seqs=most))
    with pytest.raises(ValueError, match=f"lower max_num_seqs to {most} or less"):
        utils.make_impl(utils.make_config(max_num_seqs=most + 1))


# --- when and for whom ------------------------------------------------------------


def test_all_is_reserved_while_the_model_is_built():
    """So the profiling run that sizes the KV cache sees every byte."""
    manager = manager_of()
    config = utils.make_config(max_num_seqs=64, speculative=7)
    layers = [utils.make_impl(config, num_heads=12) for _ in range(24)]
    built = bytes_of(manager)
    assert built[0][0] == scratch_of(12, 8) and built[0][1] > 0
    objects = [set(resources) for resources in manager._persistent_resources]
    pointers = [scratch.data_ptr() for scratch in manager._current_workspaces]
    workspace.lock_workspace()
    for qlen in range(1, 9):
        for layer in layers[::8]:
            step(layer, 64, qlen)
            step(layer, 1, qlen, causal=False)
    assert bytes_of(manager) == built
    assert objects == [set(resources) for resources in manager._persistent_resources]
    assert pointers == [scratch.data_ptr() for scratch in manager._current_workspaces]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("dbo", [False, True])
def test_every_ubatch_of_the_lane_that_builds_the_model(dbo, lanes):
    ubatches = 2 if dbo else 1
    manager = manager_of(ubatches, lanes)
    impl = utils.make_impl(utils.make_config(speculative=7, dbo=dbo), num_heads=12)
    reserved = [size for size, _ in bytes_of(manager)]
    first = [0 if i % lanes else scratch_of(12, 8) for i in range(ubatches * lanes)]
    assert reserved == first
    if lanes == 2:
        with workspace.use_workspace_lane(1):
            draft = utils.make_config(speculative=7, dbo=dbo, non_causal=True)
            utils.make_impl(draft, num_heads=12)
        assert all(size == scratch_of(12, 8) for size, _ in bytes_of(manager))
    scratches = [s for s in manager._current_workspaces if s is not None]
    pointers = [scratch.data_ptr() for scratch in scratches]
    assert len(set(pointers)) == ubatches * lanes
    mine = pointers[::lanes]
    workspace.lock_workspace()
    seen = []

    def run(ubatch):
        ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = ubatch
        try:
            step(impl, 16, 8)
            seen.append(impl.decode._buffers()[1].data_ptr())
        finally:
            del ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()]

    for ubatch in range(ubatches):
        thread = threading.Thread(target=run, args=(ubatch,))
        thread.start()
        thread.join(60)
    assert seen == mine


def test_target_and_draft_share_scratch_but_not_plans():
    manager = manager_of()
    target = utils.make_impl(utils.make_config(speculative=7), num_heads=12)
    draft = utils.make_impl(
        utils.make_config(speculative=4, non_causal=True), num_heads=6
    )
    assert bytes_of(manager)[0][0] == max(scratch_of(12, 8), scratch_of(6, 5))
    mine, scratch, _ = target.decode._buffers()
    other, other_scratch, _ = draft.decode._buffers()
    assert mine.work.data_ptr() != other.work.data_ptr() and mine is not other
    assert scratch.data_ptr() == other_scratch.data_ptr()


@pytest.mark.parametrize("locked", [False, True])
def test_a_lane_without_a_reservation_raises(locked):
    manager_of(lanes=2)
    impl = utils.make_impl(utils.make_config())
    if locked:
        workspace.lock_workspace()
    with (
        workspace.use_workspace_lane(1),
        pytest.raises(
            AssertionError if locked else ValueError,
            match="was not allocated" if locked else "reserved no buffers for 4 heads",
        ),
    ):
        step(impl, 1, 1)


def test_a_ubatch_without_a_reservation_raises():
    """A model built without micro-batches, run inside the second one."""
    manager_of(ubatches=2)
    impl = utils.make_impl(utils.make_config())
    with (
        decode_module.in_ubatch(1),
        pytest.raises(ValueError, match="in ubatch 1 and this workspace lane"),
    ):
        step(impl, 1, 1)


def test_a_layer_built_after_the_lock_is_an_error():
    manager_of()
    utils.make_impl(utils.make_config(), num_heads=4)
    workspace.lock_workspace()
    utils.make_impl(utils.make_config(), num_heads=4)  # a shape that is there
    with pytest.raises(AssertionError, match="locked"):
        utils.make_impl(utils.make_config(), num_heads=5)


def test_adaptive_verification_reserves_its_rows_too():
    """The query's rows in the scratch, and three maps of max_num_seqs x 8 rows."""
    manager = manager_of()
    for adaptive in (False, True):
        config = utils.make_config(max_num_seqs=4, speculative=7, adaptive=adaptive)
        utils.make_impl(config, num_heads=2)
        query = 4 * 8 * 2 * utils.HEAD if adaptive else 0
        scratch, persistent = bytes_of(manager)[0]
        assert scratch == scratch_of(2, 8) + -(-query // 256) * 256
    plan_bytes = 4 * (4 + core.work_list_len(2, 1, 4, CLUSTERS))
    assert persistent == plan_bytes + 4 * 8 * (8 + 8 + 1)
