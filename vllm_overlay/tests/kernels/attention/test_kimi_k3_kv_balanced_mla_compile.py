# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile every kernel of the KV-balanced MLA decode for SM90 and read its code.

No GPU is needed: registers, spills, shared memory and instructions are facts of the
compiled code. What it may not exceed is recorded beside this file; after a change that
is meant to move it, and that was measured on a GPU::

    python test_kimi_k3_kv_balanced_mla_compile.py             # print what is compiled
    python test_kimi_k3_kv_balanced_mla_compile.py --record    # make it the record
"""

import functools
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import config
except ImportError:  # no vLLM here: take the package alone
    _ROOT = Path(__file__).parents[3] / "vllm" / "models" / "kimi_k3" / "nvidia"
    sys.path.insert(0, str(_ROOT))
    from kv_balanced_mla import config  # type: ignore[no-redef]

try:
    import pytest
except ImportError:
    pytest = None  # type: ignore[assignment]

PACKAGE = config.__name__.rpartition(".")[0]
RECORD = Path(__file__).with_name("kimi_k3_kv_balanced_mla_compile.json")
PROCESSES = 2
TIMEOUT_S = 900
NUM_SMS = 132
GROUPS = 66
DECODES = {
    f"decode {tile.rows_per_cta}x{tile.cluster} {'causal' if causal else 'full'}": (
        tile,
        causal,
    )
    for tile in config.TILES
    for causal in (True, False)
}
VARIANTS = [*DECODES, "planner", "combine"]
# Threads of a block times blocks of an SM: 65536 registers are shared by these.
RESIDENT_THREADS = {"planner": 1024, "combine": 1024}
TOOLS = ("cuobjdump", "nvdisasm")


@functools.cache
def tool(name: str) -> str | None:
    """Path of a CUDA binary tool: a Python package's, or the one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for path in Path(root).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name)


def missing() -> str | None:
    """Why these tests can't run here, or None."""
    if importlib.util.find_spec("cutlass") is None:
        return "the CuTe DSL (nvidia-cutlass-dsl) is not installed"
    absent = [name for name in TOOLS if tool(name) is None]
    if absent:
        packages = " ".join(f"nvidia-cuda-{name}" for name in absent)
        return f"no {' or '.join(absent)} (Python packages: {packages})"
    return None


if pytest is not None:
    pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@dataclass
class Code:
    """What was compiled.

    Attributes:
        registers: Registers of a thread at entry.
        stack_bytes: Stack of a thread: spills and local arrays.
        shared_bytes: Dynamic shared memory of a block; 0 where not asked for.
        seconds: Time of the compilation.
        instructions: How often each opcode, modifiers included, occurs.

    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    instructions: Counter

    def count(self, *starts: str) -> int:
        """Instructions whose opcode starts with one of ``starts``."""
        return sum(n for op, n in self.instructions.items() if op.startswith(starts))

    @property
    def waits(self) -> int:
        """Waits for tensor instructions; ptxas adds one to each it serialises."""
        return self.count("WARPGROUP.DEPBAR")

    def facts(self) -> dict[str, int]:
        """What the record holds."""
        return {
            "stack_bytes": self.stack_bytes,
            "qgmma": self.count("QGMMA"),
            "waits": self.waits,
        }


def opcodes(sass: str) -> Counter:
    """Count the opcodes of a disassembly."""
    found: Counter = Counter()
    for line in sass.splitlines():
        _, mark, rest = line.partition("*/")
        words = rest.split()
        if words and words[0].startswith("@"):
            words = words[1:]
        if mark and words and words[0][0].isupper():
            found[words[0].rstrip(";")] += 1
    return found


def resource(usage: str, name: str) -> int:
    """A number of ``cuobjdump --dump-resource-usage``."""
    for word in usage.split():
        key, _, value = word.partition(":")
        if key == name:
            return int(value)
    raise ValueError(f"{name} is not in {usage!r}")


def read_code(cubin: Path) -> Code:
    """Read a compiled file and the notes beside it."""

    def output(name: str, *options: str) -> str:
        path = tool(name)
        assert path is not None
        command = [path, *options, str(cubin)]
        return subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout

    usage = output("cuobjdump", "--dump-resource-usage")
    notes = json.loads(cubin.with_suffix(".json").read_text())
    return Code(
        resource(usage, "REG"),
        resource(usage, "STACK"),
        notes["shared_bytes"],
        notes["seconds"],
        opcodes(output("nvdisasm", "-c")),
    )


def compile_variant(name: str) -> int:
    """Compile one variant in this process; returns its dynamic shared memory."""
    if name == "planner":
        plan = importlib.import_module(PACKAGE + ".plan")
        planner = importlib.import_module(PACKAGE + ".sm90.planner")
        planner.compile_plan_kernel(GROUPS, plan.MAX_REQUESTS)
        return 0
    if name == "combine":
        combine = importlib.import_module(PACKAGE + ".sm90.combine")
        combine.compile_combine_kernel(GROUPS, NUM_SMS, True)
        return 0
    core = importlib.import_module(PACKAGE + ".core")
    module: Any = importlib.import_module(PACKAGE + ".sm90.decode_kernel")
    made: list[Any] = []
    kernel = module.DecodeKernel

    class Kept(kernel):  # type: ignore[misc, valid-type]
        """Hands out the instance, which knows its shared memory once compiled."""

        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    module.DecodeKernel = Kept
    try:
        core.compile_decode(*DECODES[name])
    finally:
        module.DecodeKernel = kernel
    return made[0].shared_storage.size_in_bytes()


def compile_here(folder: Path, names: list[str]) -> None:
    """Compile in this process; leaves ``NAME.cubin`` and ``NAME.json``."""
    for name in names:
        began = time.time()
        shared = compile_variant(name)
        notes = {"shared_bytes": shared, "seconds": time.time() - began}
        (dumped,) = Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.cubin")
        cubin = folder / f"{name}.cubin"
        dumped.rename(cubin)
        cubin.with_suffix(".json").write_text(json.dumps(notes))


@functools.cache
def compile_all() -> dict[str, Code]:
    """Compile all variants in ``PROCESSES`` processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = []
        for i in range(PROCESSES):
            dump = folder / f"dump{i}"
            dump.mkdir()
            # The DSL reads these when it is imported.
            env = os.environ | {
                "CUTE_DSL_ARCH": "sm_90a",
                "CUTE_DSL_KEEP": "cubin",
                "CUTE_DSL_DUMP_DIR": str(dump),
            }
            command = [sys.executable, __file__, "--into", name]
            log = (folder / f"log{i}").open("w+")
            jobs.append(
                (
                    subprocess.Popen(
                        [*command, *VARIANTS[i::PROCESSES]],
                        env=env,
                        stdout=log,
                        stderr=log,
                    ),
                    log,
                )
            )
        try:
            for job, log in jobs:
                if job.wait(TIMEOUT_S) != 0:
                    log.seek(0)
                    raise RuntimeError(f"a compilation failed:\n{log.read()[-4000:]}")
        finally:
            for job, log in jobs:
                job.kill()
                log.close()
        return {name: read_code(folder / f"{name}.cubin") for name in VARIANTS}


