# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV-balanced MLA decode of Kimi K3 on Hopper against the other decodes and the card.

    python benchmark_kimi_k3_kv_balanced_mla.py --quick
    python benchmark_kimi_k3_kv_balanced_mla.py --json all.json --png all.png
    python benchmark_kimi_k3_kv_balanced_mla.py --accuracy

Needs torch and the CuTe DSL; vLLM or a path (``--flashmla-so``) for FLASHMLA's FP8
decode, vLLM for the bf16 decodes. What can't run is named with its reason.

What is timed: CUDA-graph replays of one step, which is one plan and ``LAYERS`` layers
(decode and combine), divided by the layers. The contenders take turns, replay by
replay, because a card that is limited by its power slows down over a run; so do a
skewed batch and the equal requests that it is compared with. Layers walk
different copies of a small KV, so that the L2 cache does not hold it. The bf16 decodes
get fewer layers a graph and no plan in it. ``floor`` is the larger of the time to read
the FP8 KV at the measured read rate and the time of the products at the measured FP8
matrix rate.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import kimi_k3_mla_cases as cases
import torch
from kimi_k3_mla_cases import SHAPES, Batch, Shape
from kimi_k3_mla_peers import (
    CONTENDERS,
    FLASHMLA,
    OURS,
    FlashMlaFp8,
    KvBalanced,
    core,
    flashmla_missing,
    load_flashmla,
)

Key = TypeVar("Key", bound=Hashable)

LAYERS = 24
"""MLA layers of Kimi K3: they share one plan."""
OTHER_GRAPH_MS = 40.0
"""Length of a bf16 decode's graph, about."""
PLAN_LAUNCHES = 20
PLAN_BATCHES = (1, 64, 1024)
READ_BYTES = 4 << 30
MATRIX_SIZE = 8192


@dataclass
class Timing:
    """Microseconds of one call: median, least and most over the replays."""

    us: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.us:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass
class Ceilings:
    """What the card reaches in this run."""

    bytes_per_s: float
    flops_per_s: float


@dataclass
class Row:
    """One shape's results.

    Attributes:
        name: The shape's name.
        rows: Query rows of a request.
        tokens: KV tokens of the batch.
        floor_us: See the module.
        times: Contender to its timing.
        plan_us: Contender to the time of its plan.
        error: Contender to its relative error on the sampled requests.
        gain: Contender to its systematic factor minus 1.
        failed: Contender to the reason why it did not run.

    """

    name: str
    rows: int
    tokens: int
    floor_us: float
    times: dict[str, Timing] = field(default_factory=dict)
    plan_us: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    gain: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def us(self, name: str = OURS) -> float:
        """Median of a contender, nan if it did not run."""
        return self.times[name].us if name in self.times else math.nan


