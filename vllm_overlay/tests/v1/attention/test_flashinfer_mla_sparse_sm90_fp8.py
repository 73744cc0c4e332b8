# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode over an FP8 cache on Hopper, against float64.

Triton's interpreter does not run Gluon, so without a GPU the kernels' own source runs
here on torch tensors: ``Emulator`` stands in for ``gl``. It has no layouts, but knows
pointers' bounds, when an asynchronous copy lands, and what uninitialised shared memory
holds (NaN). On a Hopper GPU the same cases run on the compiled kernels; what a compiler
alone can say of them is in ``test_flashinfer_mla_sparse_sm90_compile.py``.
"""

import itertools
import math
import types

import pytest
import torch

from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_decode as shared
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_fp8 as module

LATENT, ROPE = 512, 64
FP8 = torch.float8_e4m3fn
NAN_BYTE = 0xFF
MAX_ERROR = 0.004
"""Relative to the output's norm: bf16's own rounding is 0.0017 on average."""
MAX_LSE_ERROR = 1e-3
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if ON_HOPPER else "cpu"
pytestmark = pytest.mark.skip_global_cleanup


class Value:
    """A tensor or scalar of a kernel: a torch tensor, perhaps a pointer's offset."""

    def __init__(self, data, base=None):
        self.data = data if isinstance(data, torch.Tensor) else torch.tensor(data)
        self.base = base

    def to(self, dtype, bitcast=False):
        """Convert, or reinterpret the bits; of a pointer, what it points at."""
        if self.base is not None:
            ratio = self.base.element_size() // dtype.itemsize
            return Value(self.data.long() * ratio, self.base.view(dtype))
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, index):
        return Value(self.data[index], self.base)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    def _with(self, other, op):
        base = self.base
        if isinstance(other, Value):
            base = base if other.base is None else other.base
            other = other.data
        if base is not None:
            return Value(op(self.data.long(), other), base)
        return Value(op(self.data, other))

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b)

    def __truediv__(self, other):
        return self._with(other, lambda a, b: a / b)

    def __rtruediv__(self, other):
        return self._with(other, lambda a, b: b / a)

    def __floordiv__(self, other):
        return self._with(other, lambda a, b: a // b)

    def __mod__(self, other):
        return self._with(other, lambda a, b: a % b)

    def __and__(self, other):
        return self._with(other, lambda a, b: a & b)

    def __or__(self, other):
        return self._with(other, lambda a, b: a | b)

    def __lshift__(self, other):
        return self._with(other, lambda a, b: a << b)

    def __lt__(self, other):
        return self._with(other, lambda a, b: a < b)

    def __gt__(self, other):
        return self._with(other, lambda a, b: a > b)

    def __ge__(self, other):
        return self._with(other, lambda a, b: a >= b)

    def __eq__(self, other):
        return self._with(other, lambda a, b: a == b)

    def __ne__(self, other):
        return self._with(other, lambda a, b: a != b)

    __radd__ = __add__
    __rmul__ = __mul__
    __hash__ = None


def raw(x):
    """The torch tensor or number inside."""
    return x.data if isinstance(x, Value) else x


class Shared:
    """A view of shared memory."""

    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(dtype).view(shape))

    def load(self, layout):
        return Value(self.data.clone())

    def store(self, value):
        self.data.copy_(value.data)


