# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashInfer's FA3 MLA kernel on a bf16 cache, scheduled by the device.

FlashInfer plans once, while the model starts: that loads (or builds) its kernel, fixes
the grid, and reports where the kernel looks for its work. From then on
``DevicePlanner`` writes there. This rests on private details of FlashInfer, so the
constructor checks them and refuses, with FlashInfer's version, what it doesn't know:

- the plan's fields, their number and offsets;
- their meaning: FlashInfer's own plans of three batches, read back through our table,
  must do every row exactly once;
- the result: the kernel gives the same under FlashInfer's plan and under ours, on rows
  whose unused slots are -1, from a cache whose first row is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm.platforms import current_platform
from vllm.triton_utils import triton
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    CTA_HEADS,
    Geometry,
    WorkspaceLayout,
    check_schedule,
    row_kv_lengths,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_planner import (
    DevicePlanner,
)

LATENT = 512
MAX_HEADS = 2 * CTA_HEADS
KNOWN_FLASHINFER = "0.7.2.post1"
_MIB = 1 << 20


@dataclass(frozen=True)
class _Probe:
    """A batch for the check at construction, one query token a request."""

    contexts: list[int]
    lengths: list[int]
    q: torch.Tensor  # [rows, heads, 512 + rope]
    cache: torch.Tensor  # [width + 1, 512 + rope], row 0 NaN
    table: torch.Tensor  # [rows, width], -1 past a row's length


def flashinfer_version() -> str:
    import flashinfer

    return str(getattr(flashinfer, "__version__", "unknown"))


