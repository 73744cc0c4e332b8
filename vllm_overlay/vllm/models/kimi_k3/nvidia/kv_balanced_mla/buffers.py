# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the decode reserves for a shape, and which forward its plan is for.

One set for each micro-batch (ubatch) and workspace lane; all layers of a shape share
it, because they run one after another.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vllm.models.kimi_k3.nvidia.kv_balanced_mla.trimmed import TrimmedRows
from vllm.v1.worker import ubatching


class Plan:
    """What the plan buffers of one shape, ubatch and lane hold now."""

    def __init__(self) -> None:
        self._forward: weakref.ref[Any] | None = None
        self._key: tuple[Any, ...] | None = None
        self.planned = 0
        self.reused = 0

    def is_for(self, forward: Any | None, key: tuple[Any, ...]) -> bool:
        # Compared by identity through a weak reference: an id could come back
        # for another forward once the first is gone.
        return (
            forward is not None
            and self._forward is not None
            and self._forward() is forward
            and self._key == key
        )

    def set_for(self, forward: Any | None, key: tuple[Any, ...]) -> None:
        self._forward = None if forward is None else weakref.ref(forward)
        self._key = key


@dataclass
class Buffers:
    """The reserved buffers of one shape, ubatch and lane."""

    counts: torch.Tensor  # [core.counts_len()] int32
    work: torch.Tensor  # [core.work_list_len(...)] int32
    plan: Plan
    rows: TrimmedRows | None  # with adaptive verification


@contextmanager
def in_ubatch(ubatch: int) -> Iterator[None]:
    """Let the workspace manager serve ``ubatch`` to this thread.

    Models are built on one thread outside any micro-batch, while the manager
    keeps a slot per micro-batch thread.
    """
    ident = threading.get_ident()
    contexts = ubatching._THREAD_ID_TO_CONTEXT
    previous = contexts.get(ident)
    contexts[ident] = ubatch
    try:
        yield
    finally:
        if previous is None:
            del contexts[ident]
        else:
            contexts[ident] = previous