class Emulator:
    """What the kernels use of ``gl``, for one program at a time."""

    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32

    def __init__(self):
        self.program = (0, 0)
        self.copies: list[list] = [[]]
        self.nvidia = types.SimpleNamespace(
            ampere=types.SimpleNamespace(mma_v2=self.mma, async_copy=self),
        )
        for layout in (
            "BlockedLayout",
            "SliceLayout",
            "SwizzledSharedLayout",
            "NVMMADistributedLayout",
            "DotOperandLayout",
        ):
            setattr(self, layout, lambda *args: None)

    operand = torch.float16
    constexpr = pointer_type = staticmethod(lambda value: value)
    static_range = staticmethod(range)

    def program_id(self, axis):
        return Value(torch.tensor(self.program[axis], dtype=torch.int32))

    def arange(self, start, end, layout):
        return Value(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape, value, dtype, layout):
        return Value(torch.full(shape, value, dtype=dtype))

    def minimum(self, a, b):
        return Value(torch.minimum(torch.as_tensor(raw(a)), torch.as_tensor(raw(b))))

    def maximum(self, a, b):
        return Value(torch.maximum(torch.as_tensor(raw(a)), torch.as_tensor(raw(b))))

    def where(self, condition, a, b):
        return Value(torch.where(torch.as_tensor(raw(condition)), raw(a), raw(b)))

    def exp2(self, x):
        return Value(torch.exp2(x.data))

    def log2(self, x):
        return Value(torch.log2(x.data))

    def max(self, x, axis):
        return Value(x.data.amax(axis))

    def sum(self, x, axis):
        return Value(x.data.sum(axis))

    def load(self, pointer, mask=None, other=None):
        """Load; a live lane outside of the tensor's storage is an IndexError."""
        at = pointer.data
        if mask is not None:
            at = torch.where(torch.broadcast_to(mask.data, at.shape), at, 0)
        if at.min() < 0 or at.max() >= pointer.base.numel():
            raise IndexError(f"address {int(at.min())} to {int(at.max())} is outside")
        x = pointer.base[at]
        return Value(x if mask is None else torch.where(mask.data, x, other))

    def store(self, pointer, value, mask=None):
        """Store the live lanes; one outside of the storage is an IndexError."""
        at, x = torch.broadcast_tensors(pointer.data, value.data)
        if mask is not None:
            live = torch.broadcast_to(torch.as_tensor(mask.data), at.shape)
            at, x = at[live], x[live]
        if at.numel() and (at.min() < 0 or at.max() >= pointer.base.numel()):
            raise IndexError(f"address {int(at.min())} to {int(at.max())} is outside")
        pointer.base[at] = x.to(pointer.base.dtype)

    def allocate_shared_memory(self, dtype, shape, layout, value=None):
        data = torch.empty(shape, dtype=dtype)
        data.view(torch.uint8).fill_(NAN_BYTE)
        if value is not None:
            data.copy_(value.data)
        return Shared(data)

    def async_copy_global_to_shared(self, dst, pointer):
        dst.data.view(torch.uint8).fill_(NAN_BYTE)  # until the wait, readers see NaN
        self.copies[-1].append((dst, self.load(pointer)))

    def commit_group(self):
        self.copies.append([])

    def wait_group(self, pending):
        done = len(self.copies) - 1 - pending
        for dst, value in itertools.chain(*self.copies[: max(done, 0)]):
            dst.store(value)
        self.copies = self.copies[max(done, 0) :]

    def mma(self, a, b, acc):
        assert a.data.dtype == b.data.dtype == self.operand
        return Value(acc.data + a.data.float() @ b.data.float())

    def inline_asm_elementwise(self, asm, constraints, args, **_):
        if "griddepcontrol" in asm:
            return None
        assert "cvt.rn.f16x2.e4m3x2" in asm and "0x3120" in asm
        pairs = args[0].data.contiguous().view(FP8).to(torch.float16)
        pairs = pairs.view(*args[0].data.shape, 2)
        return Value(pairs[..., 0]), Value(pairs[..., 1])


class Launch:
    """A kernel that runs under the emulator: ``kernel[grid](...)``."""

    def __init__(self, kernel, emulator):
        self.function = getattr(kernel, "fn", kernel)
        self.emulator = emulator

    def __getitem__(self, grid):
        def run(*args, num_warps, maxnreg=None, launch_pdl=False, **constants):
            for y, x in itertools.product(range(grid[1]), range(grid[0])):
                self.emulator.program = (x, y)
                self.emulator.copies = [[]]
                self.function(*map(self.argument, args), **constants)

        return run

    @staticmethod
    def argument(x):
        if not isinstance(x, torch.Tensor):
            # Integers are 32 bits wide in the kernels, and wrap.
            return Value(torch.tensor(x, dtype=torch.int32) if type(x) is int else x)
        size = x.untyped_storage().nbytes() // x.element_size()
        base = torch.as_strided(x, (size,), (1,), 0)
        return Value(torch.tensor(x.storage_offset()), base)


