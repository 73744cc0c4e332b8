# SPDX-License-Identifier: Apache-2.0
"""What the engine checks have an engine generate, and how they compare two engines.

Workloads are the same token ids in every engine:

* forced: a fixed trace is forced on the decode, so log-probabilities of two engines are
  compared on the same history;
* greedy: 12 prompts of 1 to 3000 tokens in one batch (chunked prefill, mixed batches);
* ragged: 16, 15, 2 and 1 live requests of 16, that end at different steps, at lengths
  that go up from 64 to 8100 tokens and down again.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter
from typing import Any

# Equal logits happen in bf16, three at a time too: the best two are too few.
BEST_TOKENS = 5
PROMPT_TOKENS = (5, 100, 1000, 3000, 64, 65, 17, 1, 640, 129, 2048, 333)
SHORT_PROMPT_TOKENS = (1, 2, 3, 1, 2, 3, 63, 64, 65, 127, 129, 700)
RAGGED: tuple[tuple[tuple[int, ...], int], ...] = (
    # Prompt lengths; the first request ends after so many tokens, each next one later.
    (
        (64, 8100, 640, 64, 2048, 130, 4000, 65, 1000, 333, 64, 5000, 127, 900, 3000)
        + (64,),
        2,
    ),
    ((64,) * 15, 4),
    ((8100, 64), 6),
    ((64,), 8),
    ((64,) * 8 + (3000, 8100) + (64,) * 5, 2),
)


def ngram_drafts(tokens: int) -> dict[str, Any]:
    """Return the speculative config of n-gram drafts: always `tokens`, no model."""
    return dict(
        method="ngram_gpu",
        num_speculative_tokens=tokens,
        prompt_lookup_min=2,
        prompt_lookup_max=3,
    )


def prompts(vocab: int, lengths: tuple[int, ...] = PROMPT_TOKENS) -> list[list[int]]:
    """Return prompts of these lengths, as token ids."""
    rng = random.Random(7)
    return [[rng.randrange(4, vocab) for _ in range(n)] for n in lengths]


def trace(vocab: int, index: int, tokens: int) -> list[int]:
    """Return the tokens that prompt `index` is made to generate."""
    rng = random.Random(1000 + index)
    return [rng.randrange(4, vocab) for _ in range(tokens)]


def probe_ids(vocab: int) -> list[int]:
    """Return the token ids whose log-probabilities are compared at each step."""
    return sorted(random.Random(3).sample(range(4, vocab), 100))


def forced(llm: Any, requests: list[list[int]], vocab: int, steps: int) -> list:
    """Force traces on the engine.

    Returns:
        Log-probabilities [prompt][step][probe id], in nats.

    """
    from vllm import SamplingParams

    ids = probe_ids(vocab)
    params = [
        SamplingParams(
            max_tokens=steps,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprob_token_ids=ids,
            trace_decode_token_ids=trace(vocab, i, steps),
        )
        for i in range(len(requests))
    ]
    inputs = [{"prompt_token_ids": p} for p in requests]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for i, o in enumerate(outputs):
        if list(o.outputs[0].token_ids) != trace(vocab, i, steps):
            raise RuntimeError(f"the engine did not follow the trace of prompt {i}")
    return [
        [[step[t].logprob for t in ids] for step in o.outputs[0].logprobs]
        for o in outputs
    ]


def greedy(
    llm: Any, requests: list[list[int]], tokens: list[int], top: bool
) -> tuple[list[list[int]], list]:
    """Generate greedily.

    Args:
        llm: The engine.
        requests: Prompts.
        tokens: How many to generate for each.
        top: Ask for the best log-probabilities of every step.

    Returns:
        Tokens, and for each token BEST_TOKENS pairs [id, log-probability], the best
        first (empty without `top`).

    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=n,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=BEST_TOKENS if top else None,
        )
        for n in tokens
    ]
    inputs = [{"prompt_token_ids": p} for p in requests]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    best: list = []
    for o in outputs if top else []:
        best.append(
            [
                sorted(
                    ([int(t), float(p.logprob)] for t, p in step.items()),
                    key=lambda pair: -pair[1],
                )[:BEST_TOKENS]
                for step in o.outputs[0].logprobs
            ]
        )
    return [list(o.outputs[0].token_ids) for o in outputs], best


