# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Low-overhead launch of a compiled CuTe DSL function.

A call of a compiled function wraps every argument in a fresh object before it reaches
the C entry. In eager steps that costs more than the launch, so here the arguments live
in C storage that is made once and only overwritten.
"""

import ctypes
from threading import Lock
from typing import Any

_STORAGE = {
    "p": ctypes.c_void_p,  # device address, or the handle of a stream
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}


class Launcher:
    """A compiled function with storage for its arguments.

    The C entry takes the addresses of its arguments, in the order of the Python
    signature, compile-time arguments left out. Calls from several threads take turns.
    """

    def __init__(self, compiled: Any, kinds: str):
        """Make the storage.

        Args:
            compiled: What ``cute.compile`` returned.
            kinds: One letter for each argument: ``p`` pointer or stream (an int),
                ``i`` Int32, ``l`` Int64, ``f`` Float32.

        Raises:
            ValueError: ``kinds`` does not fit the compiled signature.

        """
        expected = len(compiled.execution_args.signature.parameters)
        if len(kinds) != expected or not set(kinds) <= set(_STORAGE):
            raise ValueError(
                f"kinds is {kinds!r}; the compiled function takes {expected} "
                f"arguments: give one letter of {''.join(_STORAGE)!r} for each."
            )
        self._compiled = compiled
        self._slots: list[Any] = [_STORAGE[kind]() for kind in kinds]
        self._addresses = [ctypes.addressof(slot) for slot in self._slots]
        self._lock = Lock()

    def __call__(self, *values: float) -> None:
        """Launch with one Python number for each argument."""
        with self._lock:
            for slot, value in zip(self._slots, values, strict=True):
                slot.value = value
            self._compiled.run_compiled_program(self._addresses)
