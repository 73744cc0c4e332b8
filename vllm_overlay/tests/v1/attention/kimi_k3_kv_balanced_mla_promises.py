# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of the KV-balanced MLA backend's promises share.

The same tests run on a Hopper GPU with the real kernels, and on the CPU with the
stand-in of ``kimi_k3_kv_balanced_mla_utils``; everything of vLLM's is real in both.
They need no pytest: what they share are context managers, so a script may call them.
"""

import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from tests.v1.attention.kimi_k3_kv_balanced_mla_package import hopper_missing
from vllm.distributed import parallel_state
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import core as real_core
from vllm.models.kimi_k3.nvidia.kv_balanced_mla import decode as decode_module
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.backend import (
    KimiK3KvBalancedMLAMetadataBuilder,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops import dcp
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.worker import workspace

NAN_BYTE = 0x7F
HUGE_BLOCK = 1 << 30
BLOCK = utils.BLOCK
# q_scale that makes a score the bare dot product in log2 units.
LOG2_UNITS = math.log(2) / utils.SCALE


ON_GPU = hopper_missing() is None
DEVICE = torch.device("cuda", 0) if ON_GPU else utils.CPU


def triton_missing() -> str | None:
    """Why vLLM's Triton kernels can't run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if ON_GPU or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "no Hopper GPU, and TRITON_INTERPRET is not 1"


@contextmanager
def refused(*parts: str, kind: type[BaseException] = ValueError) -> Iterator[None]:
    """Expect one exception of ``kind`` whose text holds every part."""
    try:
        yield
    except kind as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        return
    raise AssertionError(f"no {kind.__name__} with {parts}")


@contextmanager
def machine(ubatches: int = 1, lanes: int = 1, **fake_core: Any) -> Iterator[Any]:
    """A worker's workspace manager; yields the kernel's surface.

    On the CPU that is a fresh ``FakeCore(**fake_core)``; on a GPU the real one.
    """
    with ExitStack() as stack:
        core: Any = real_core
        if not ON_GPU:
            core = utils.FakeCore(**fake_core)
            stack.enter_context(mock.patch.object(decode_module, "core", core))
            stack.enter_context(
                mock.patch.object(
                    decode_module, "_KERNEL", decode_module.KvBalancedMlaKernel()
                )
            )
            stack.enter_context(
                mock.patch.object(torch.accelerator, "empty_cache", lambda: None)
            )
            stack.enter_context(utils.small_tensors())
        workspace.init_workspace_manager(DEVICE, ubatches, lanes)
        stack.callback(workspace.reset_workspace_manager)
        yield core


def make_config(**options: Any) -> Any:
    """``utils.make_config`` on this machine's device."""
    config = utils.make_config(**options)
    config.device_config = SimpleNamespace(device=DEVICE, device_type=DEVICE.type)
    config.kernel_config.enable_jit_warmup = False
    return config


class _PrefillBackend:
    """Stands in for the layer's prefill backend; decodes never reach it."""

    def clone(self):
        return self

    def get_name(self):
        return "fake"

    def prepare_metadata(self, metadata):
        raise AssertionError("a decode batch has no prefill")


def make_builder(config: Any, heads: int, non_causal: bool = False) -> Any:
    """The real metadata builder of a group of one layer, on this machine's device."""
    layer = SimpleNamespace(
        non_causal_multi_token_decode=non_causal,
        q_lora_rank=512,
        kv_lora_rank=utils.LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=utils.ROPE,
        v_head_dim=128,
        prefill_backend=_PrefillBackend(),
        dcp_manager=None,
    )
    config.compilation_config.static_forward_context = {"layer": layer}
    config.cache_config.cache_dtype, config.cache_config.block_size = "fp8", BLOCK
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=8192,
        get_num_attention_heads=lambda _: heads,
        get_head_size=lambda: utils.HEAD,
    )
    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=utils.HEAD, dtype=torch.uint8
    )
    return KimiK3KvBalancedMLAMetadataBuilder(spec, ["layer"], config, DEVICE)


