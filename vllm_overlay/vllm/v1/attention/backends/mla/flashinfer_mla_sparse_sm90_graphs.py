# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which CUDA graphs may run on a step's plan.

A graph keeps the kernel that it was captured with, and that follows from its rows. What
a step plans has to serve every graph that may be replayed on it, so this module says
how many rows the largest of them has.

A step that replays a full graph is built with the graph's rows (``prepare_attn`` pads),
and then they are the same. One case differs: a speculator's first draft step runs on
the target's metadata, under a graph that its own manager picks from the target's padded
size. Both take the smallest captured size that fits, rounded up to whole requests where
graphs are uniform (``CudaGraphManager._init_candidates``). So do not count on equality:
take every size that can follow from the rows built.
"""

import bisect

from vllm.config import VllmConfig
from vllm.v1.attention.backend import max_decode_query_len


class GraphRows:
    """The most rows of a CUDA graph that may run on a step built with so many rows.

    The configuration is read at the first call: the graphs' mode and sizes are settled
    only after the metadata builders are made, and before the first step.

    Args:
        vllm_config: The engine's configuration.

    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._sizes: list[list[int]] | None = None
        self._known: dict[int, int | None] = {}

    def _read(self) -> list[list[int]]:
        """Sorted rows of the graphs, a list for each query length of uniform ones."""
        compilation = self._config.compilation_config
        sizes = sorted(compilation.cudagraph_capture_sizes or ())
        mode = compilation.cudagraph_mode
        if not sizes or mode is None or not mode.has_full_cudagraphs():
            return []  # attention runs outside of graphs
        widest = max_decode_query_len(self._config)
        speculative = self._config.speculative_config
        lengths = {1, widest}
        if speculative and speculative.uses_dynamic_speculative_decoding():
            lengths.update(range(1, widest))
        return [sorted({-(-s // q) * q for s in sizes}) for q in sorted(lengths)]

    def __call__(self, rows: int) -> int | None:
        """The most rows of such a graph, ``rows`` itself without one.

        Returns:
            None where it isn't known: a speculator's graph whose size other ranks
            decide.

        """
        if rows not in self._known:
            self._known[rows] = self._largest(rows)
        return self._known[rows]

    def _largest(self, rows: int) -> int | None:
        if self._sizes is None:
            self._sizes = self._read()
        if not self._sizes:
            return rows
        parallel = self._config.parallel_config
        if self._config.speculative_config is not None and (
            parallel.data_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1
        ):
            return None
        # The target's padding, then the draft's.
        for _ in range(2):
            fitting = [s[bisect.bisect_left(s, rows) :] for s in self._sizes]
            rows = max([rows, *(s[0] for s in fitting if s)])
        return rows