def emulate(monkeypatch, emulator, *modules):
    """Run the kernels of these modules, and what they share, under the emulator."""
    constants = ["LATENT_PAIRS", "_UNPACK_ASM", "LAUNCH_DEPENDENTS_ASM", "_WAIT_ASM"]
    constants += ["_LATENT"]
    for place in (shared, *modules):
        monkeypatch.setattr(place, "gl", emulator)
        for name, value in list(vars(place).items()):
            if name in ("_decode_kernel", "_merge_kernel"):
                monkeypatch.setattr(place, name, Launch(value, emulator))
            elif name in constants:
                monkeypatch.setattr(place, name, getattr(value, "value", value))
            elif hasattr(value, "fn"):  # a helper that Triton has wrapped
                monkeypatch.setattr(place, name, value.fn)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Without a Hopper GPU, run the kernels under the emulator."""
    if ON_HOPPER:
        return
    emulate(monkeypatch, Emulator(), module)


class Case:
    """Inputs with a NaN in slot 0 and -1 in the tails, and the answer in float64."""

    decode_class, dtype, max_error = module.SparseFp8Decode, FP8, MAX_ERROR

    def __init__(self, lens, width, heads, rope, k_scale=1.0, seed=0, spread=1.0):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        rows, dim = len(lens), LATENT + rope
        self.heads, self.rope, self.width = heads, rope, width
        self.k_scale, self.scale = k_scale, dim**-0.5
        pool = 4 * width + 1
        wide = torch.zeros(pool, dim + 16)  # rows further apart than they are long
        wide[:, :dim] = normal(pool, dim) + 0.3
        self.cache = (wide / k_scale).to(self.dtype)
        self.cache.view(torch.uint8)[0] = NAN_BYTE
        self.cache = self.cache.to(DEVICE)[:, :dim]
        # One packed query, as under DCP: strides are the kernel's arguments.
        q = (normal(rows, heads, LATENT + ROPE) * spread).bfloat16().to(DEVICE)
        self.q_nope, self.q_pe = q[..., :LATENT], q[..., LATENT:]
        slots = torch.full((rows, width + 3), -1, dtype=torch.int32)
        for row, n in enumerate(lens):
            slots[row, :n] = torch.randperm(pool - 1, generator=generator)[:n] + 1
        self.slots = slots.to(DEVICE)[:, :width]
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def run(self, rows=None, max_rows=None, lse=True, **options):
        """Output and LSE of the rows in the order ``rows``."""
        # Without ``rows`` views of wider tensors, whose strides are arguments.
        index = slice(None) if rows is None else torch.tensor(rows, device=DEVICE)
        n = len(self.lens[index])
        decoder = self.decode_class(
            max_rows or n, self.heads, self.rope, self.width, DEVICE, **options
        )
        decoder._part.fill_(math.nan)
        decoder._part_lse.fill_(math.nan)
        self.decoder = decoder
        out = torch.full((n, self.heads + 1, LATENT + 2), math.nan, device=DEVICE)
        out = out.bfloat16()[:, :-1, :LATENT]
        value = torch.full((n, self.heads + 1), math.nan, device=DEVICE)[:, :-1]
        decoder.decode(
            self.q_nope[index],
            self.q_pe[index] if self.rope else None,
            self.cache,
            self.slots[index],
            self.lens[index],
            self.scale,
            self.k_scale,
            out,
            value if lse else None,
        )
        return out, value

    def reference(self):
        """Output and LSE (log2) in float64."""
        out = torch.zeros(len(self.lens), self.heads, LATENT, dtype=torch.float64)
        lse = torch.full((len(self.lens), self.heads), -math.inf, dtype=torch.float64)
        for row, n in enumerate(self.lens.tolist()):
            if n == 0:
                continue
            kv = self.cache.view(torch.uint8)[self.slots[row, :n].long()]
            kv = kv.view(self.dtype).double() * self.k_scale
            q = self.q_nope[row].double()
            if self.rope:
                q = torch.cat([q, self.q_pe[row].double()], 1)
            s = q @ kv.T * self.scale
            out[row] = torch.softmax(s, -1) @ kv[:, :LATENT]
            lse[row] = torch.logsumexp(s, -1) / math.log(2)
        return out, lse

    def check(self, **options):
        """Run and compare every row with float64."""
        out, lse = self.run(**options)
        want, want_lse = self.reference()
        for row, n in enumerate(self.lens.tolist()):
            if n == 0:
                assert (out[row] == 0).all() and (lse[row] == -math.inf).all()
                continue
            got, true = out[row].double().cpu(), want[row]
            error = ((got - true).norm(dim=-1) / true.norm(dim=-1)).max()
            assert error < self.max_error, (row, n, float(error))
            error = (lse[row].double().cpu() - want_lse[row]).abs().max()
            assert error < MAX_LSE_ERROR, (row, n, float(error))
        return out, lse


TILES = [
    shared.Tile(heads=8, tokens=64, stages=2, warps=4),
    shared.Tile(heads=8, tokens=64, stages=1, warps=4),
    shared.Tile(heads=8, tokens=32, stages=3, warps=2, pair_step=128, token_step=32),
    shared.Tile(heads=16, tokens=128, stages=2, warps=8),
]


@pytest.mark.parametrize("rope", [0, ROPE])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_lengths(rope, splits):
    width = 150
    lens = [0, 1, 63, 64, 65, 127, 129, width]
    Case(lens, width, 8, rope).check(splits=splits)


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 12, 16, 17, 128])
def test_heads(heads):
    Case([70, 0, 3], 80, heads, ROPE).check()


@pytest.mark.parametrize("k_scale", [0.25, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("rope", [0, ROPE])
def test_scale_covers_latent_rope_and_value(k_scale, rope):
    Case([70], 80, 8, rope, k_scale=k_scale).check(splits=1)
    Case([70], 80, 8, rope, k_scale=k_scale).check(splits=2)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles(tile, splits):
    """A row shorter than the pipeline, one that fills it, and one beyond it."""
    assert tile.shared_bytes(ROPE) <= shared.SHARED_BYTES  # the emulator has no limit
    lens = [1, tile.tokens * tile.stages, 5 * tile.tokens + 1]
    Case(lens, 700, 8, ROPE).check(tile=tile, splits=splits)


@pytest.mark.parametrize("spread", [0.01, 30.0])
def test_flat_and_peaked_scores(spread):
    """Nearly equal weights, and one key that takes nearly all of it."""
    Case([150, 65], 150, 8, ROPE, spread=spread).check(splits=2)


def test_scores_that_rise_and_fall_along_the_row():
    """The running maximum moves in every tile, then never again."""
    case = Case([300, 300], 300, 8, ROPE, spread=8.0)
    kv = case.cache.view(torch.uint8)[case.slots[:, :300].long()].view(FP8).float()
    s = torch.einsum("rd,rnd->rn", case.q_nope[:, 0].float(), kv[..., :LATENT])
    order = s.argsort(dim=1)
    order[1] = order[1].flip(0)
    case.slots[:, :300] = case.slots[:, :300].gather(1, order)
    case.check(splits=1)
    case.check(splits=2)


def check_permuted_rows(case_class, splits):
    """A row's bits don't depend on its place in the batch."""
    case = case_class([150, 0, 1, 64, 65, 149], 150, 12, ROPE)
    order = [3, 1, 5, 0, 4, 2]
    out, lse = case.run(splits=splits)
    again, again_lse = case.run(rows=order, splits=splits)
    bits, again_bits = out[order].view(torch.int16), again.view(torch.int16)
    assert torch.equal(again_bits, bits)
    assert torch.equal(again_lse.view(torch.int32), lse[order].view(torch.int32))


@pytest.mark.parametrize("splits", [1, 7])
def test_permuted_rows_give_permuted_bits(splits):
    check_permuted_rows(Case, splits)


def test_same_row_alone_and_in_a_larger_batch():
    """Other rows change a row's splits at most, not its result beyond rounding."""
    case = Case([150] * 3, 150, 8, 0)
    out, _ = case.check(splits=1)
    alone, _ = case.run(rows=[1], splits=2)
    assert (alone[0].float() - out[1].float()).abs().max() < 0.02


