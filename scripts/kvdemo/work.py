# SPDX-License-Identifier: Apache-2.0
"""The plan of a batch, who does what in it, and the decode that follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .batch import Batch
from .reference import Attention, ErrorSum, attend, merge


@dataclass
class Work:
    """A planned batch.

    Attributes:
        groups: Workers that share the KV.
        unit_tokens: KV tokens of one unit of the plan.
        segments: For each worker, its (request, first token, end token, slot).
        splits: (request, partial slots in KV order) of each split request.

    """

    groups: int
    unit_tokens: int
    segments: list[list[tuple[int, int, int, int]]]
    splits: list[tuple[int, list[int]]]

    @property
    def loads(self) -> list[int]:
        """KV tokens of each worker."""
        return [sum(end - begin for _, begin, end, _ in s) for s in self.segments]


def plan_batch(batch: Batch, clusters: int) -> Work:
    """Plan a batch with the patched vLLM's own CPU reference.

    Args:
        batch: The step.
        clusters: Thread-block clusters that the GPU runs at once.

    """
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import config, core, plan

    groups = core.worker_groups(
        config.choose_geometry(batch.heads, batch.qlen), clusters
    )
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    counts, work = plan.plan_reference(lengths, groups)
    unit = config.UNIT_TOKENS
    segments = [
        [
            (
                s.request,
                min(s.unit_begin * unit, batch.lengths[s.request]),
                min(s.unit_end * unit, batch.lengths[s.request]),
                s.slot,
            )
            for s in walk
        ]
        for walk in plan.segments(work, counts, lengths, groups)
    ]
    splits = [
        (request, plan.slots_of_split(first, last))
        for request, first, last in plan.split_list(work, counts, groups)
    ]
    return Work(groups, unit, segments, splits)


def check_cover(work: Work, lengths: list[int]) -> None:
    """Check that each request's tokens are walked once, in order, by the plan.

    Raises:
        AssertionError: A token is missed or walked twice.

    """
    at: dict[int, int] = {}
    for walk in work.segments:
        for request, begin, end, _ in walk:
            assert begin == at.get(request, 0), (request, begin, at.get(request))
            at[request] = end
    assert at == dict(enumerate(lengths)), "a request isn't covered"


def decode(
    batch: Batch, work: Work, progress: Callable[[int, int], None]
) -> tuple[ErrorSum, int]:
    """Run the work list in float32 and compare it with float64 without a split.

    One request's KV is in memory at a time, so the workers' segments are visited by
    request; each is still computed alone, and merged as the combine does.

    Args:
        batch: The step.
        work: Its plan.
        progress: Called with (tokens done, all tokens).

    Returns:
        The error over all requests, and how many partials were written.

    """
    by_request: dict[int, list[tuple[int, int, int]]] = {}
    for walk in work.segments:
        for request, begin, end, slot in walk:
            by_request.setdefault(request, []).append((begin, end, slot))
    order = dict(work.splits)
    errors, partials, done = ErrorSum(), 0, 0
    for request in sorted(by_request):
        cache = batch.cache(request)
        slots: dict[int, Attention] = {}
        whole: Attention | None = None
        for begin, end, slot in by_request[request]:
            part = attend(batch, request, cache, begin, end, torch.float32)
            if slot < 0:
                whole = part
            else:
                slots[slot] = part
        if whole is None:
            whole = merge([slots[s] for s in order[request]])
            partials += len(slots)
        errors.add(whole, attend(batch, request, cache, 0, len(cache), torch.float64))
        done += len(cache)
        progress(done, sum(batch.lengths))
    return errors, partials