def common_metadata(
    seq_lens: torch.Tensor,
    table: torch.Tensor,
    qlen: int,
    *,
    live: int | None = None,
    longest: int = 8192,
    causal: bool = True,
) -> CommonAttentionMetadata:
    """A step of ``qlen`` tokens a request, from the runner's device buffers.

    The host knows no lengths but ``longest``; requests from ``live`` on pad a graph.
    """
    requests = seq_lens.shape[0]
    live = requests if live is None else live
    starts = torch.arange(requests + 1, dtype=torch.int32).clamp_max(live) * qlen
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=requests,
        num_actual_tokens=requests * qlen,
        max_query_len=qlen,
        max_seq_len=longest,
        block_table_tensor=table,
        slot_mapping=torch.zeros(requests * qlen, dtype=torch.int64, device=DEVICE),
        causal=causal,
        seq_lens_cpu_upper_bound=torch.full((requests,), longest, dtype=torch.int32),
    )


class Graph:
    """A captured step; without a GPU, the step itself, so that tests can be tried."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        if not ON_GPU:
            self._out = step()
            return
        step()
        torch.accelerator.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = step()

    @property
    def out(self) -> Any:
        """What the step returned while it was captured; a replay writes it again."""
        return self._out

    def replay(self) -> None:
        if ON_GPU:
            self._graph.replay()
            return
        for old, new in zip(self._out, self._step()):
            old.copy_(new)


# --- caches -----------------------------------------------------------------------


def exact_keys(requests: int, tokens: int, seed: int) -> torch.Tensor:
    """``[requests, tokens, 576]`` FP8 whose scores are integers in log2 units.

    With :func:`exact_query` every weight is a power of two, so rounding P to e4m3
    changes nothing and splitting the KV must not either.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    keys = torch.randn(requests, tokens, utils.HEAD, device=DEVICE, generator=generator)
    keys[..., : utils.LATENT] += 0.3
    keys[..., utils.LATENT :] = 0
    keys[..., utils.LATENT] = torch.randint(
        -2, 3, keys.shape[:2], device=DEVICE, generator=generator
    ).float()
    return keys.to(utils.FP8)


def exact_query(tokens: int, heads: int) -> torch.Tensor:
    """``[tokens, heads, 576]`` FP8; ``heads`` differ in the sign of their scores."""
    q = torch.zeros(tokens, heads, utils.HEAD, device=DEVICE)
    q[:, 0::2, utils.LATENT] = 1.0
    q[:, 1::2, utils.LATENT] = -1.0
    return q.to(utils.FP8)