@pytest.mark.parametrize("splits", [1, 2])
def test_without_lse(splits):
    case = Case([70, 0], 80, 8, ROPE)
    out, _ = case.run(splits=splits)
    same, untouched = case.run(splits=splits, lse=False)
    assert torch.equal(same, out)
    assert untouched.isnan().all()
    if splits == 1:
        assert case.decoder._part_lse.isnan().all()


def test_no_rows():
    Case([], 80, 8, ROPE).run(max_rows=4)


def test_scratch_is_bounded_and_made_once():
    decoder = module.SparseFp8Decode(8192, 16, ROPE, 2048, DEVICE)
    assert decoder.scratch_bytes < 64 << 20
    for rows in (1, 8, 64, 263, 264, 265, 527, 528, 8192):
        pieces = rows * decoder.num_splits(rows)
        assert pieces == rows or pieces * 16 * LATENT <= decoder._part.numel()
    assert decoder.num_splits(1) > 8
    assert decoder.num_splits(8192) == 1


@pytest.mark.parametrize("blocks", [1, 7, 64, 133, 200, 512, 4096])
def test_splits_never_cost_more_waves_than_they_save(blocks):
    tiles, at_once = 32, 264
    splits = shared.choose_splits(blocks, tiles, 132, 2, 8)
    waves = math.ceil(blocks * splits / at_once) * math.ceil(tiles / splits)
    assert waves <= math.ceil(blocks / at_once) * tiles
    assert splits == 1 or blocks * splits <= 4 * at_once


