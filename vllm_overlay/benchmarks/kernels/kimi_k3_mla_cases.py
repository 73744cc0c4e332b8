# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Shapes, data and the float64 reference of the KV-balanced MLA benchmark."""

import math
import random
from dataclasses import dataclass

import torch

LATENT, ROPE = 512, 64
HEAD_DIM = LATENT + ROPE
BLOCK_SIZE = 64
FP8 = torch.float8_e4m3fn
FLOPS_PER_ROW_AND_TOKEN = 2 * (HEAD_DIM + LATENT)
REFERENCE_TOKENS = 1 << 17
"""Tokens that the reference widens to float64 at once."""
COLD_BYTES = 256 << 20
"""Launches in a row walk caches of this size together, several times the L2 cache."""
K = 1024


@dataclass(frozen=True)
class Shape:
    """One row of the table.

    Attributes:
        name: As printed and as ``--shapes`` selects.
        heads: Query heads.
        qlen: Query tokens of a request.
        lens: KV lengths in tokens.
        equal: Name of the shape with the same tokens in equal requests, or None.

    """

    name: str
    heads: int
    qlen: int
    lens: tuple[int, ...]
    equal: str | None = None

    @property
    def rows(self) -> int:
        return self.heads * self.qlen

    @property
    def tokens(self) -> int:
        return sum(self.lens)

    @property
    def kv_bytes(self) -> int:
        return self.tokens * HEAD_DIM

    def floor_us(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The larger of the time to read the KV and to do the products."""
        flops = FLOPS_PER_ROW_AND_TOKEN * self.rows * self.tokens
        return 1e6 * max(self.kv_bytes / bytes_per_s, flops / flops_per_s)


def _skewed() -> list[Shape]:
    """Skewed batches, each followed by its tokens in 64 equal requests."""
    rng = random.Random(1)
    lognormal = [max(256, int(rng.lognormvariate(9.3, 1.2))) for _ in range(64)]
    mixes = {
        "12x8 1x512k+63x2k": [512 * K] + [2 * K] * 63,
        "12x8 64 lognormal": lognormal,
    }
    shapes = []
    for name, lens in mixes.items():
        equal = f"{name}, equal"
        even = sum(lens) // len(lens)
        shapes.append(Shape(name, 12, 8, tuple(lens), equal))
        shapes.append(Shape(equal, 12, 8, (even,) * len(lens)))
    return shapes


SHAPES = [
    Shape("12x8 64x32k", 12, 8, (32 * K,) * 64),
    Shape("12x5 64x32k", 12, 5, (32 * K,) * 64),
    Shape("12x8 1x128k", 12, 8, (128 * K,)),
    Shape("12x8 1x1M", 12, 8, (1024 * K,)),
    Shape("12x8 128x4k", 12, 8, (4 * K,) * 128),
    *_skewed(),
    Shape("12x1 64x32k", 12, 1, (32 * K,) * 64),
    Shape("96x1 64x32k", 96, 1, (32 * K,) * 64),
    Shape("16x8 64x32k", 16, 8, (32 * K,) * 64),
    Shape("96x8 64x32k", 96, 8, (32 * K,) * 64),
]
QUICK = 5
"""``--quick`` takes this many of ``SHAPES``: two tiles to compile."""

LENGTH_SWEEP = [
    Shape(f"12x8 1x{n}k", 12, 8, (n * K,)) for n in (4, 16, 64, 128, 256, 512, 1024)
]
ROW_SWEEP = [
    Shape(f"{heads}x{qlen} 64x8k", heads, qlen, (8 * K,) * 64)
    for heads, qlen in (
        (1, 1), (12, 1), (12, 2), (12, 4), (12, 5), (12, 8), (16, 8), (96, 2),
        (96, 4), (96, 6), (96, 8),
    )
]  # fmt: skip

ACCURACY_SHAPES = [
    Shape("132x1k", 12, 5, (K,) * 132),
    Shape("132x4k", 12, 5, (4 * K,) * 132),
    Shape("132x16k", 12, 5, (16 * K,) * 132),
    Shape("132x32k", 12, 5, (32 * K,) * 132),
    Shape("64x32k", 12, 8, (32 * K,) * 64),
    Shape("66x64k", 12, 8, (64 * K,) * 66),
    Shape("1x128k", 12, 8, (128 * K,)),
    Shape("1x1M", 12, 8, (1024 * K,)),
]
ACCURACY_MEANS = (0.0, 0.25, 0.5, 2.0)


@dataclass
class Batch:
    """A shape's data on the device.

    Attributes:
        shape: The shape.
        q: ``[requests * qlen, heads, 576]`` FP8.
        cache: ``[blocks, 64, 576]`` FP8.
        tables: One int32 block table ``[requests, max_blocks]`` a copy of the KV.
        lens: int32 ``[requests]``.
        scale: Factor of the scores.

    """

    shape: Shape
    q: torch.Tensor
    cache: torch.Tensor
    tables: list[torch.Tensor]
    lens: torch.Tensor
    scale: float


def make_batch(
    shape: Shape,
    mean: float = 0.25,
    sink: bool = False,
    q_std: float = 1.0,
    distinct: int | None = None,
    seed: int = 0,
) -> Batch:
    """Draw a batch: normal latents around ``mean``, pages in random order.

    Args:
        shape: The shape.
        mean: Mean of the latent; its standard deviation is 1.
        sink: Give key 0 of each request about half of each row's weight.
        q_std: Standard deviation of the query, and with it of the scores.
        distinct: Requests with KV of their own; the others share it. They must be
            equally long. None: all, and as many copies as make the KV cold.
        seed: Seed of everything drawn.

    """
    device = torch.device("cuda")
    gen = torch.Generator(device).manual_seed(seed)
    blocks = [-(-n // BLOCK_SIZE) for n in shape.lens]
    requests = len(blocks)
    owners = requests if distinct is None else min(distinct, requests)
    copies = 1 if distinct else max(1, min(8, -(-COLD_BYTES // shape.kv_bytes)))
    own_blocks = sum(blocks[:owners])
    cache = torch.empty(
        (copies * own_blocks, BLOCK_SIZE, HEAD_DIM), dtype=FP8, device=device
    )
    for part in cache.split(4096):
        value = torch.randn(part.shape, device=device, generator=gen)
        value[..., :LATENT] += mean
        part.copy_(value.to(FP8))
    order = torch.randperm(len(cache), device=device, generator=gen).int()
    tables = []
    for copy in range(copies):
        table = torch.zeros((requests, max(blocks)), dtype=torch.int32, device=device)
        used = copy * own_blocks
        for r, count in enumerate(blocks[:owners]):
            table[r, :count] = order[used : used + count]
            used += count
        for r in range(owners, requests):
            table[r] = table[r % owners]
        tables.append(table)
    tokens = requests * shape.qlen
    q = torch.randn((tokens, shape.heads, HEAD_DIM), device=device, generator=gen)
    q *= q_std
    scale = HEAD_DIM**-0.5
    if sink:
        weight = math.log(shape.lens[0]) + q_std**2 / 2
        q_value, k_value = e4m3_factors(weight / scale)
        q[..., LATENT] = q_value
        rope = cache.view(torch.uint8)[..., LATENT]
        rope.zero_()
        k_byte = torch.tensor(k_value).to(FP8).view(torch.uint8).item()
        rope[tables[0][:owners, 0].long(), 0] = k_byte
    lens = torch.tensor(shape.lens, dtype=torch.int32, device=device)
    return Batch(shape, q.to(FP8), cache, tables, lens, scale)


def e4m3_factors(product: float) -> tuple[float, float]:
    """Two e4m3 values whose product is nearest to ``product``."""
    codes = torch.arange(1, 127, dtype=torch.uint8).view(FP8).double()
    gap = (codes[:, None] * codes[None] - product).abs()
    first, second = divmod(int(gap.argmin()), len(codes))
    return codes[first].item(), codes[second].item()


def reference(batch: Batch, request: int) -> torch.Tensor:
    """Causal attention of one request in float64 on the quantised inputs.

    Returns:
        float64 ``[rows, 512]``.

    """
    shape = batch.shape
    length = shape.lens[request]
    first = request * shape.qlen
    q = batch.q[first : first + shape.qlen].double().view(shape.rows, HEAD_DIM)
    token = torch.arange(shape.rows, device=q.device) // shape.heads
    bound = length - shape.qlen + 1 + token
    table = batch.tables[0][request].long()
    top = torch.full((shape.rows, 1), -math.inf, dtype=torch.float64, device=q.device)
    total = torch.zeros_like(top)
    out = torch.zeros((shape.rows, LATENT), dtype=torch.float64, device=q.device)
    step = max(BLOCK_SIZE, REFERENCE_TOKENS * 96 // max(shape.rows, 96))
    step = step // BLOCK_SIZE * BLOCK_SIZE
    for begin in range(0, length, step):
        pages = table[begin // BLOCK_SIZE : -(-min(begin + step, length) // BLOCK_SIZE)]
        keys = batch.cache[pages].view(-1, HEAD_DIM)[: length - begin].double()
        score = q @ keys.T * batch.scale
        position = begin + torch.arange(len(keys), device=q.device)
        score.masked_fill_(position[None] >= bound[:, None], -math.inf)
        newer = torch.maximum(top, score.amax(1, keepdim=True))
        shift = torch.where(newer.isinf(), 0.0, newer)
        weight = torch.exp(score - shift)
        factor = torch.exp(top - shift)
        total = total * factor + weight.sum(1, keepdim=True)
        out = out * factor + weight @ keys[:, :LATENT]
        top = newer
    return out / torch.where(total == 0, 1.0, total)


def compare(
    batch: Batch, outs: list[torch.Tensor | None], requests: list[int]
) -> list[tuple[float, float] | None]:
    """Error and gain of several outputs on some requests.

    Args:
        batch: The data.
        outs: ``[requests * qlen, heads, 512]`` each, or None.
        requests: Requests to look at.

    Returns:
        For each output the relative error (Frobenius norm) and the systematic factor
        minus 1 (projection on the reference).

    """
    shape = batch.shape
    sums = [[0.0, 0.0] for _ in outs]
    square = 0.0
    for request in requests:
        want = reference(batch, request)
        square += want.square().sum().item()
        for out, total in zip(outs, sums):
            if out is None:
                continue
            got = out.view(-1, shape.rows, LATENT)[request].double()
            total[0] += (got - want).square().sum().item()
            total[1] += (got * want).sum().item()
    return [
        None if out is None else (math.sqrt(error / square), product / square - 1)
        for out, (error, product) in zip(outs, sums)
    ]