def paged(
    keys: torch.Tensor, lengths: list[int], columns: int | None = None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scatter ``[requests, tokens, 576]`` over pages.

    Returns:
        The cache ``[blocks, 64, 576]``, NaN patterns where no request has a row, and
        the block table ``[requests, columns]`` with huge ids behind the last block.

    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // BLOCK) for n in lengths]
    columns = max([*blocks, 1]) + 1 if columns is None else columns
    order = torch.randperm(sum(blocks) + 1, generator=generator).int()
    table = torch.full((len(lengths), columns), HUGE_BLOCK, dtype=torch.int32)
    first = 0
    for r, count in enumerate(blocks):
        table[r, :count] = order[first : first + count]
        first += count
    table = table.to(DEVICE)
    cache = torch.full(
        (sum(blocks) + 1, BLOCK, utils.HEAD), NAN_BYTE, dtype=torch.uint8, device=DEVICE
    )
    position = torch.arange(keys.shape[1], device=DEVICE)
    used = position[None] < torch.tensor(lengths, device=DEVICE)[:, None]
    request, token = used.nonzero(as_tuple=True)
    page = table[request, token // BLOCK].long()
    cache[page, token % BLOCK] = keys.view(torch.uint8)[request, token]
    return cache.view(utils.FP8), table


def bounds_of(totals: list[int], qlen: int, causal: bool) -> torch.Tensor:
    """Global positions that each query token sees, ``[requests, qlen]``."""
    total = torch.tensor(totals, device=DEVICE)[:, None]
    token = torch.arange(qlen, device=DEVICE)[None]
    bound = total - qlen + 1 + token if causal else total + 0 * token
    return bound.clamp_min(0)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    position: torch.Tensor,
    lengths: list[int],
    bounds: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over the quantised inputs.

    Args:
        q: ``[requests * qlen, heads, 576]``.
        keys: ``[requests, tokens, 576]``, rows past a request's length are ignored.
        position: Global position of each row, ``[tokens]``.
        lengths: Rows of each request.
        bounds: ``[requests, qlen]``, from :func:`bounds_of`.
        scale: Score scale.

    Returns:
        ``[requests * qlen, heads, 512]`` and the log2 LSE ``[requests * qlen, heads]``.

    """
    qlen = bounds.shape[1]
    outs, lses = [], []
    for r, length in enumerate(lengths):
        rows = keys[r, :length].double()
        query = q[r * qlen : (r + 1) * qlen].double()
        score = torch.einsum("jhd,td->jht", query, rows) * (scale / math.log(2))
        seen = position[None, :length] < bounds[r][:, None]
        score = score.masked_fill(~seen[:, None], -math.inf)
        lse = torch.logsumexp(score * math.log(2), -1) / math.log(2)
        weight = torch.exp2(score - torch.where(lse.isinf(), 0.0, lse)[..., None])
        outs.append(weight @ rows[:, : utils.LATENT])
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


# --- ranks of a DCP group ---------------------------------------------------------


class _Waiting(Exception):
    """A rank waits for the others' part of a collective."""


class RanksInTurn:
    """A DCP group whose ranks run one after the other in this process.

    A rank runs until its first collective that the other ranks have not reached; its
    tensor is kept and it starts over once all of them are there. So every rank runs
    vLLM's code from start to end, with real results of the collectives.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rank_in_group = 0
        self.device_group = self
        self.cpu_group = self
        self._done: list[list[torch.Tensor]] = []
        self._pending: list[torch.Tensor] = []
        self._next = 0

    def run(self, step: Callable[[int], Any]) -> list[Any]:
        """Return ``step(rank)`` of every rank; a step must not change its inputs."""
        self._done = []
        while True:
            self._pending, results = [], []
            for rank in range(self.world_size):
                self.rank_in_group, self._next = rank, 0
                try:
                    results.append(step(rank))
                except _Waiting:
                    continue
            if not self._pending:
                return results
            assert len(self._pending) == self.world_size, "not all ranks came along"
            self._done.append(self._pending)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._next == len(self._done):
            self._pending.append(tensor.clone())
            raise _Waiting
        self._next += 1
        return self._done[self._next - 1]

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part  # rounds at every step, as a ring does
        return total

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        total = self.all_reduce(tensor)
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, **_: Any
    ) -> SimpleNamespace:
        parts = self._exchange(tensor)
        mine = [part.chunk(self.world_size)[self.rank_in_group] for part in parts]
        out.copy_(torch.cat(mine))
        return SimpleNamespace(wait=lambda: None)


@contextmanager
def dcp_group(world: int) -> Iterator[RanksInTurn]:
    """Make a :class:`RanksInTurn` vLLM's DCP group."""
    group = RanksInTurn(world)
    off = dict.fromkeys(
        (
            "VLLM_USE_DIRECT_DCP_A2A",
            "VLLM_USE_DIRECT_DCP_Q_GATHER",
            "VLLM_USE_DIRECT_DCP_KV_GATHER",
        ),
        "0",
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_state, "_DCP", group))
        stack.enter_context(mock.patch.object(dcp, "dist", group))
        stack.enter_context(mock.patch.dict(os.environ, off))
        kernel = dcp.CorrectAttnCPOutKernel.kernel
        if not hasattr(kernel, "constexprs"):
            # Triton's interpreter has no such list; the launcher counts with it.
            names = inspect.signature(kernel.fn).parameters
            constexprs = [name for name in names if name.isupper()]
            stack.enter_context(
                mock.patch.object(kernel, "constexprs", constexprs, create=True)
            )
        yield group


def without_dcp():
    """Leave the DCP group for a while."""
    return mock.patch.object(parallel_state, "_DCP", None)


def dcp_manager(config: Any, impl: Any, backend: str, dtype: torch.dtype) -> Any:
    """Make the collectives of ``impl``'s layer, as Kimi K3's layer does."""
    config.parallel_config.dcp_comm_backend = backend
    return dcp.MLADCPManager(
        vllm_config=config,
        device=DEVICE,
        num_heads=impl.num_heads,
        query_head_dim=utils.HEAD,
        output_head_dim=utils.LATENT,
        query_dtype=utils.FP8,
        output_dtype=dtype,
        padded_num_heads=None,
        is_lse_base_on_e=impl.lse_base_on_e,
        use_pcp=False,
    )


def local_positions(tokens: int, world: int, rank: int, interleave: int):
    """Global position of a rank's first ``tokens`` entries, in order."""
    local = torch.arange(tokens, device=DEVICE)
    return (local // interleave * world + rank) * interleave + local % interleave
