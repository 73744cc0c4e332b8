# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernel's package, with or without vLLM, and what its GPU tests need.

Tests of the kernels alone are also scripts for a host that has torch and the CuTe DSL
but no vLLM: there the package is imported from beside the tests, on its own.
"""

import importlib.util
import sys
from pathlib import Path

import torch

try:
    from vllm.models.kimi_k3.nvidia.kv_balanced_mla import config, core, plan
except ImportError:  # no vLLM here
    _PARENT = Path(__file__).parents[3] / "vllm" / "models" / "kimi_k3" / "nvidia"
    sys.path.insert(0, str(_PARENT))
    from kv_balanced_mla import config, core, plan  # type: ignore[no-redef]

__all__ = ["PACKAGE", "config", "core", "hopper_missing", "plan"]

PACKAGE = plan.__name__.rpartition(".")[0]
"""Where the modules come from, for those that only a host with the DSL can import."""


def hopper_missing() -> str | None:
    """Why the kernels can't run here, or None."""
    if importlib.util.find_spec("cutlass") is None:
        return "the CuTe DSL (nvidia-cutlass-dsl) is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"compute capability {capability}, not 9.0"
