# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3's KV-cache groups, when a draft's MLA layers join the target's.

A block holds one page of each layer of its group, and all groups share one pool of
blocks. A group with fewer layers than the largest leaves the rest of its blocks empty.
vLLM takes the smaller of the two layer counts as the group size: 24 for K3's 24 MLA and
69 KDA layers, which leaves 3 of 72 KDA slots empty. Five draft layers make it 29, and
18 of 87 KDA slots are empty.

An MLA group takes a block for every ``block_size`` tokens, a KDA group a fixed number,
so the shares of both kinds bound what a request of any length wastes: it lies between
them. Here both are kept to ``MAX_EMPTY``, in as few groups as that takes.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import SupportsKVCacheGrouping
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# The largest share of empty slots that a kind of layer may have.
MAX_EMPTY = 0.05
# A step builds metadata and gathers a block table for each group on the host.
MAX_GROUPS = 16
OPTION = "kimi_k3_kv_cache_groups"
"""Key of ``--additional-config``; false keeps vLLM's own groups."""


class KimiK3KVCacheGroups(SupportsKVCacheGrouping):
    """Kimi K3's own grouping; a base of the model's classes."""

    @classmethod
    def get_kv_cache_groups(
        cls,
        vllm_config: "VllmConfig",
        kv_cache_spec: dict[str, KVCacheSpec],
    ) -> list[KVCacheGroupSpec]:
        """Split the layers into groups.

        Args:
            vllm_config: The engine's configuration.
            kv_cache_spec: Every layer's cache spec, in the model's order.

        Returns:
            vLLM's own groups, divided anew where they leave too much empty.

        Raises:
            ValueError: ``--additional-config`` has ``kimi_k3_kv_cache_groups``, and it
                is neither true nor false.

        """
        from vllm.v1.core import kv_cache_planning

        groups = kv_cache_planning.get_kv_cache_groups(vllm_config, kv_cache_spec)
        if not _wanted(vllm_config):
            return groups
        return regroup(groups, list(kv_cache_spec))


def _wanted(vllm_config: "VllmConfig") -> bool:
    """Whether ``--additional-config`` lets this module divide the groups."""
    options = vllm_config.additional_config
    value = options.get(OPTION, True) if isinstance(options, dict) else True
    if not isinstance(value, bool):
        raise ValueError(
            f"--additional-config: {OPTION} must be true or false, got {value!r}; "
            "false keeps vLLM's own KV-cache groups, which suit contexts of more than "
            "about 200k tokens."
        )
    return value


def regroup(groups: list[KVCacheGroupSpec], order: list[str]) -> list[KVCacheGroupSpec]:
    """Divide MLA and KDA layers anew if more than ``MAX_EMPTY`` of a kind is empty.

    Args:
        groups: vLLM's groups.
        order: All layers' names, in the model's order.

    Returns:
        ``groups`` itself unless it holds MLA and recurrent-state layers, a kind of
        which leaves too much empty, and another size does better in ``MAX_GROUPS``
        groups at most. All groups of a kind get one spec.

    """
    kinds = _kinds(groups)
    if kinds is None:
        return groups
    counts = [len(names) for _, names in kinds]
    old = max(len(group.layer_names) for group in groups)
    too_much = max(_empty(count, old) for count in counts)
    size = _group_size(counts)
    if size is None or too_much <= MAX_EMPTY:
        return groups

    found = []
    for spec, names in kinds:
        ordered = [name for name in order if name in names]
        divided = cdiv(len(ordered), size)
        # Every n-th layer, so that each pipeline stage has its share of each group.
        found += [KVCacheGroupSpec(ordered[i::divided], spec) for i in range(divided)]
    logger.info_once(
        "Kimi K3's KV cache has %d groups of up to %d layers. %d groups of up to %d, "
        "vLLM's own choice, would leave %.1f%% of a kind of layer's slots empty.",
        len(found),
        size,
        len(groups),
        old,
        100 * too_much,
    )
    return found


def _kinds(
    groups: list[KVCacheGroupSpec],
) -> list[tuple[KVCacheSpec, set[str]]] | None:
    """Return each kind's spec and layers, or None if they are not for us to divide."""
    kinds: list[tuple[KVCacheSpec, set[str]]] = []
    for group in groups:
        spec = group.kv_cache_spec
        plain = group == KVCacheGroupSpec(group.layer_names, spec)
        if not plain or type(spec) not in (MLAAttentionSpec, MambaSpec):
            return None
        for i, (other, names) in enumerate(kinds):
            merged = _merged(other, spec)
            if merged is not None:
                kinds[i] = merged, names | set(group.layer_names)
                break
        else:
            kinds.append((spec, set(group.layer_names)))
    return kinds if len({type(spec) for spec, _ in kinds}) == 2 else None


def _merged(a: KVCacheSpec, b: KVCacheSpec) -> KVCacheSpec | None:
    """Return the spec of layers that may lie in one group, or None."""
    if type(a) is not type(b):
        return None
    try:
        return type(a).merge([a, b])
    except (AssertionError, ValueError):
        # vLLM's way to say that they may not.
        return None


def _empty(count: int, size: int) -> float:
    """Share of the slots that ``count`` layers leave empty in groups of ``size``."""
    return 1 - count / (cdiv(count, size) * size)


def _group_size(counts: list[int]) -> int | None:
    """Return the largest group size that leaves little of any kind empty, if any."""
    for size in range(max(counts), 0, -1):
        groups = sum(cdiv(count, size) for count in counts)
        if groups > MAX_GROUPS:
            return None
        if max(_empty(count, size) for count in counts) <= MAX_EMPTY:
            return size
    return None
