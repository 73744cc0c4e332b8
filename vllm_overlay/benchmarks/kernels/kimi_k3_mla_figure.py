# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV-balanced MLA benchmark's figure: KV length, rows and skew.

    python kimi_k3_mla_figure.py RESULT.json FIGURE.png

draws what the benchmark wrote with ``--sweep --json RESULT.json``; it needs matplotlib
and no GPU.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

COLOURS = {"KV-balanced fp8": "tab:blue", "FLASHMLA fp8": "tab:orange"}


def _curves(axes, rows: list[dict], x: str) -> None:
    for name, colour in COLOURS.items():
        known = [(row[x], row["times"][name]) for row in rows if name in row["times"]]
        if not known:
            continue
        at = [place for place, _ in known]
        axes.plot(at, [t["us"] for _, t in known], "o-", color=colour, label=name)
        low, high = [t["low"] for _, t in known], [t["high"] for _, t in known]
        axes.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
    at = [row[x] for row in rows]
    axes.plot(at, [row["floor_us"] for row in rows], "k--", linewidth=1, label="floor")
    axes.set_ylabel("us a layer")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _skew(axes, rows: list[dict]) -> None:
    by_name = {row["name"]: row["times"] for row in rows}
    labels = []
    for name, times in by_name.items():
        equal = by_name.get(f"{name}, equal")
        if equal is None:
            continue
        for j, (kernel, colour) in enumerate(COLOURS.items()):
            if kernel in times and kernel in equal:
                value = times[kernel]["us"] / equal[kernel]["us"]
                bar = axes.bar(
                    len(labels) + 0.38 * (j - 0.5), value, 0.36, color=colour
                )
                axes.bar_label(bar, fmt="%.2f")
        labels.append(name.removeprefix("12x8 "))
    axes.axhline(1, color="k", linewidth=1)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("time / time of 64 equal requests")
    axes.set_title("Skew, same tokens")


def draw(path: Path, data: dict) -> None:
    """Write the figure.

    Args:
        path: The PNG.
        data: What the benchmark writes with ``--json``, sweeps included.

    """
    figure, (lengths, by_rows, skew) = plt.subplots(1, 3, figsize=(15, 4.5))
    _curves(lengths, data["sweeps"]["length"], "tokens")
    lengths.set_xscale("log", base=2)
    lengths.set_yscale("log")
    lengths.set_xlabel("KV tokens of one request")
    lengths.set_title("12 heads x 8 tokens, one request")
    _curves(by_rows, data["sweeps"]["rows"], "rows")
    by_rows.set_xlabel("query rows of a request")
    by_rows.set_title("64 requests of 8k")
    _skew(skew, data["rows"])
    figure.suptitle(f"KV-balanced MLA decode, FP8, {data['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"figure: {path}")


if __name__ == "__main__":
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("result", type=Path)
    made.add_argument("figure", type=Path)
    args = made.parse_args()
    draw(args.figure, json.loads(args.result.read_text()))
