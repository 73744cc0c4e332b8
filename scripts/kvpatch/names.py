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

COMPILED = b"# compiled"  # stands for a module without source

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


def _from_module(node: ast.ImportFrom, module: str, path: str) -> str:
    """Return the absolute name of the module that a `from` import reads."""
    if not node.level:
        return node.module or ""
    up = node.level - path.endswith("__init__.py")
    parts = module.split(".")
    parts = parts[: len(parts) - up]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _find(
    read: Reader, module: str, name: str, seen: frozenset[str]
) -> tuple[str, ast.stmt] | None:
    """Return where a name is defined and its definition, through re-exports.

    Args:
        read: Gives a tree's files.
        module: Where it is imported from.
        name: The name.
        seen: Modules on the way, against cycles.

    """
    found = module_file(read, module)
    if found is None or module in seen:
        return None
    path, data = found
    body = ast.parse(data).body
    node = _definitions(body).get(name)
    if isinstance(node, ast.ImportFrom):
        original = next(
            (a.name for a in node.names if name in (a.asname, a.name)), name
        )
        inner = _from_module(node, module, path)
        return _find(read, inner, original, seen | {module}) or (module, node)
    if node is not None:
        return module, node
    for other in body:  # from .x import *
        if isinstance(other, ast.ImportFrom) and other.names[0].name == "*":
            inner = _from_module(other, module, path)
            if made := _find(read, inner, name, seen | {module}):
                return made
    return None


def describe(
    read: Reader, module: str, name: str, words: set[str], depth: int = 0
) -> dict[str, str]:
    """Return what a name looks like: part -> signature. Empty when it isn't there.

    A class is described by its bases and by its methods and fields among `words`, and
    so are its bases; a function also by the class that it returns.

    Args:
        read: Gives a tree's files.
        module: Where it is imported from.
        name: Its name, or "" for the module itself.
        words: Names that the overlay mentions.
        depth: How many bases and results were followed so far.

    """
    found = module_file(read, module)
    if found is None:
        return {}
    if not name:
        return {module: "module"}
    where = _find(read, module, name, frozenset())
    if where is None:
        inner = module_file(read, f"{module}.{name}")
        lazy = f'"{name}"'.encode() in found[1]  # a module-level __getattr__
        return {name: "module"} if inner else {name: "lazy"} if lazy else {}
    home, node = where
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        made = {name: _signature(node)}
        follow = [node.returns] if node.returns else []
    elif isinstance(node, ast.ClassDef):
        made = {name: f"class({', '.join(ast.unparse(b) for b in node.bases)})"}
        for part, inner_node in _definitions(node.body).items():
            if part not in words and part != "__init__":
                continue
            if isinstance(inner_node, ast.FunctionDef | ast.AsyncFunctionDef):
                made[f"{name}.{part}"] = _signature(inner_node)
            elif isinstance(inner_node, ast.AnnAssign):
                made[f"{name}.{part}"] = ast.unparse(inner_node.annotation)
            else:
                made[f"{name}.{part}"] = "value"
        follow = list(node.bases)
    else:
        return {name: "value"}
    if depth < 4:
        for part_node in follow:
            text = part_node.value if isinstance(part_node, ast.Constant) else None
            names = [n.id for n in ast.walk(part_node) if isinstance(n, ast.Name)]
            for other in [text] if isinstance(text, str) else names:
                target = _find(read, home, other, frozenset())
                if target and isinstance(target[1], ast.ClassDef) and other != name:
                    inner_parts = describe(read, home, other, words, depth + 1)
                    made = {**inner_parts, **made}
    return made


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
            if any(file.parent.glob(f"{file.stem}.*.so")):
                return COMPILED
        return None

    return read