def event_ms(launch: Callable[[], object]) -> float:
    """Device milliseconds of ``launch``."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


class Graph:
    """A graph of ``launch``, replayed once.

    It keeps ``launch``, and with it every buffer that the graph points to.
    """

    def __init__(self, launch: Callable[[], object]) -> None:
        self.launch = launch
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            launch()
        self.replay()
        torch.accelerator.synchronize()

    def replay(self) -> None:
        self.graph.replay()


def repeated(launch: Callable[[], object], times: int) -> Callable[[], None]:
    """``launch``, so many times."""

    def run() -> None:
        for _ in range(times):
            launch()

    return run


def alternate(
    graphs: Mapping[Key, Graph], calls: Mapping[Key, int], reps: int
) -> dict[Key, Timing]:
    """Replay the graphs in turn; time of one of the calls in each."""
    samples: dict[Key, list[float]] = {name: [] for name in graphs}
    for _ in range(reps):
        for name, graph in graphs.items():
            samples[name].append(1000 * event_ms(graph.replay) / calls[name])
    return {
        name: Timing(statistics.median(us), min(us), max(us))
        for name, us in samples.items()
    }


def measure_ceilings() -> Ceilings:
    """Read rate over 4 GiB and FP8 product rate with fast accumulation."""
    words = torch.zeros(READ_BYTES // 8, dtype=torch.int64, device="cuda")
    words.sum()
    read_ms = statistics.median(event_ms(words.sum) for _ in range(9))
    del words
    n = MATRIX_SIZE
    a, b = (torch.randn(n, n, device="cuda").to(cases.FP8) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> None:
        for _ in range(10):
            torch._scaled_mm(
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip

    product()
    product_ms = statistics.median(event_ms(product) for _ in range(9)) / 10
    return Ceilings(READ_BYTES / read_ms * 1e3, 2 * n**3 / product_ms * 1e3)


def step_of(contender, layers: int, with_plan: bool) -> Callable[[], None]:
    """One step: the plan, if any, and the layers."""

    def step() -> None:
        if with_plan:
            contender.plan()
        for layer in range(layers):
            contender.call(layer)

    return step


def build(batch: Batch, names: list[str], row: Row):
    """Graphs, calls in each and outputs of the contenders that run the batch."""
    graphs, calls, outs = {}, {}, {}
    for name in names:
        try:
            contender = CONTENDERS[name](batch)
            contender.plan()
            outs[name] = contender.call(0)
            planned = name in (OURS, FLASHMLA)
            layers = LAYERS
            if not planned:
                once_ms = event_ms(lambda: contender.call(0))  # noqa: B023
                layers = max(2, min(LAYERS, int(OTHER_GRAPH_MS / once_ms)))
            graphs[name] = Graph(step_of(contender, layers, planned))
            calls[name] = layers
            if planned:
                plans = Graph(repeated(contender.plan, PLAN_LAUNCHES))
                times = alternate({"": plans}, {"": PLAN_LAUNCHES}, 7)
                row.plan_us[name] = times[""].us
        except Exception as error:  # an optional peer; ours is required
            if name == OURS:
                raise
            row.failed[name] = f"{type(error).__name__}: {error}".split("\n")[0]
    return graphs, calls, outs


def run_shapes(
    shapes: list[Shape],
    names: list[str],
    ceilings: Ceilings,
    reps: int,
    accuracy: bool = True,
) -> list[Row]:
    """Time shapes, in turn, with every contender; look at two requests' accuracy."""
    rows, built = [], []
    graphs: dict[tuple[str, str], Graph] = {}
    calls: dict[tuple[str, str], int] = {}
    for shape in shapes:
        floor = shape.floor_us(ceilings.bytes_per_s, ceilings.flops_per_s)
        row = Row(shape.name, shape.rows, shape.tokens, floor)
        batch = cases.make_batch(shape)
        own, own_calls, outs = build(batch, names, row)
        graphs |= {(shape.name, name): graph for name, graph in own.items()}
        calls |= {(shape.name, name): count for name, count in own_calls.items()}
        rows.append(row)
        built.append((batch, outs))
    alternate(graphs, calls, 1)
    times = alternate(graphs, calls, reps)
    for row, (batch, outs) in zip(rows, built):
        # Not of ``outs``: a decode may run and then fail to be captured.
        row.times = {name: t for (shape, name), t in times.items() if shape == row.name}
        if accuracy:
            picked = sorted({0, len(batch.shape.lens) - 1})
            found = cases.compare(batch, list(outs.values()), picked)
            for name, pair in zip(outs, found):
                row.error[name], row.gain[name] = pair
    del graphs, built, batch, outs, own
    torch.accelerator.empty_cache()
    return rows


def in_turns(shapes: list[Shape]) -> list[list[Shape]]:
    """Shapes that take turns: one alone, or a skewed batch with its equal requests."""
    groups: list[list[Shape]] = []
    for shape in shapes:
        if groups and groups[-1][0].equal == shape.name:
            groups[-1].append(shape)
        else:
            groups.append([shape])
    return groups


def plan_rows(reps: int) -> list[tuple[int, Timing, Timing | None]]:
    """Time of the plan alone: ours and FLASHMLA's metadata, by requests."""
    result = []
    for requests in PLAN_BATCHES:
        shape = Shape(f"plan {requests}", 12, 8, (64,) * requests)
        batch = cases.make_batch(shape)
        batch.lens.fill_(8192)
        graphs = {}
        for kind in (KvBalanced, FlashMlaFp8):
            if kind is FlashMlaFp8 and flashmla_missing():
                continue
            contender = kind(batch)
            contender.plan()
            graphs[kind.__name__] = Graph(repeated(contender.plan, PLAN_LAUNCHES))
        times = alternate(graphs, dict.fromkeys(graphs, PLAN_LAUNCHES), reps)
        result.append((requests, times["KvBalanced"], times.get("FlashMlaFp8")))
    return result


