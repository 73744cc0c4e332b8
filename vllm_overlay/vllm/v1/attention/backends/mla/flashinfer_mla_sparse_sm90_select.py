# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Why FLASHINFER_MLA_SPARSE_SM90 can't run on this machine's FlashInfer.

Asked when a backend is selected, so that a missing compiler shows as a reason there
and not as a failure in the first request.
"""

import functools
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

NAME = "FLASHINFER_MLA_SPARSE_SM90"
# The releases whose plan layout the constructor's checks were written for.
MIN_FLASHINFER = Version("0.7.2")
_NEXT_FLASHINFER = Version("0.8")


def version_reason() -> str | None:
    """Why this FlashInfer can't be planned from the device, or None."""
    try:
        found = version("flashinfer-python")
        good = MIN_FLASHINFER <= Version(found) < _NEXT_FLASHINFER
    except PackageNotFoundError:
        found, good = "none", False
    except InvalidVersion:
        good = False
    if good:
        return None
    return (
        f"{NAME} plans FlashInfer's kernel itself and knows "
        f"flashinfer-python >= {MIN_FLASHINFER}, < {_NEXT_FLASHINFER}; found {found}"
    )


def _first_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@functools.cache
def kernel_reason(rope_dim: int) -> str | None:
    """Why FlashInfer's bf16 kernel can neither be loaded nor built, or None."""
    try:
        from flashinfer.jit import env, gen_batch_mla_module
    except (ImportError, OSError) as error:
        return f"{NAME} can't load FlashInfer's JIT: {error}"
    cache = Path(env.FLASHINFER_JIT_DIR)
    writable = "set FLASHINFER_WORKSPACE_BASE to a folder that can be written"
    bf16 = torch.bfloat16
    try:
        spec = gen_batch_mla_module(
            "fa3", bf16, bf16, bf16, torch.int32, 512, rope_dim, False
        )
    except OSError as error:
        return f"{NAME} can't write FlashInfer's cache: {error}; {writable}"
    except RuntimeError as error:
        return f"{NAME} can't use FlashInfer's JIT: {error}"
    if spec.is_aot:
        return None
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return (
            f"{NAME} needs FlashInfer's module {spec.name}, which isn't installed, and "
            "FLASHINFER_DISABLE_JIT forbids building it; unset that or install "
            "flashinfer-jit-cache"
        )
    # FlashInfer locks and runs ninja for a module that it has built before, too.
    if not os.access(_first_existing(cache), os.W_OK):
        return f"{NAME} can't write FlashInfer's cache {cache}; {writable}"
    if shutil.which("ninja") is None:
        return f"{NAME} loads FlashInfer's kernel with ninja, which isn't on PATH"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else shutil.which("nvcc")
    nvcc = nvcc or Path("/usr/local/cuda/bin/nvcc")
    if not spec.is_compiled and not os.access(nvcc, os.X_OK):
        return (
            f"{NAME} has to build FlashInfer's kernel and finds no nvcc at {nvcc}; "
            "install the CUDA toolkit, set CUDA_HOME, or install flashinfer-jit-cache"
        )
    return None
