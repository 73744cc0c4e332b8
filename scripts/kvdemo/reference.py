# SPDX-License-Identifier: Apache-2.0
"""Attention over a work list in float32, and the same without a split in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .batch import LATENT, SOFTMAX_SCALE, Batch

LOG2_E = math.log2(math.e)
CHUNK_TOKENS = 1 << 14


@dataclass
class Attention:
    """Softmax-weighted latents of some KV tokens.

    Attributes:
        out: `[qlen, heads, 512]`, normalised; 0 where nothing is visible.
        lse_log2: `[qlen, heads]`, log2 of the sum of exp2 of the scores in base 2;
            -inf where nothing is visible.

    """

    out: torch.Tensor
    lse_log2: torch.Tensor


def attend(
    batch: Batch,
    request: int,
    cache: torch.Tensor,
    begin: int,
    end: int,
    dtype: torch.dtype,
) -> Attention:
    """Attend from one request's query rows to its KV tokens [begin, end).

    Args:
        batch: The step.
        request: Index of the request.
        cache: FP8 `[length, 576]`; the arithmetic runs on its device.
        begin: First KV token.
        end: One past the last; the request's length cuts it.
        dtype: Of the arithmetic; inputs are the quantised values.

    """
    where_to = {"dtype": dtype, "device": cache.device}
    q = batch.query(request).to(**where_to) * (SOFTMAX_SCALE * LOG2_E)
    seen = batch.visible(request).to(cache.device)[:, None, None]
    shape = (batch.qlen, batch.heads)
    top = torch.full(shape, -math.inf, **where_to)
    total = torch.zeros(shape, **where_to)
    acc = torch.zeros(*shape, LATENT, **where_to)
    for at in range(begin, min(end, len(cache)), CHUNK_TOKENS):
        kv = cache[at : min(at + CHUNK_TOKENS, end)].to(dtype)
        scores = q @ kv.T
        where = torch.arange(at, at + len(kv), device=cache.device)
        scores.masked_fill_(where >= seen, -math.inf)
        new = torch.maximum(top, scores.amax(-1))
        safe = new.masked_fill(new == -math.inf, 0)
        weights = torch.exp2(scores - safe[..., None])
        shrink = torch.exp2(top - safe)
        total = total * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + weights @ kv[:, :LATENT]
        top = new
    some = total > 0
    out = acc / total.where(some, torch.ones_like(total))[..., None]
    lse = torch.where(some, top + total.log2(), torch.full_like(top, -math.inf))
    return Attention(out.cpu(), lse.cpu())


def merge(parts: list[Attention]) -> Attention:
    """Combine attention over disjoint KV tokens, in their order."""
    lse = torch.stack([p.lse_log2 for p in parts])
    top = lse.amax(0)
    safe = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp2(lse - safe)
    total = weights.sum(0)
    some = total > 0
    share = weights / total.where(some, torch.ones_like(total))
    out = sum(w[..., None] * p.out for w, p in zip(share, parts))
    assert isinstance(out, torch.Tensor)
    return Attention(
        out, torch.where(some, safe + total.log2(), torch.full_like(top, -math.inf))
    )


@dataclass
class Error:
    """How far a result is from float64.

    Attributes:
        out: Root of the summed squared differences over that of the reference.
        gain: Systematic factor minus 1: <result, reference> / <reference, reference>.
        lse_log2: Largest difference of the log-sum-exp, in base 2.

    """

    out: float
    gain: float
    lse_log2: float


class ErrorSum:
    """Collects `Error` over requests."""

    def __init__(self) -> None:
        self.diff = self.square = self.dot = self.lse = 0.0

    def add(self, got: Attention, want: Attention) -> None:
        """Add one request; rows that see nothing must be exactly 0 and -inf."""
        empty = want.lse_log2 == -math.inf
        if not torch.equal(empty, got.lse_log2 == -math.inf) or got.out[empty].any():
            self.diff = math.inf
        a, b = got.out.double(), want.out.double()
        self.diff += float(((a - b) ** 2).sum())
        self.square += float((b**2).sum())
        self.dot += float((a * b).sum())
        lse = (got.lse_log2.double() - want.lse_log2)[~empty]
        if len(lse):
            self.lse = max(self.lse, float(lse.abs().max()))

    def result(self) -> Error:
        """Return the totals; a batch that sees nothing has no error."""
        if self.square == 0:
            return Error(self.diff, 0.0, self.lse)
        return Error(
            (self.diff / self.square) ** 0.5, self.dot / self.square - 1, self.lse
        )