def check_registers(name: str, code: Code) -> None:
    """The block fits the register file: the launch would fail otherwise."""
    most = 65536 // RESIDENT_THREADS.get(name, config.NUM_THREADS)
    assert code.registers <= most, f"{name}: {code.registers} registers, {most} fit"


def check_record(name: str, code: Code, record: dict[str, dict[str, int]]) -> None:
    """Spills, tensor instructions and waits are as recorded."""
    facts = code.facts()
    want = record[name]
    advice = f"{name}: {facts}, recorded {want}; if meant, measure and --record"
    assert facts["stack_bytes"] <= want["stack_bytes"], advice
    assert facts["qgmma"] == want["qgmma"], advice
    # ptxas waits behind every instruction that it serialises: waits would multiply.
    assert facts["waits"] <= want["waits"], advice


def check_decode(name: str, code: Code) -> None:
    """A decode kernel has what its design rests on."""
    tile, _ = DECODES[name]
    assert code.count("QGMMA") > 0, f"{name}: no FP8 tensor instructions"
    assert 4 * code.waits < code.count("QGMMA"), (
        f"{name}: {code.waits} waits for {code.count('QGMMA')} tensor instructions; "
        "they run one by one"
    )
    assert code.count("HGMMA", "IGMMA") == 0, f"{name}: other tensor instructions"
    assert code.count("UTMALDG") > 0, f"{name}: no TMA loads"
    multicast = sum(n for op, n in code.instructions.items() if "MULTICAST" in op)
    assert (multicast > 0) == (tile.cluster > 1), f"{name}: {multicast} multicasts"
    transposed = code.count("LDSM.16.MT88")
    assert transposed > 0, f"{name}: no transposed shared-memory loads"
    assert code.count("USETMAXREG.DEALLOC") > 0, f"{name}: no setmaxnreg.dec"
    assert code.count("USETMAXREG.TRY_ALLOC") > 0, f"{name}: no setmaxnreg.inc"
    most = config.MAX_SHARED_MEMORY_BYTES
    assert 0 < code.shared_bytes <= most, f"{name}: {code.shared_bytes} of {most} bytes"
    assert code.shared_bytes <= tile.shared_memory_bytes, (
        f"{name}: {code.shared_bytes} bytes of shared memory; config counts "
        f"{tile.shared_memory_bytes}"
    )


if pytest is not None:

    @pytest.fixture(scope="module")
    def compiled():
        return compile_all()

    @pytest.mark.parametrize("name", VARIANTS)
    def test_registers_fit(compiled, name):
        check_registers(name, compiled[name])

    @pytest.mark.parametrize("name", VARIANTS)
    def test_code_is_as_recorded(compiled, name):
        check_record(name, compiled[name], json.loads(RECORD.read_text()))

    @pytest.mark.parametrize("name", DECODES)
    def test_decode_has_its_instructions(compiled, name):
        check_decode(name, compiled[name])

    def test_record_has_no_other_variants():
        assert sorted(json.loads(RECORD.read_text())) == sorted(VARIANTS)


def main() -> int:
    """Print the compiled code's facts, or record them; returns the failures."""
    began = time.time()
    found = compile_all()
    if "--record" in sys.argv:
        record = {name: code.facts() for name, code in found.items()}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
    record = json.loads(RECORD.read_text())
    print("| variant | registers | stack | shared | QGMMA | waits | LDL + STL | s |")
    print("|---|---|---|---|---|---|---|---|")
    failures = []
    for name, code in found.items():
        print(
            f"| {name} | {code.registers} | {code.stack_bytes} | {code.shared_bytes} "
            f"| {code.count('QGMMA')} | {code.waits} | {code.count('LDL', 'STL')} "
            f"| {code.seconds:.1f} |"
        )
        try:
            check_registers(name, code)
            check_record(name, code, record)
            if name in DECODES:
                check_decode(name, code)
        except AssertionError as error:
            failures.append(str(error))
    print(f"{time.time() - began:.0f} s in {PROCESSES} processes")
    print("\n".join(failures) or "all checks passed")
    return len(failures)


if __name__ == "__main__":
    reason = missing()
    if reason is not None:
        sys.exit(f"can't run: {reason}")
    if sys.argv[1:2] == ["--into"]:
        compile_here(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
