# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The sparse backend's kernels, compiled for sm_90a: no GPU is needed.

The launching code runs as it is, on CPU tensors: a stand-in for Triton's driver names
the target, and each launch ends with the binary that it would have started. So what is
compiled are the very variants that a forward takes, and a variant that no warm-up made
is seen. Triton's wheel brings ptxas and cuobjdump.

vLLM turns Triton off where there is no GPU, unless ``CUDA_VISIBLE_DEVICES`` is set and
empty before its first import.
"""

import importlib.util
import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import regex as re
import torch

from tests.v1.attention import flashinfer_mla_sparse_sm90_utils as utils
from vllm.triton_utils import HAS_TRITON, triton
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_bf16 as bf16
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_decode as shared
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_fp8 as fp8
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_planner as planner
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90_plan import (
    Geometry,
    WorkspaceLayout,
)

KERNELS = {
    fp8: ("_decode_kernel",),
    bf16: ("_decode_kernel",),
    shared: ("_merge_kernel",),
    planner: ("_plan_sparse_mla_kernel", "_limit_rows_kernel"),
}
OPERAND = {fp8.SparseFp8Decode: "f16", bf16.SparseBf16Decode: "bf16"}
"""What the tensor cores multiply."""
REGISTERS = 64 * 1024
"""32-bit registers of a Hopper SM; a warp takes a multiple of 256."""
STATIC_SHARED_BYTES = 48 * 1024
"""What a block gets without asking for more."""


def why_not() -> str | None:
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton interprets here: it has no compiler"
    if not HAS_TRITON:
        return "vLLM has turned Triton off: set CUDA_VISIBLE_DEVICES='' without a GPU"
    return None


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skip_global_cleanup,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


class Hopper:
    """Stands for Triton's driver: a device to compile for, and none to launch on."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@dataclass(frozen=True)
