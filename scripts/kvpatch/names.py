# SPDX-License-Identifier: Apache-2.0
"""Which names of other packages the overlay leans on, and what they look like.

Read from source, without importing: the other vLLM isn't installed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .patchset import PatchSet

THIRD_PARTY = ("flashinfer", "cutlass", "cuda", "triton", "quack")
# Root package -> the requirement that vLLM pins it with.
PINNED_BY = {"flashinfer": "flashinfer-python", "cutlass": "nvidia-cutlass-dsl"}

Reader = Callable[[str], bytes | None]


@dataclass
class Uses:
    """What the overlay takes from outside.

    Attributes:
        imports: (module, name) -> overlay files; name is "" for a whole module.
        words: Every attribute, keyword and function name that the overlay mentions.

    """

    imports: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    words: set[str] = field(default_factory=set)


def overlay_uses(ps: PatchSet, project: str) -> Uses:
    """Collect the overlay's imports from vLLM and from the kernel libraries.

    Args:
        ps: The patch set.
        project: The upstream package's name.

    """
    uses = Uses()
    wanted = (project, *THIRD_PARTY)
    own = {p.removesuffix(".py").replace("/", ".") for p in ps.overlay}
    own |= {n.removesuffix(".__init__") for n in own}
    for path, file in ps.overlay.items():
        if not path.endswith(".py"):
            continue
        tree = ast.parse(file.data, path)
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in wanted:
                        uses.imports.setdefault((alias.name, ""), []).append(path)
                        aliases[alias.asname or alias.name] = alias.name
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                if node.module.split(".")[0] in wanted:
                    for alias in node.names:
                        key = (node.module, alias.name)
                        uses.imports.setdefault(key, []).append(path)
            elif isinstance(node, ast.Attribute):
                uses.words.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                uses.words.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                uses.words.add(node.name)
        for node in ast.walk(tree):  # envs.VLLM_X for `import vllm.envs as envs`
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = aliases.get(node.value.id)
                if module:
                    uses.imports.setdefault((module, node.attr), []).append(path)
    mine = [k for k in uses.imports if k[0] in own or f"{k[0]}.{k[1]}" in own]
    for key in mine:
        del uses.imports[key]
    return uses


def module_file(read: Reader, module: str) -> tuple[str, bytes] | None:
    """Return a module's path and source in a tree."""
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if (data := read(path)) is not None:
            return path, data
    return None


def _definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Top-level names of a module or class, also below if, try and with."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        found[part.id] = node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = list(node.body)
            inner += getattr(node, "orelse", []) + getattr(node, "finalbody", [])
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            found = {**_definitions(inner), **found}
    return found


def describe(read: Reader, module: str, name: str, words: set[str]) -> dict[str, str]:
    """Return what a name looks like: part -> signature. Empty when it isn't there.

    Args:
        read: Gives a tree's files.
        module: Where it is imported from.
        name: Its name, or "" for the module itself.
        words: For a class, only methods and fields among these count.

    """
    found = module_file(read, module)
    if found is None:
        return {}
    if not name:
        return {module: "module"}
    node = _definitions(ast.parse(found[1]).body).get(name)
    if node is None:
        inner = module_file(read, f"{module}.{name}")
        lazy = f'"{name}"'.encode() in found[1]  # a module-level __getattr__
        return {name: "module"} if inner else {name: "lazy"} if lazy else {}
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        original = next(a.name for a in node.names if name in (a.asname, a.name))
        if node.module != module:
            return describe(read, node.module, original, words) or {name: "imported"}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {name: _signature(node)}
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(b) for b in node.bases)
        made = {name: f"class({bases})"}
        for part, inner_node in _definitions(node.body).items():
            if part not in words and part != "__init__":
                continue
            if isinstance(inner_node, ast.FunctionDef | ast.AsyncFunctionDef):
                made[f"{name}.{part}"] = _signature(inner_node)
            elif isinstance(inner_node, ast.AnnAssign):
                made[f"{name}.{part}"] = ast.unparse(inner_node.annotation)
            else:
                made[f"{name}.{part}"] = "value"
        return made
    return {name: "value"}


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    marks = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    return f"{marks}({ast.unparse(node.args)}){result}"


def requirement(read: Reader, package: str) -> str:
    """Return the line with which a tree pins a package for CUDA, or "none"."""
    text = (read("requirements/cuda.txt") or b"").decode()
    for line in text.splitlines():
        words = line.split("#")[0].strip()
        if words.split("=")[0].split("[")[0].strip() == package:
            return words
    return "none"


def installed_reader(root_package: str) -> Reader | None:
    """Return a reader of an installed package's source, or None."""
    import importlib.util

    spec = importlib.util.find_spec(root_package)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        return None

    def read(path: str) -> bytes | None:
        inner = path.partition("/")[2]
        for place in places:
            file = Path(place) / inner
            if file.is_file():
                return file.read_bytes()
        return None

    return read
