# SPDX-License-Identifier: Apache-2.0
"""Times of single decode steps inside vLLM's engine, and where they go.

A step begins when the attention backend's metadata builder is called. Two calls in a
row are one period of the engine's loop: scheduling, preparation, launches, and waiting
for the GPU where the GPU is slower. Works in the engine's process only
(VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

# Steps at the start of a steady stretch that still pay for the change of batch.
SETTLE_STEPS = 4
TOP_KERNELS = 14


@dataclass
class Step:
    """One forward: when it began (s), its batch, and what it cost."""

    begin: float
    tokens: int
    longest_query: int
    build: float = 0.0  # host seconds in the builder
    graphs: list[Any] = field(default_factory=list)  # pairs of CUDA events


def quantiles(values: list[float]) -> dict[str, float]:
    """Return count, median, tenths, mean and largest of `values`, rounded."""
    if not values:
        return dict(n=0)
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return dict(
        n=len(ordered),
        median=round(at(0.5), 1),
        p10=round(at(0.1), 1),
        p90=round(at(0.9), 1),
        mean=round(sum(ordered) / len(ordered), 1),
        max=round(ordered[-1], 1),
    )


class StepRecorder:
    """Notes every forward of an engine in this process.

    Args:
        builder_class: The backend's metadata builder; its `build` is wrapped.
        graph_class: CUDA graphs, whose `replay` is wrapped; None leaves them alone.

    """

    def __init__(self, builder_class: type, graph_class: type | None) -> None:
        self.on = False
        self.steps: list[Step] = []
        self.requests = 0
        self.steady = 0
        self.profile_from = self.profile_steps = 0
        self.profile: Any = None
        self.profiled = (0, 0)  # first step in the profile, and the one after
        self._first_builder: Any = None
        self._wrap_build(builder_class)
        if graph_class is not None:
            self._wrap_replay(graph_class)

    def _wrap_build(self, builder_class: type) -> None:
        stock = builder_class.build  # type: ignore[attr-defined]

        def build(builder, *args, **kwargs):
            if not self.on:
                return stock(builder, *args, **kwargs)
            common = kwargs.get("common_attn_metadata")
            common = args[1] if common is None else common
            begin = time.perf_counter()
            metadata = stock(builder, *args, **kwargs)
            self._note(builder, begin, time.perf_counter() - begin, common)
            return metadata

        builder_class.build = build  # type: ignore[attr-defined]

    def _wrap_replay(self, graph_class: type) -> None:
        import torch

        stock = graph_class.replay  # type: ignore[attr-defined]

        def replay(graph):
            if not self.on or not self.steps:
                return stock(graph)
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            result = stock(graph)
            end.record()
            self.steps[-1].graphs.append((start, end))
            return result

        graph_class.replay = replay  # type: ignore[attr-defined]

    def _note(self, builder, begin: float, seconds: float, common) -> None:
        if self._first_builder is None:
            self._first_builder = builder
        if builder is not self._first_builder and self.steps:
            self.steps[-1].build += seconds
            return
        step = Step(begin, common.num_actual_tokens, common.max_query_len, seconds)
        self.steps.append(step)
        if self._is_steady(step):
            self.steady += 1
            self._switch_profile()

    def _is_steady(self, step: Step) -> bool:
        """Tell whether all requests decode one token each in this step."""
        return step.longest_query == 1 and step.tokens == self.requests

    def _switch_profile(self) -> None:
        if not self.profile_steps:
            return
        if self.profile is None and self.steady == self.profile_from:
            self.profiled = (len(self.steps) - 1, len(self.steps) - 1)
            self.profile = start_profile()
            return
        first, last = self.profiled
        if first == last and self.steady == self.profile_from + self.profile_steps:
            self.profiled = (first, len(self.steps) - 1)
            if self.profile is not None:
                self.profile.stop()

    def reset(self, requests: int, profile_from: int = 0, profile_steps: int = 0):
        """Forget all steps and record the next ones, of `requests` requests.

        A profile of the GPU covers `profile_steps` steps from the `profile_from`-th
        steady one; 0 steps take none.
        """
        self.steps, self.requests, self.steady = [], requests, 0
        self.profile, self.profiled = None, (0, 0)
        self.profile_from, self.profile_steps = profile_from, profile_steps
        self.on = True

    def stop(self) -> None:
        """Record no further steps; end a profile that is still running."""
        self.on = False
        first, last = self.profiled
        if self.profile is not None and first == last:
            self.profile.stop()
            self.profiled = (first, len(self.steps))

    def _timed(self, changing: bool) -> list[tuple[Step, float]]:
        """Return the decode steps that count, each with its period (s)."""
        end = self.profiled[0] or len(self.steps)
        pairs = list(zip(self.steps[:end], self.steps[1:end]))
        if changing:
            prefills = [i for i, s in enumerate(self.steps) if s.longest_query > 1]
            first = max(prefills, default=-1) + 1 + SETTLE_STEPS
            return [(a, b.begin - a.begin) for a, b in pairs[first:]]
        kept = [
            (a, b.begin - a.begin)
            for a, b in pairs
            if self._is_steady(a) and self._is_steady(b)
        ]
        return kept[SETTLE_STEPS:]

    def summary(self, changing: bool = False) -> dict[str, Any]:
        """Return the recorded times (us): period, builder on the host, CUDA graphs.

        Args:
            changing: Requests leave one a step; every step after the last prefill
                counts, whatever its batch.

        """
        timed = self._timed(changing)
        graphs = [
            sum(start.elapsed_time(end) for start, end in step.graphs) * 1e3
            for step, _ in timed
            if step.graphs
        ]
        result = dict(
            step_us=quantiles([seconds * 1e6 for _, seconds in timed]),
            build_us=quantiles([step.build * 1e6 for step, _ in timed]),
            graph_us=quantiles(graphs),
            graphs_per_step=(
                sum(len(step.graphs) for step, _ in timed) / len(timed)
                if timed
                else 0.0
            ),
        )
        first, last = self.profiled
        if self.profile is not None and last > first:
            result.update(kernel_times(self.profile, last - first))
        return result


def start_profile() -> Any:
    """Start a profile of the GPU; return None, with a line, where that fails."""
    try:
        from torch.profiler import ProfilerActivity, profile

        running = profile(activities=[ProfilerActivity.CUDA])
        running.start()
        return running
    except Exception as error:
        print(f"no GPU profile: {error!r}", flush=True)
        return None


def kernel_times(profile: Any, steps: int) -> dict[str, Any]:
    """Return what the GPU was busy with, in us a step, largest first."""
    try:
        rows = [
            (row.self_device_time_total / steps, row.count / steps, row.key)
            for row in profile.key_averages()
            if row.self_device_time_total > 0
        ]
    except Exception as error:
        print(f"the GPU profile can't be read: {error!r}", flush=True)
        return {}
    rows.sort(reverse=True)
    return dict(
        busy_us=round(sum(row[0] for row in rows), 1),
        kernels=[
            [round(us, 2), round(count, 2), name[:120]]
            for us, count, name in rows[:TOP_KERNELS]
        ],
    )