class Launch:
    """One launch: its constants and options, and the binary that it starts."""

    kernel: str
    options: dict[str, Any]
    binary: Any
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread: spilled registers, or arrays that are no registers."""

    @property
    def blocks_by_registers(self) -> int:
        """Blocks that run at once on an SM as far as registers go."""
        of_a_warp = triton.cdiv(32 * self.registers, 256) * 256
        return REGISTERS // (of_a_warp * self.binary.metadata.num_warps)


class Compile:
    """Stands for a kernel: a launch compiles it."""

    def __init__(self, name, kernel, folder, launches):
        self.name, self.kernel = name, kernel
        self.folder, self.launches = folder, launches

    def __getitem__(self, grid):
        def launch(*args, **options):
            binary = self.kernel.warmup(*args, grid=grid, **options)
            used = self.resources(binary)
            self.launches.append(Launch(self.name, options, binary, *used))

        return launch

    def resources(self, binary):
        """Registers and bytes of stack of a thread, by cuobjdump."""
        cubin = self.folder / f"{binary.hash}.cubin"
        if not cubin.exists():
            cubin.write_bytes(binary.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        shown = subprocess.run(
            [tool, "--dump-resource-usage", cubin],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
        assert found is not None, shown
        registers, stack, local = map(int, found.groups())
        return registers, stack + local


@pytest.fixture(scope="module")
def binaries(tmp_path_factory):
    """Triton's cache for this file: a variant is compiled once, and surely here."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def launches(monkeypatch, tmp_path, binaries):
    """The launches of all kernels, in order; nothing was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(binaries))
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    made: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(module, name)
            fresh: dict = defaultdict(kernel.create_binder)
            monkeypatch.setattr(kernel, "device_caches", fresh)
            monkeypatch.setattr(module, name, Compile(name, kernel, tmp_path, made))
    return made


def of(launches, kernel):
    """The launches of one kernel, one for each binary."""
    return list({id(x.binary): x for x in launches if x.kernel == kernel}.values())


@pytest.mark.parametrize("decode", OPERAND)
@pytest.mark.parametrize("heads", [1, 8, 12, 128])
@pytest.mark.parametrize("rope", [0, 64])
def test_decode(launches, decode, heads, rope):
    """Layouts, copies and operands fit together, and a block takes what was thought."""
    decoder = decode(256, heads, rope, 2048, "cpu")
    decoder.warm_up()
    tiles = {t.tokens: t for t in map(decoder.tile_of, range(1, 257))}
    variants = of(launches, "_decode_kernel")
    assert {v.options["SPLIT"] for v in variants} == {False, True}
    assert {v.options["BN"] for v in variants} == set(tiles)
    for v in variants:
        tile = tiles[v.options["BN"]]
        assert v.stack_bytes == 0, v.options
        assert v.binary.metadata.num_warps == tile.warps
        # How many splits fill the device is decided by an estimate.
        assert v.blocks_by_registers >= decoder._per_sm, v.registers
        estimate, taken = tile.shared_bytes(rope), v.binary.metadata.shared + 1024
        assert estimate <= taken <= estimate + 512
        assert shared.SHARED_BYTES // taken >= decoder._per_sm
        ptx = v.binary.asm["ptx"]
        assert ".target sm_90a" in ptx
        assert "ldmatrix.sync.aligned.m8n8.x4.shared" in ptx
        assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared" in ptx
        operand = OPERAND[decode]
        assert f"mma.sync.aligned.m16n8k16.row.col.f32.{operand}.{operand}.f32" in ptx
        # All copies are 16 bytes wide and go past L1.
        copies = re.findall(r"cp\.async\.c\w\.\S+ .*?, (0x\w+), ", ptx)
        assert copies and set(copies) == {"0x10"}
        assert "cp.async.ca" not in ptx
        # Only a split has a merge behind it, to be launched early.
        early = "griddepcontrol.launch_dependents" in ptx
        assert early == v.options["SPLIT"]


def test_merge(launches):
    """Every power of 2 of the splits: no spill, no barrier, launched early."""
    for width, max_rows in ((2048, 256), (8192, 1)):
        fp8.SparseFp8Decode(max_rows, 8, 64, width, "cpu").warm_up()
    variants = of(launches, "_merge_kernel")
    assert sorted(v.options["MAX"] for v in variants) == [4, 8, 16, 32, 64]
    for v in variants:
        assert v.stack_bytes == 0, v.options
        assert v.binary.metadata.shared == 0 and v.binary.metadata.launch_pdl
        ptx = v.binary.asm["ptx"]
        # Nothing is read before the decode has ended.
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
        assert "bar.sync" not in ptx and "shfl" not in ptx


def zeros(*shape, offset=0, extra=0, dtype=torch.int32):
    """A view of zeros: ``offset`` elements into the storage, rows ``extra`` longer."""
    *rows, last = shape
    wide = torch.zeros(*rows, offset + last + extra, dtype=dtype)
    return wide[..., offset : offset + last]


@pytest.mark.parametrize("decode", OPERAND)
@pytest.mark.parametrize("heads,width", [(1, 2048), (8, 2176), (12, 2049), (128, 80)])
@pytest.mark.parametrize("rope", [0, 64])
def test_warm_up_leaves_nothing_to_compile(launches, decode, heads, width, rope):
    """Any number of rows, stride, alignment and scale runs on the warm binaries."""
    most = 40
    decoder = decode(most, heads, rope, width, "cpu")
    decoder.warm_up()
    warm = {id(launch.binary) for launch in launches}
    launches.clear()
    half, dim = torch.bfloat16, 512 + rope
    for rows in (1, 2, 3, 16, 17, most):
        for extra, offset, scale in ((0, 0, 1.0), (2, 2, 0.25), (16, 6, 1.0)):
            query = zeros(rows, heads, 576, extra=extra, offset=offset, dtype=half)
            cache = zeros(99, dim, extra=8 * extra, offset=16, dtype=decode.cache_dtype)
            lse = zeros(rows, heads, extra=extra, dtype=torch.float32)
            for value in (None, lse):
                decoder.decode(
                    query[..., :512],
                    query[..., 512:] if rope else None,
                    cache,
                    zeros(rows, width, extra=extra, offset=offset // 2),
                    zeros(rows, offset=offset // 2),
                    scale,
                    scale,
                    zeros(rows, heads, 512, extra=extra, offset=offset, dtype=half),
                    value,
                )
    assert launches
    late = [launch for launch in launches if id(launch.binary) not in warm]
    assert not late, [(launch.kernel, launch.options) for launch in late]


@pytest.mark.parametrize(
    "heads,width,topk,kpool",
    [
        (8, 2048, 2048, 1),
        (16, 2176, 2048, 4),
        (96, 2048, 2048, 1),
        (128, 8192, 8192, 1),
    ],
)
def test_planner(launches, heads, width, topk, kpool):
    """One binary of each kernel serves any batch, and no register is spilled."""
    shape = Geometry(heads, 1 if heads <= 64 else 2, 132, width)
    info, used = utils.plan_info(shape)
    layout = WorkspaceLayout.from_plan(info, used, shape)
    plan = planner.DevicePlanner(layout, zeros(used // 4), 600, topk, kpool)
    for rows, requests in ((0, 0), (1, 1), (2, 1), (16, 16), (300, 17), (600, 600)):
        for offset in (0, 1):
            plan(
                rows,
                zeros(requests + 1, offset=offset),
                zeros(requests, offset=offset),
                requests,
                zeros(rows, offset=offset),
            )
            plan.limit(zeros(rows, offset=offset))
    for name in KERNELS[planner]:
        variants = of(launches, name)
        assert len(variants) == 1, f"{name}: {len(variants)} binaries"
        (variant,) = variants
        assert variant.stack_bytes == 0, name
        assert variant.binary.metadata.shared <= STATIC_SHARED_BYTES
        assert ".target sm_90a" in variant.binary.asm["ptx"]
