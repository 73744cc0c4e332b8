# SPDX-License-Identifier: Apache-2.0
"""A decode batch: its lengths, as text and as tensors in Kimi K3's MLA shape."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

LATENT, ROPE = 512, 64
HEAD_DIM = LATENT + ROPE
# K3's softmax scale: the head's width before the latent projection is 128 + 64.
SOFTMAX_SCALE = (128 + 64) ** -0.5
MAX_TOKENS = 1 << 24


def parse_lengths(text: str) -> list[int]:
    """Parse `524288,2048x63`: lengths in tokens, `NxTIMES` for repeated ones.

    Raises:
        argparse.ArgumentTypeError: A part isn't understood.

    """
    lengths: list[int] = []
    for part in text.split(","):
        size, _, times = part.strip().partition("x")
        if not size.isdigit() or not (times or "1").isdigit():
            raise argparse.ArgumentTypeError(
                f"{part!r} isn't a length; write TOKENS or TOKENSxTIMES, "
                f"as in 524288,2048x63"
            )
        if int(size) > MAX_TOKENS:
            raise argparse.ArgumentTypeError(
                f"{size} tokens; allowed are 0 to {MAX_TOKENS}"
            )
        lengths += [int(size)] * int(times or "1")
    if not 1 <= len(lengths) <= 4096:
        raise argparse.ArgumentTypeError(
            f"{len(lengths)} requests; allowed are 1 to 4096"
        )
    return lengths


@dataclass
class Batch:
    """One decode step's inputs.

    Attributes:
        lengths: KV tokens of each request.
        heads: Query heads.
        qlen: Query tokens of each request.
        causal: Token j sees `length - qlen + 1 + j` KV tokens; else all.
        seed: Of the random data.

    """

    lengths: list[int]
    heads: int
    qlen: int
    causal: bool
    seed: int = 0

    @property
    def rows(self) -> int:
        """Query rows of one request."""
        return self.heads * self.qlen

    def query(self, request: int) -> torch.Tensor:
        """Return FP8 `[qlen, heads, 576]` of one request."""
        made = torch.Generator().manual_seed(2 * (self.seed + 7919 * request))
        q = torch.randn(self.qlen, self.heads, HEAD_DIM, generator=made)
        return q.to(torch.float8_e4m3fn)

    def cache(self, request: int) -> torch.Tensor:
        """Return the FP8 latent and rope rows `[length, 576]` of one request.

        Values have mean 0.25 and deviation 0.5: latents have a mean, and only then
        does a systematic error of the sums show.

        """
        made = torch.Generator().manual_seed(2 * (self.seed + 7919 * request) + 1)
        rows = torch.empty(self.lengths[request], HEAD_DIM, dtype=torch.float8_e4m3fn)
        for at in range(0, len(rows), 1 << 16):
            part = torch.randn(len(rows[at : at + (1 << 16)]), HEAD_DIM, generator=made)
            rows[at : at + (1 << 16)] = part.mul_(0.5).add_(0.25).to(rows.dtype)
        return rows

    def visible(self, request: int) -> torch.Tensor:
        """Return, for each query token, how many KV tokens it sees: int64 `[qlen]`."""
        length = self.lengths[request]
        if not self.causal:
            return torch.full((self.qlen,), length)
        return (torch.arange(self.qlen) + length - self.qlen + 1).clamp(0, length)
