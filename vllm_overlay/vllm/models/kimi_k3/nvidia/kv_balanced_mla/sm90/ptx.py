# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PTX wrappers that the Hopper decode kernel needs and the DSL has no atom for."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32


@cute.jit
def ldmatrix_x4_trans(address: Int32):
    """Load four 8x8 b16 matrices, transposed; lane i gives row i's address.

    Seen as bytes, one call transposes pairs of columns of 32 rows of 16 bytes.
    """
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def stmatrix_x4(address: Int32, a: Uint32, b: Uint32, c: Uint32, d: Uint32):
    """Store four 8x8 b16 matrices; lane i gives row i's address."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


@cute.jit
def load_4_words(address: Int64):
    """Four consecutive words of global memory, 16-byte aligned."""
    return cute.arch.inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


@cute.jit
def select(condition: Int32, a: Uint32, b: Uint32):
    """``a`` where ``condition`` is not 0, else ``b``."""
    return cute.arch.inline_ptx(
        "{ .reg .pred take; setp.ne.s32 take, {$r0}, 0; "
        "selp.b32 {$w0}, {$r1}, {$r2}, take; }",
        write_only_types=[Uint32],
        read_only_args=[condition, a, b],
    )


@cute.jit
def pack_e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32):
    """Round four fp32 values to e4m3 (saturating); ``a`` is the lowest byte."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; "
        "mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def pack_x2(kind: cutlass.Constexpr, low: Float32, high: Float32):
    """Round two fp32 values to ``kind``, "bf16" or "f16"; ``low`` is the lower half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def exp2_approx(x: Float32):
    """``2 ** x`` on the special-function unit (2 ulp, flushes subnormals)."""
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[x],
    )


@cute.jit
def fma(a: Float32, b: Float32, c: Float32):
    """``a * b + c`` with one rounding."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


@cute.jit
def sum_e4m3x16(address: Int32):
    """Sum of 16 e4m3 values in shared memory, 16-byte aligned.

    Added as a tree in f16: at most 8 values of at most 448 meet in one half, and the
    low bits that f16 drops are 2 ** -11 of the sum.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 w0, w1, w2, w3, a0, a1, a2, a3, a4, a5, a6, a7; "
        ".reg .b16 l0, l1, l2, l3, h0, h1, h2, h3; .reg .f32 low, high; "
        "ld.shared.v4.b32 {w0, w1, w2, w3}, [{$r0}]; "
        "mov.b32 {l0, h0}, w0; mov.b32 {l1, h1}, w1; "
        "mov.b32 {l2, h2}, w2; mov.b32 {l3, h3}, w3; "
        "cvt.rn.f16x2.e4m3x2 a0, l0; cvt.rn.f16x2.e4m3x2 a1, h0; "
        "cvt.rn.f16x2.e4m3x2 a2, l1; cvt.rn.f16x2.e4m3x2 a3, h1; "
        "cvt.rn.f16x2.e4m3x2 a4, l2; cvt.rn.f16x2.e4m3x2 a5, h2; "
        "cvt.rn.f16x2.e4m3x2 a6, l3; cvt.rn.f16x2.e4m3x2 a7, h3; "
        "add.rn.f16x2 a0, a0, a1; add.rn.f16x2 a2, a2, a3; "
        "add.rn.f16x2 a4, a4, a5; add.rn.f16x2 a6, a6, a7; "
        "add.rn.f16x2 a0, a0, a2; add.rn.f16x2 a4, a4, a6; "
        "add.rn.f16x2 a0, a0, a4; mov.b32 {l0, h0}, a0; "
        "cvt.f32.f16 low, l0; cvt.f32.f16 high, h0; add.rn.f32 {$w0}, low, high; }",
        write_only_types=[Float32],
        read_only_args=[address],
    )


@cute.jit
def or_of_four(address: Int32):
    """Bitwise or of four 32-bit words in shared memory, 16-byte aligned."""
    a, b, c, d = cute.arch.inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )
    return (a | b) | (c | d)
