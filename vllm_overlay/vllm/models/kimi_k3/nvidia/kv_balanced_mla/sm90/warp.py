# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Warp-wide building blocks of the planner and the combine kernel."""

import cutlass
import cutlass.cute as cute


@cute.jit
def inclusive_scan(value, lane):
    """Inclusive prefix sum over the 32 lanes of a warp."""
    for i in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << i)
        if lane >= (1 << i):
            value = value + below
    return value