def ragged(llm: Any, vocab: int, top: bool) -> tuple[list[list[int]], list]:
    """Run the ragged waves one after another; tokens and best ones, as in `greedy`."""
    tokens: list[list[int]] = []
    best: list = []
    for lengths, first in RAGGED:
        wanted = [first + i for i in range(len(lengths))]
        more, more_best = greedy(llm, prompts(vocab, lengths), wanted, top)
        tokens += more
        best += more_best
    return tokens, best


class OracleDrafts:
    """Replaces a speculator's drafts by the right tokens, with some made wrong.

    Random weights accept next to no draft, and a rejected draft's row never reaches
    the output. With the tokens of a run without speculation as drafts, every row of
    the verify decides something. The wrong token's place moves, so that 0 to all
    drafts are accepted.

    Args:
        llm: An in-process engine.
        requests: The prompts that will be generated next.
        continuations: Their tokens without speculation.
        vocab: Size of the vocabulary.

    """

    def __init__(
        self,
        llm: Any,
        requests: list[list[int]],
        continuations: list[list[int]],
        vocab: int,
    ) -> None:
        import torch

        core = llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.speculator = self.runner.speculator
        self.original = self.speculator.propose
        self.first_request = llm.request_counter.counter
        self.vocab = vocab
        self.steps = self.runner.num_speculative_steps
        length = max(map(len, continuations)) + self.steps + 1
        self.table = torch.tensor(
            [row + [4] * (length - len(row)) for row in continuations],
            device=self.runner.device,
        )
        self.prompt_tokens = torch.tensor(
            [len(p) for p in requests], device=self.runner.device
        )
        self.sampled = torch.zeros((), dtype=torch.int64, device=self.runner.device)
        self.verified = 0

    def __enter__(self) -> OracleDrafts:
        self.speculator.propose = self._propose
        return self

    def __exit__(self, *_: object) -> None:
        self.speculator.propose = self.original

    def tokens_per_verify(self) -> float:
        """Return the mean of accepted drafts + 1."""
        return float(self.sampled) / max(self.verified, 1)

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        drafts = self.original(*args, **kwargs)
        if kwargs.get("dummy_run"):
            return drafts
        names = ("input_batch", 0), ("num_sampled", 5)
        batch, num_sampled = (
            kwargs[name] if name in kwargs else args[place] for name, place in names
        )
        rows = torch.tensor(
            [int(r.split("-")[0]) - self.first_request for r in batch.req_ids],
            device=self.table.device,
        )
        done = self.runner.req_states.total_len.gpu[batch.idx_mapping].long()
        done = (done - self.prompt_tokens[rows]).clamp(0)
        last = self.table.shape[1] - 1
        columns = done[:, None] + torch.arange(self.steps, device=rows.device)
        right = self.table[rows[:, None], columns.clamp(max=last)]
        wrong = (done * 5 + rows) % (self.steps + 2)
        here = torch.arange(self.steps, device=rows.device) == wrong[:, None]
        self.sampled += num_sampled.sum()
        self.verified += len(batch.req_ids)
        return torch.where(here, (right + 1) % self.vocab, right).to(drafts.dtype)


