# SPDX-License-Identifier: Apache-2.0
"""What the engine checks bring into vLLM's processes, by public extension points.

* :class:`FilledCacheConnector`, a KV connector: a prompt counts as computed, and its
  cache holds random values. Decode steps at long contexts can then be timed without
  the prefill. What the model says afterwards is not meaningful.
* :class:`WorkerExtension`, mixed into every worker: counters and memory figures for
  `collective_rpc`, and no NVLink multicast.

Worker processes import this module by name, so its folder must be on PYTHONPATH.
"""

from __future__ import annotations

import os
from typing import Any

import engine_models
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorWorker,
)

# With `load_format="dummy"`, every worker fills its shard from this seed.
SEED_VARIABLE = "ENGINE_CHECK_SEED"
# One template of this many rows per dtype is copied into the requests' blocks: the
# values are random, and the fill costs a copy.
TEMPLATE_ROWS = 64


class FilledCacheWorker(DecodeBenchConnectorWorker):
    """Fills the blocks of new requests: latents with N(0, 1), KDA states with zero.

    Blocks are counted as the schedule counts them; a cache whose kernel has smaller
    blocks has several rows for each.
    """

    def __init__(self, vllm_config, kv_cache_config) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self.num_blocks = kv_cache_config.num_blocks
        self.filled_tokens = 0
        self._templates: dict[tuple, torch.Tensor] = {}

    def start_fill_kv(self, metadata) -> None:
        for block_ids_per_group, tokens in metadata.reqs_to_fill.values():
            self.filled_tokens += tokens
            for group, block_ids in enumerate(block_ids_per_group):
                self._fill_blocks(group, block_ids, tokens)

    def _fill_blocks(self, group_idx: int, block_ids: list[int], num_tokens: int):
        if not block_ids or self.kv_caches is None:
            return
        for name in self.group_to_layers[group_idx]:
            cache = self.kv_caches[name]
            if isinstance(cache, torch.Tensor):
                self._fill_latents(name, cache, block_ids)
                continue
            for state in cache:
                state[self._rows(name, state, block_ids)] = 0

    def _rows(self, name: str, cache: torch.Tensor, block_ids: list[int]):
        per_block, rest = divmod(cache.shape[0], self.num_blocks)
        if rest or not per_block:
            raise ValueError(
                f"{name}: the cache has {cache.shape[0]} rows for {self.num_blocks} "
                "blocks; they must be a multiple, or the fill would hit other requests"
            )
        ids = torch.tensor(block_ids, dtype=torch.long, device=cache.device)
        within = torch.arange(per_block, device=cache.device)
        return (ids[:, None] * per_block + within).flatten()

    def _fill_latents(self, name: str, cache: torch.Tensor, block_ids: list[int]):
        rows = self._rows(name, cache, block_ids)
        key = (cache.dtype, *cache.shape[1:])
        if key not in self._templates:
            # One-byte caches hold FP8 E4M3, whatever dtype the pool has.
            real = torch.float8_e4m3fn if cache.element_size() == 1 else cache.dtype
            shape = (TEMPLATE_ROWS, *cache.shape[1:])
            values = torch.randn(shape, device=cache.device).to(real)
            self._templates[key] = values.view(cache.dtype)
        template = self._templates[key]
        for start in range(0, len(rows), TEMPLATE_ROWS):
            part = rows[start : start + TEMPLATE_ROWS]
            cache[part] = template[: len(part)]


class FilledCacheConnector(DecodeBenchConnector):
    """vLLM's connector for decode benchmarks, with a fill that fits hybrid caches."""

    def __init__(self, vllm_config, role, kv_cache_config) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            self.connector_worker = FilledCacheWorker(vllm_config, kv_cache_config)

    @property
    def filled_tokens(self) -> int:
        """Tokens that were counted as computed."""
        worker = self.connector_worker
        return worker.filled_tokens if isinstance(worker, FilledCacheWorker) else 0


FILLED_CACHE = dict(
    kv_connector="FilledCacheConnector",
    kv_connector_module_path="engine_hooks",
    kv_role="kv_both",
)


def no_multicast_allreduce() -> None:
    """Take FlashInfer's fused all-reduce away: its workspace may use multicast."""
    from vllm.model_executor.layers import fused_allreduce_gemma_rms_norm as gemma
    from vllm.models.common.ops import fused_allreduce_rms_norm as common

    for module in (gemma, common):
        module.flashinfer_trtllm_fused_allreduce_norm = None


def workspace_state() -> dict[str, Any]:
    """Return this process's workspaces: sizes, addresses, persistent entries."""
    from vllm.v1.worker.workspace import current_workspace_manager

    manager = current_workspace_manager()
    persistent = [
        value
        for resources in manager._persistent_resources
        for value in resources.values()
        if isinstance(value, torch.Tensor)
    ]
    return dict(
        locked=manager.is_locked(),
        scratch_mib=[
            round(manager._workspace_size_bytes(w) / 2**20, 2)
            for w in manager._current_workspaces
        ],
        persistent_mib=round(sum(t.nbytes for t in persistent) / 2**20, 3),
        addresses=[
            0 if w is None else w.data_ptr() for w in manager._current_workspaces
        ]
        + [t.data_ptr() for t in persistent],
    )


def plan_counts() -> list[dict[str, int]]:
    """Return how often each plan buffer of this process was planned and reused.

    `slot` is the lane: 0 has the target's MLA layers, 1 the draft's.
    """
    from vllm.v1.worker.workspace import current_workspace_manager

    return [
        dict(
            slot=slot,
            heads=key[2],
            max_q=key[3],
            planned=resource.plan.planned,
            reused=resource.plan.reused,
        )
        for slot, resources in enumerate(
            current_workspace_manager()._persistent_resources
        )
        for key, resource in resources.items()
        if hasattr(resource, "plan")
    ]


def memory_state() -> dict[str, float]:
    """Return this process's device memory in MiB: allocated now and at most."""
    return dict(
        allocated_mib=round(torch.accelerator.memory_allocated() / 2**20, 1),
        peak_mib=round(torch.accelerator.max_memory_allocated() / 2**20, 1),
    )


class WorkerExtension:
    """Methods that `collective_rpc` calls on every worker."""

    def init_worker_extension(self) -> None:
        no_multicast_allreduce()
        if seed := os.environ.get(SEED_VARIABLE):
            engine_models.install_seeded_weights(int(seed))

    def check_plans(self) -> list[dict[str, int]]:
        return plan_counts()

    def check_workspace(self) -> dict[str, Any]:
        return workspace_state()

    def check_memory(self) -> dict[str, float]:
        return memory_state()


WORKER_EXTENSION = "engine_hooks.WorkerExtension"
