# SPDX-License-Identifier: Apache-2.0
"""Postconditions: a backend's name resolves to its class in the patched tree."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .errors import PatchSetError
from .pin import RegistryEntry

_IMPORT = """
import importlib, sys
registry, enum, member, module = sys.argv[1:]
found = getattr(importlib.import_module(registry), enum)[member]
cls = found.get_class() if module != "-" else None
print("RESOLVED", found.value, cls and f"{cls.__module__}.{cls.__qualname__}")
print("FROM", importlib.import_module(registry).__file__)
"""


def enum_values(source: str, enum: str) -> dict[str, str]:
    """Return the string members of an enum class, read from source text."""
    values: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == enum:
            for line in node.body:
                if isinstance(line, ast.Assign) and isinstance(
                    line.value, ast.Constant
                ):
                    for target in line.targets:
                        if isinstance(target, ast.Name):
                            values[target.id] = str(line.value.value)
    return values


def probe_source(root: Path, entry: RegistryEntry) -> str:
    """Check a registry entry by reading source, without importing.

    Args:
        root: The patched tree.
        entry: Name and module.

    Returns:
        The class path that the name stands for.

    Raises:
        PatchSetError: The name is missing, names another module, or the module
            has no such class.

    """
    source = (root / entry.file).read_text()
    values = enum_values(source, entry.enum)
    value = values.get(entry.member)
    module, _, cls = (value or "").rpartition(".")
    if value is None or module != entry.module:
        raise PatchSetError(
            f"the backend's name doesn't resolve: {entry.member}",
            got=f"{entry.file}: {entry.enum}.{entry.member} = {value!r}",
            allowed=f"a class of {entry.module}",
            todo="check the patch that registers it",
        )
    path = root / (module.replace(".", "/") + ".py")
    classes = []
    if path.is_file():
        tree = ast.parse(path.read_text())
        classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    if cls not in classes:
        raise PatchSetError(
            f"the backend's name resolves to a class that isn't there: {value}",
            got=f"{path.relative_to(root)}: {', '.join(classes) or 'no classes'}",
            allowed=f"a class {cls} at the module's top level",
        )
    return value


def importable(root: Path) -> bool:
    """Tell whether this Python could import vLLM from a tree: it needs torch."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, cwd=root
    )
    return found.returncode == 0


def probe_import(root: Path, entry: RegistryEntry, with_class: bool = False) -> str:
    """Resolve a registry entry in a fresh interpreter that imports the tree.

    Args:
        root: The patched tree, put first on the path.
        entry: Name and module.
        with_class: Import the backend's class too, not only its path.

    Returns:
        What the interpreter resolved the name to.

    Raises:
        PatchSetError: It resolved to something else, from elsewhere, or failed.

    """
    registry = entry.file.removesuffix(".py").replace("/", ".")
    module = entry.module if with_class else "-"
    env = dict(os.environ, PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1")
    env.setdefault("VLLM_TARGET_DEVICE", "cpu")
    env["VLLM_LOGGING_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory() as cwd:
        ran = subprocess.run(
            [sys.executable, "-c", _IMPORT, registry, entry.enum, entry.member, module],
            capture_output=True,
            text=True,
            env=env,
            cwd=cwd,
        )
    words = {
        line.split()[0]: line.split()[1:]
        for line in ran.stdout.splitlines()
        if line.startswith(("RESOLVED ", "FROM "))
    }
    value = words.get("RESOLVED", ["nothing"])[0]
    origin = " ".join(words.get("FROM", []))
    ok = value.rpartition(".")[0] == entry.module
    if ran.returncode or not ok or not origin.startswith(str(root)):
        raise PatchSetError(
            f"importing the patched tree doesn't resolve {entry.member}",
            got=f"{value} from {origin or 'nowhere'}\n"
            + "\n".join(ran.stderr.strip().splitlines()[-6:]),
            allowed=f"a class of {entry.module} from {root}",
        )
    return value