def table(rows: list[Row], shapes: list[Shape]) -> str:
    """The results as a markdown table."""
    by_name = {row.name: row for row in rows}
    equals = {shape.name: shape.equal for shape in shapes}
    lines = [
        "| shape | rows | us (min-max) | FLASHMLA us (min-max) | x FLASHMLA | floor us "
        "| x floor | x equal | plan us | error | gain % | FLASHMLA error | gain % |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        equal = by_name.get(equals.get(row.name) or "")
        cells = [
            row.name,
            str(row.rows),
            str(row.times[OURS]),
            str(row.times.get(FLASHMLA, "-")),
            number(row.us(FLASHMLA) / row.us(), ".2f"),
            f"{row.floor_us:.1f}",
            f"{row.us() / row.floor_us:.2f}",
            number(row.us() / equal.us() if equal else math.nan, ".2f"),
            number(row.plan_us.get(OURS, math.nan), ".1f"),
        ]
        for name in (OURS, FLASHMLA):
            cells.append(number(row.error.get(name, math.nan), ".4f"))
            cells.append(number(100 * row.gain.get(name, math.nan), "+.3f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float, form: str) -> str:
    """``value`` formatted, a dash for nan."""
    return "-" if math.isnan(value) else format(value, form)


def other_table(rows: list[Row], names: list[str]) -> str:
    """The bf16 decodes' times; the reasons of those that did not run below."""
    lines = [f"| shape | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    reasons: dict[str, set[str]] = {}
    for row in rows:
        cells = [number(row.us(name), ".1f") for name in names]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
        for name, reason in row.failed.items():
            reasons.setdefault(f"{name}: {reason}", set()).add(row.name)
    text = ["\n".join(lines)] if names else []
    for why, at in reasons.items():
        where = "every shape" if len(at) == len(rows) else ", ".join(sorted(at))
        text.append(f"- {why} ({where})")
    return "\n".join(text)


def linear_fit(rows: list[Row]) -> tuple[float, float, float]:
    """Least squares of time on tokens: us, us per 1k tokens, worst relative miss."""
    x = [row.tokens / 1024 for row in rows]
    y = [row.us() for row in rows]
    # Relative weights: a miss of 1 % counts the same at every length.
    w = [1 / value**2 for value in y]
    total = sum(w)
    mean_x = sum(a * b for a, b in zip(w, x)) / total
    mean_y = sum(a * b for a, b in zip(w, y)) / total
    slope = sum(a * (b - mean_x) * (c - mean_y) for a, b, c in zip(w, x, y)) / sum(
        a * (b - mean_x) ** 2 for a, b in zip(w, x)
    )
    start = mean_y - slope * mean_x
    miss = max(abs(start + slope * a - b) / b for a, b in zip(x, y))
    return start, slope, miss


def accuracy_table(quick: bool) -> None:
    """Print error and gain of ours and FLASHMLA by tokens, mean and sink."""
    print("| batch x tokens | rows | mean | sink | error | gain % | FLASHMLA error "
          "| gain % |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    worst = 0.0
    for shape in cases.ACCURACY_SHAPES[:: 3 if quick else 1]:
        for mean in cases.ACCURACY_MEANS:
            for sink in (False, True):
                batch = cases.make_batch(shape, mean, sink, q_std=0.5, distinct=4)
                outs: list[torch.Tensor | None] = []
                for kind in (KvBalanced, FlashMlaFp8):
                    if kind is FlashMlaFp8 and flashmla_missing():
                        outs.append(None)
                        continue
                    contender = kind(batch)
                    contender.plan()
                    outs.append(contender.call(0))
                picked = sorted({0, len(shape.lens) // 2})
                cells = []
                found = cases.compare(batch, outs, picked)
                for pair in found:
                    error, gain = pair or (math.nan, math.nan)
                    cells += [number(error, ".4f"), number(100 * gain, "+.3f")]
                worst = max(worst, abs(found[0][1]))
                print(f"| {shape.name} | {shape.rows} | {mean} | "
                      f"{'yes' if sink else 'no'} | {' | '.join(cells)} |",
                      flush=True)  # fmt: skip
                del batch, outs
    print(f"\nlargest gain of ours: {100 * worst:.3f} %")


def arguments() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--shapes", nargs="+", metavar="TEXT",
                      help="only shapes whose name contains one of these")  # fmt: skip
    made.add_argument("--quick", action="store_true",
                      help=f"the first {cases.QUICK} shapes, FP8 decodes")  # fmt: skip
    made.add_argument("--peers", nargs="*", metavar="TEXT",
                      help="only decodes whose name contains one of these")  # fmt: skip
    made.add_argument("--flashmla-so", type=Path, metavar="PATH",
                      help="_flashmla_extension_C.abi3.so or its folder")  # fmt: skip
    made.add_argument("--reps", type=int, default=9, help="replays of each graph")
    made.add_argument("--accuracy", action="store_true",
                      help="print the accuracy table instead")  # fmt: skip
    made.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    made.add_argument("--ratios", type=Path, metavar="FILE",
                      help="write our time over FLASHMLA's, by shape")  # fmt: skip
    made.add_argument("--sweep", action="store_true",
                      help="also time lengths 4k to 1M and rows 1 to 768")  # fmt: skip
    made.add_argument("--png", type=Path, metavar="FILE",
                      help="--sweep, and write a figure")  # fmt: skip
    args = made.parse_args()
    if args.reps < 1:
        made.error(f"--reps is {args.reps}; at least 1 is needed, 7 for a result")
    return args


def chosen(args: argparse.Namespace) -> tuple[list[Shape], list[str]]:
    """Shapes and contenders that the command line asks for."""
    shapes = SHAPES[: cases.QUICK] if args.quick else SHAPES
    if args.shapes:
        shapes = [s for s in SHAPES if any(part in s.name for part in args.shapes)]
        if not shapes:
            names = ", ".join(repr(s.name) for s in SHAPES)
            raise SystemExit(f"--shapes {args.shapes}: no shape; there are {names}")
    names = [OURS, FLASHMLA] if args.quick else list(CONTENDERS)
    if args.peers is not None:
        names = [OURS] + [
            name
            for name in list(CONTENDERS)[1:]
            if any(part.lower() in name.lower() for part in args.peers)
        ]
    return list(shapes), names


def sweeps(names: list[str], ceilings: Ceilings, reps: int) -> dict[str, list[Row]]:
    """Time against KV length and against rows."""
    names = [name for name in names if name in (OURS, FLASHMLA)]
    result = {}
    for label, shapes in (("length", cases.LENGTH_SWEEP), ("rows", cases.ROW_SWEEP)):
        result[label] = [
            run_shapes([shape], names, ceilings, reps, False)[0] for shape in shapes
        ]
        print(f"\n{table(result[label], shapes)}", flush=True)
    start, slope, miss = linear_fit(result["length"])
    print(f"\n12x8, one request: {start:.1f} us + {slope:.3f} us per 1k tokens, "
          f"within {100 * miss:.0f} % from 4k to 1M")  # fmt: skip
    return result


def write_results(args, ceilings, rows, swept, plans) -> None:
    """The files that the command line asks for."""
    data = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
        "rows": [asdict(row) for row in rows],
        "sweeps": {
            name: [asdict(row) for row in found] for name, found in swept.items()
        },
        "plan_us": {
            str(requests): [ours.us, theirs.us if theirs else None]
            for requests, ours, theirs in plans
        },
    }
    if args.json:
        args.json.write_text(json.dumps(data, indent=1) + "\n")
    if args.ratios:
        ratios = {row.name: row.us() / row.us(FLASHMLA) for row in rows
                  if FLASHMLA in row.times}  # fmt: skip
        args.ratios.write_text(json.dumps(ratios, indent=1) + "\n")
    if args.png:
        try:
            from kimi_k3_mla_figure import draw
        except ImportError as error:
            print(f"no figure ({error}): draw it from --json by kimi_k3_mla_figure.py")
            return
        draw(args.png, data)


def main() -> None:
    """Run what the command line asks for and print it as markdown."""
    args = arguments()
    began = time.time()
    reason = core.check_shape(12, 8, torch.device("cuda"))
    if reason is not None:
        raise SystemExit(f"The kernel can't run here: {reason}.")
    load_flashmla(args.flashmla_so)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.accuracy:
        accuracy_table(args.quick)
        print(f"{time.time() - began:.0f} s")
        return
    shapes, names = chosen(args)
    ceilings = measure_ceilings()
    print(f"read {ceilings.bytes_per_s / 1e12:.2f} TB/s, FP8 product "
          f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s; {args.reps} replays of a graph "
          f"of {LAYERS} layers", flush=True)  # fmt: skip
    rows = []
    for group in in_turns(shapes):
        for row in run_shapes(group, names, ceilings, args.reps):
            rows.append(row)
            print(f"{time.time() - began:6.1f} s  {row.name}: {row.times[OURS]} us, "
                  f"{FLASHMLA} {row.times.get(FLASHMLA, '-')}", flush=True)  # fmt: skip
    print(f"\n{table(rows, shapes)}\n")
    others = [name for name in names if name not in (OURS, FLASHMLA)]
    print(other_table(rows, others))
    plans = plan_rows(args.reps)
    print("\n| plan of requests | us | FLASHMLA us |\n|---|---|---|")
    for requests, ours, theirs in plans:
        print(f"| {requests} | {ours} | {theirs or '-'} |")
    swept = {}
    if args.png or args.sweep:
        swept = sweeps(names, ceilings, args.reps)
    write_results(args, ceilings, rows, swept, plans)
    scratch = core.workspace_bytes(12, 8, 1024) / 2**20
    print(f"\nsplit-KV scratch of 12x8 at any length: {scratch:.1f} MiB; "
          f"{time.time() - began:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