class SyncRecorder:
    """Collects what vLLM's sync check reports (VLLM_GPU_SYNC_CHECK=warn).

    Install it before the engine is built. `ours` are syncs that a file of this backend
    makes itself, `under_ours` those of vLLM's code that the backend called.
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        warnings.showwarning = self._show

    def _show(self, message, category, filename, lineno, file=None, line=None) -> None:
        text = str(message)
        if "sync" not in text.lower():
            return
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/vllm/" in frame.filename and "gpu_sync_debug" not in frame.filename
        ]
        if not frames:
            return
        inside = ["/kv_balanced_mla/" in frame.filename for frame in frames]
        kind = "ours" if inside[-1] else "under_ours" if any(inside) else "stock"
        place = " < ".join(
            f"{frame.filename.split('/vllm/')[-1]}:{frame.lineno} {frame.name}"
            for frame in frames[-1:-4:-1]
        )
        self.found[kind, place] += 1

    def result(self) -> list[dict[str, Any]]:
        """Return kind, place and times of every sync, most frequent first."""
        return [
            dict(kind=kind, place=place, times=times)
            for (kind, place), times in self.found.most_common()
        ]


def first_differences(
    a: list[list[int]], b: list[list[int]], best: list
) -> list[dict[str, Any]]:
    """Return where the tokens of two runs part, prompt by prompt.

    Args:
        a: Tokens of the first run.
        b: Tokens of the second.
        best: The best log-probabilities of one of them ([] if unknown), two a step or
            more. Up to the step where they part both have the same history.

    Returns:
        Prompt, step, both tokens, whether both are among the best ones, and how far
        the worse of the two is behind the best token (`gap`, nats; at least so far if
        it isn't among them). Without `best` only the first three.

    """
    rows = []
    for prompt, (x, y) in enumerate(zip(a, b, strict=True)):
        step = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), None)
        if step is None:
            continue
        row: dict[str, Any] = dict(prompt=prompt, step=step, a=x[step], b=y[step])
        if best:
            known = {token: value for token, value in best[prompt][step]}
            among = {x[step], y[step]} <= set(known)
            worse = min(known[x[step]], known[y[step]]) if among else None
            low = min(known.values()) if worse is None else worse
            row.update(gap=round(max(known.values()) - low, 4), among_best=among)
        rows.append(row)
    return rows


def unexplained(rows: list[dict[str, Any]], tie: float) -> list[dict[str, Any]]:
    """Return the differences that are not a near tie of the best tokens."""
    return [r for r in rows if not (r.get("among_best") and r["gap"] <= tie)]


def compare(a: dict, b: dict) -> dict[str, Any]:
    """Compare two runs.

    Returns:
        Differences of log-probability at forced steps (nats), first steps (prefill)
        and later steps (decode) apart, and the greedy tokens that agree up to the
        first difference of each prompt.

    """
    diffs: dict[str, list[float]] = {"prefill": [], "decode": []}
    if "forced" in a and "forced" in b:
        for steps_a, steps_b in zip(a["forced"], b["forced"], strict=True):
            for i, (x, y) in enumerate(zip(steps_a, steps_b, strict=True)):
                d = [abs(p - q) for p, q in zip(x, y, strict=True)]
                diffs["decode" if i else "prefill"] += d
    row: dict[str, Any] = dict(a=a["run"], b=b["run"], parts=[])
    for work in ("greedy", "ragged", "oracle"):
        # Drafts of any kind must not change what is generated.
        other = "greedy" if work == "oracle" else work
        if work not in b or other not in a:
            continue
        best = a.get(f"{other}_best") or b.get(f"{other}_best") or []
        parts = first_differences(a[other], b[work], best)
        total = sum(map(len, a[other]))
        lost = sum(len(a[other][r["prompt"]]) - r["step"] for r in parts)
        row[f"{work}_same"], row[f"{work}_total"] = total - lost, total
        row["parts"] += [dict(work=work, **r) for r in parts]
    for kind, d in diffs.items():
        if d:
            finite = all(v == v and v != float("inf") for v in d)
            row[f"{kind}_max"] = round(max(d), 4) if finite else float("nan")
            row[f"{kind}_mean"] = round(sum(d) / len(d), 5) if finite else float("nan")
    return row


def spread(run: dict) -> float:
    """Return the standard deviation of a run's forced log-probabilities (nats)."""
    values = [v for prompt in run["forced"] for step in prompt for v in step]
    mean = sum(values) / len(values)
    return (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