class FlashInferSparseDecode:
    """Sparse MLA decode of an attention group's layers on FlashInfer's kernel.

    Args:
        device: Where it runs.
        num_heads: Query heads, 1 to 128.
        max_rows: The most query tokens of a forward.
        rope_dim: 0 or 64.
        sm_scale: Softmax scale.
        slots: Slot table ``[max_rows, width]``, int32. Captured graphs read it.
        index_topk: Tokens that the indexer keeps of a longer context.
        index_kpool: Tokens that it pools; 1 without pooling.
        return_lse: Also compute the base-2 LSE.

    Raises:
        ValueError: More heads or rows than FlashInfer's kernel or its plan takes.
        RuntimeError: FlashInfer doesn't plan or run as this class expects.

    """

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        max_rows: int,
        rope_dim: int,
        sm_scale: float,
        slots: torch.Tensor,
        index_topk: int,
        index_kpool: int,
        return_lse: bool = False,
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        if not 0 < num_heads <= MAX_HEADS:
            raise ValueError(
                f"FlashInfer's sparse MLA kernel takes 1 to {MAX_HEADS} query heads a "
                f"GPU, got {num_heads}; raise tensor_parallel_size"
            )
        self.device = device
        self.num_heads = num_heads
        self.max_rows = max_rows
        self.rope_dim = rope_dim
        self.sm_scale = sm_scale
        self.slots = slots
        self.width = slots.shape[1]
        self.index_topk = index_topk
        self.index_kpool = index_kpool
        self.return_lse = return_lse
        self.geometry = Geometry(
            heads=num_heads,
            cluster_size=1 if num_heads <= CTA_HEADS else 2,
            thread_blocks=current_platform.num_compute_units(device.index or 0),
            width=self.width,
        )
        # partial_o in bf16 and partial_lse in fp32.
        partial_bytes = self.geometry.partial_rows * (2 * LATENT + 4)
        self.workspace = torch.empty(
            triton.cdiv(partial_bytes, _MIB) * _MIB, dtype=torch.uint8, device=device
        )
        self.wrapper = BatchMLAPagedAttentionWrapper(self.workspace, backend="fa3")
        self._check_plans()
        probe = self._probe()
        theirs = self._run_probe_as_planned(probe)
        # Every row live and full: it names the whole slot table, and the cluster size
        # that FlashInfer derives from the mean query length is that of a live row.
        layout = self._host_plan([self.width] * max_rows, slots.view(-1))
        self._check_slots_are_shared()
        self.planner = DevicePlanner(
            layout, self._int_workspace(), max_rows, index_topk, index_kpool
        )
        self._check_kernel(probe, theirs)

    # -- construction ------------------------------------------------------------

    def _refuse(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"FlashInfer {flashinfer_version()}: {what}. FLASHINFER_MLA_SPARSE_SM90 "
            f"follows the private plan of FlashInfer {KNOWN_FLASHINFER}; install "
            f"flashinfer-python=={KNOWN_FLASHINFER} or select another backend"
        )

    def _int_workspace(self) -> torch.Tensor:
        planned: Any = getattr(self.wrapper, "_planned_backend", None)
        workspace = getattr(planned, "_int_workspace_buffer", None)
        if not isinstance(workspace, torch.Tensor) or not workspace.is_contiguous():
            raise self._refuse(
                "expected _planned_backend._int_workspace_buffer, a contiguous tensor, "
                f"got {type(workspace).__name__} of {type(planned).__name__}"
            )
        return workspace.view(torch.int32)

    def _host_plan(
        self, lengths: Sequence[int], indices: torch.Tensor
    ) -> WorkspaceLayout:
        """Let FlashInfer plan rows of these lengths; give the layout it reports."""
        from flashinfer.mla import MLAPlanMetadata

        kv_len = torch.tensor(lengths, dtype=torch.int32)
        kv_indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        kv_indptr[1:] = kv_len.cumsum(0)
        self.wrapper.plan(
            metadata=MLAPlanMetadata.csr(
                qo_indptr=torch.arange(len(lengths) + 1, dtype=torch.int32),
                kv_indptr=kv_indptr,
                kv_indices=indices,
                kv_len_arr=kv_len,
            ),
            num_heads=self.num_heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=self.rope_dim,
            page_size=1,
            causal=False,
            sm_scale=self.sm_scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2" if self.return_lse else "none",
        )
        workspace = self._int_workspace()
        info = getattr(self.wrapper._planned_backend, "_plan_info", None)
        if info is None:
            raise self._refuse("the planned backend has no _plan_info")
        try:
            return WorkspaceLayout.from_plan(
                [int(value) for value in info], 4 * workspace.numel(), self.geometry
            )
        except ValueError as error:
            raise self._refuse(str(error)) from error

    def _check_plans(self) -> None:
        """FlashInfer's own plans, read through our table, must do each row once."""
        width = self.width
        batches = (
            [width],
            [(37 * row) % (width + 1) for row in range(64)],
            [width] * 100 + [min(65, width)] * 99 + [0],
        )
        for lengths in batches:
            indices = torch.zeros(
                max(sum(lengths), 1), dtype=torch.int32, device=self.device
            )
            layout = self._host_plan(lengths, indices)
            if self.max_rows > layout.max_rows:
                raise ValueError(
                    f"FlashInfer {flashinfer_version()} plans at most "
                    f"{layout.max_rows} query tokens a step on this GPU, got "
                    f"max_num_batched_tokens {self.max_rows}; lower it"
                )
            starts = [0]
            for length in lengths:
                starts.append(starts[-1] + length)
            try:
                schedule = layout.read(self._int_workspace())
                check_schedule(schedule, lengths, starts, self.geometry)
            except ValueError as error:
                raise self._refuse(
                    f"its plan of {len(lengths)} rows doesn't read as expected: {error}"
                ) from error

    def _check_slots_are_shared(self) -> None:
        planned: Any = self.wrapper._planned_backend
        indices = getattr(planned, "_kv_indices_buf", None)
        if indices is None or indices.data_ptr() != self.slots.data_ptr():
            raise self._refuse("it reads a copy of the slot table, not the table")

    def _probe(self) -> _Probe:
        """A few rows of unlike lengths, from a cache whose first row is NaN."""
        contexts = [self.index_topk + self.index_kpool - 1, 1, 0, 64, 65, 300]
        contexts = [*contexts, self.index_topk][: self.max_rows]
        rows = len(contexts)
        lengths = row_kv_lengths(
            range(rows + 1),
            contexts,
            rows,
            self.index_topk,
            self.index_kpool,
            self.width,
        )
        random = torch.Generator(device=self.device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, device=self.device, generator=random)
            return values.to(torch.bfloat16)

        cache = normal(self.width + 1, LATENT + self.rope_dim)
        cache[0] = float("nan")
        table = torch.full_like(self.slots[:rows], -1)
        for row, length in enumerate(lengths):
            order = torch.randperm(self.width, device=self.device, generator=random)
            table[row, :length] = order[:length].to(torch.int32) + 1
        q = normal(rows, self.num_heads, LATENT + self.rope_dim)
        return _Probe(contexts, lengths, q, cache, table)

    def _run_probe(self, probe: _Probe) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(probe.q[..., :LATENT], probe.q[..., LATENT:], probe.cache)

    def _run_probe_as_planned(
        self, probe: _Probe
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the probe under FlashInfer's own plan of it."""
        packed = [row[:n] for row, n in zip(probe.table, probe.lengths)]
        self._host_plan(probe.lengths, torch.cat(packed))
        return self._run_probe(probe)

    def _check_kernel(
        self, probe: _Probe, theirs: tuple[torch.Tensor, torch.Tensor | None]
    ) -> None:
        """The kernel must give the same under our schedule as under its own."""

        def on_device(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        rows = len(probe.lengths)
        starts = on_device(range(rows + 1))
        self.slots[:rows] = probe.table
        self.plan(rows, starts, on_device(probe.contexts), rows, starts)
        self.planner.limit(on_device(probe.lengths))
        ours = self._run_probe(probe)
        self.slots[:rows] = 0
        for name, left, right in zip(("output", "LSE"), ours, theirs):
            if left is None or right is None:
                continue
            left, right = left.float(), right.float()
            if not bool(torch.isclose(left, right, rtol=2e-2, atol=2e-2).all()):
                worst = (left - right).abs().max().item()
                raise self._refuse(
                    f"the kernel's {name} under our schedule differs from that under "
                    f"its own by {worst:.3g}"
                )

    # -- every step --------------------------------------------------------------

    def plan(
        self,
        num_rows: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        num_reqs: int,
        req_id_per_token: torch.Tensor,
    ) -> None:
        """Plan rows ``[0, num_rows)`` from device lengths; see ``DevicePlanner``."""
        self.planner(num_rows, query_start_loc, seq_lens, num_reqs, req_id_per_token)

    def _run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = cache.unsqueeze(1)
        result = self.wrapper.run(
            query=(q_nope, q_pe),
            kv_cache=(rows[..., :LATENT], rows[..., LATENT:]),
            return_lse=self.return_lse,
        )
        return result if self.return_lse else (result, None)

    def decode(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        counts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the planned rows.

        Args:
            q_nope: ``[rows, heads, 512]`` bf16.
            q_pe: ``[rows, heads, rope_dim]`` bf16.
            cache: All slots, ``[slots, 512 + rope_dim]`` bf16.
            counts: Valid entries of each row in the slot table, int32 ``[rows]``.

        Returns:
            Output ``[rows, heads, 512]`` bf16 and the base-2 LSE ``[rows, heads]``
            fp32, or None without ``return_lse``. A row of length 0 gives 0 and -inf.

        """
        self.planner.limit(counts)
        return self._run(q_nope, q_pe, cache)