def test_construction_names_every_reason():
    with pytest.raises(ValueError) as info:
        module.SparseFp8Decode(0, 129, 32, 0, DEVICE, splits=65)
    for word in ("max_rows", "heads", "rope_dim", "topk_width", "splits"):
        assert word in str(info.value)


def test_decode_names_every_reason():
    decoder = module.SparseFp8Decode(2, 8, ROPE, 80, DEVICE)
    make = dict(device=DEVICE)
    with pytest.raises(ValueError) as info:
        decoder.decode(
            torch.zeros(3, 4, LATENT, **make),
            None,
            torch.zeros(9, 500, dtype=torch.uint8, **make),
            torch.zeros(3, 81, dtype=torch.int64, **make),
            torch.zeros(2, dtype=torch.int64, **make),
            1.0,
            1.0,
            torch.zeros(3, 8, 576, **make),
            torch.zeros(3, 9, **make),
        )
    for word in ("3 rows", "q_nope", "q_pe", "cache", "slots", "lens", "out", "lse"):
        assert word in str(info.value)


def test_cache_rows_must_be_16_byte_aligned():
    case = Case([1], 80, 8, 0)
    cache = torch.zeros(100, LATENT + 8, dtype=torch.uint8, device=DEVICE).view(FP8)
    case.cache = cache[:, :LATENT]
    with pytest.raises(ValueError, match="multiples of 16"):
        case.run()


def test_slots_past_four_gib():
    width, rows = 80, (5 << 30) // 576
    case = Case([width], width, 8, ROPE)
    small = case.cache
    large = torch.empty(rows, 576, dtype=torch.uint8, device=DEVICE)
    large[0] = NAN_BYTE
    shift = rows - small.shape[0]
    large[shift:] = small.view(torch.uint8)[:, :576]
    case.cache = large.view(FP8)
    case.slots += shift
    case.check(splits=1)
    case.check(splits=2)


def check_graph_replays(case_class, splits):
    """A captured decode follows lengths and slots."""
    width = 300
    case = case_class([width, 5, 64], width, 8, ROPE)
    decoder = case.decode_class(3, 8, ROPE, width, DEVICE, splits=splits)
    decoder.warm_up()
    out = torch.empty(3, 8, LATENT, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(3, 8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.decode(
            case.q_nope, case.q_pe, case.cache, case.slots, case.lens, case.scale,
            case.k_scale, out, lse,
        )  # fmt: skip
    for lens in ([width, 5, 64], [0, width, 1], [65, 0, 0]):
        other = case_class(lens, width, 8, ROPE, seed=sum(lens))
        case.lens.copy_(other.lens)
        case.slots.copy_(other.slots)
        out.fill_(math.nan)
        graph.replay()
        eager, eager_lse = case.run(splits=splits)
        assert torch.equal(out, eager) and torch.equal(lse, eager_lse)
        case.check(splits=splits)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("splits", [1, 4])
def test_graph_replays_with_other_lengths_and_slots(splits):
    check_graph_replays(Case, splits)
