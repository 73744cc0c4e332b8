# SPDX-License-Identifier: Apache-2.0
"""How evenly a plan spreads the KV over the workers: bars in a terminal and a PNG."""

from __future__ import annotations

from pathlib import Path

from .work import Work

BAR_WIDTH = 56
MAX_BARS = 33


def whole_request_loads(lengths: list[int], workers: int) -> list[int]:
    """Return the KV tokens of each worker when requests aren't split.

    The longest goes first, each to the worker with the least so far.

    """
    loads = [0] * workers
    for length in sorted(lengths, reverse=True):
        loads[loads.index(min(loads))] += length
    return loads


def evenness(loads: list[int]) -> float:
    """Return mean over largest load: 1 is even; a step waits for the largest."""
    return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0


def bar_chart(work: Work) -> str:
    """Draw a bar a worker, or a bar for each few of them where there are many."""
    loads = work.loads
    step = -(-len(loads) // MAX_BARS)
    top = max(loads) or 1
    lines = []
    for at in range(0, len(loads), step):
        some = loads[at : at + step]
        name = f"{at}" if len(some) == 1 else f"{at}-{at + len(some) - 1}"
        # The largest of a few stands for them: that is the one a step waits for.
        bar = "#" * round(max(some) / top * BAR_WIDTH)
        pieces = sum(len(s) for s in work.segments[at : at + step])
        lines.append(
            f"  worker {name:>7} |{bar:<{BAR_WIDTH}}| {max(some):>8} tokens,"
            f" {pieces} segment(s)"
        )
    return "\n".join(lines)


def save_png(work: Work, lengths: list[int], title: str, path: Path) -> None:
    """Write the plan beside the unsplit assignment, each segment in its own colour.

    Args:
        work: The plan.
        lengths: KV tokens of each request.
        title: What was planned.
        path: Where to write.

    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    for worker, walk in enumerate(work.segments):
        base = 0
        for request, begin, end, slot in walk:
            left.bar(
                worker,
                end - begin,
                bottom=base,
                width=0.9,
                color=colours[request % len(colours)],
                hatch="//" if slot >= 0 else "",
                edgecolor="white",
                linewidth=0.3,
            )
            base += end - begin
    unsplit = whole_request_loads(lengths, work.groups)
    right.bar(range(work.groups), unsplit, width=0.9, color="0.6")
    for axis, name, loads in (
        (left, "this plan (hatched: part of a split request)", work.loads),
        (right, "requests not split", unsplit),
    ):
        mean = sum(loads) / len(loads)
        axis.axhline(mean, color="black", linewidth=0.8, linestyle="--")
        axis.set_title(f"{name}\nmean / largest = {evenness(loads):.3f}", fontsize=10)
        axis.set_xlabel("worker")
    left.set_ylabel("KV tokens")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
