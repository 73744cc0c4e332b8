# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA decode over a bf16 cache on Hopper, against float64.

The cases and the emulator are those of the FP8 kernel's tests. On a Hopper GPU the same
cases run on the compiled kernels.
"""

import pytest
import torch

from tests.v1.attention import test_flashinfer_mla_sparse_sm90_fp8 as fp8
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm90_bf16 as module

LATENT, ROPE, DEVICE = fp8.LATENT, fp8.ROPE, fp8.DEVICE
pytestmark = pytest.mark.skip_global_cleanup


class Case(fp8.Case):
    decode_class, dtype = module.SparseBf16Decode, torch.bfloat16
    max_error = 0.0035
    """Relative to the output's norm: the output's rounding is 0.0017, P's 0.0011."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Without a Hopper GPU, run the kernels under the emulator."""
    if fp8.ON_HOPPER:
        return
    emulator = fp8.Emulator()
    emulator.operand = torch.bfloat16
    fp8.emulate(monkeypatch, emulator, module, fp8.module)


@pytest.mark.parametrize("rope", [0, ROPE])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_lengths(rope, splits):
    width = 150
    lens = [0, 1, 31, 32, 33, 63, 64, 65, 127, 129, width]
    Case(lens, width, 8, rope).check(splits=splits)
