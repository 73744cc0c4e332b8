# SPDX-License-Identifier: Apache-2.0
"""What may stand in an upstream pull request: its texts, its files, its imports.

A reviewer sees the branch and the description, not this repository: neither may name
what only this repository has. Numbers of a text stand on the page that it names.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from .errors import PatchSetError

# What only this repository has, and what to do instead. A path that the branch has too
# is no such mention.
_MENTIONS = (
    (
        r"(?<![\w/.*-])(?:ci|scripts|patches|vllm_overlay)/[\w./*-]*",
        "a path of this repository",
        "name a file of the branch, or say it without one",
    ),
    (
        r"docs/(?:measurements|promises|pull_requests|design/sparse_sm90)[\w./#-]*",
        "a page of this repository",
        "write the numbers and how they were measured into the text itself",
    ),
    (
        r"(?i)\b(?:this|the|our)\s+patch\s+set\b|\bthis\s+repository\b|\bkvpatch\b",
        "words for this repository",
        'say "this change", or name the pull request',
    ),
)
_LINKS = (
    r"\]\((?!https?://|#)[^)]*\)",
    r"(?m)^\[[^\]]+\]:[ \t]*(?!https?://)\S+",
    r"(?i)<(?:img|a)\s[^>]*(?:src|href)=[\"'](?!https?://)[^\"']*",
)
_COMMIT = r"(?<![\w./#-])(?=[a-f]*\d)[0-9a-f]{7,40}(?![\w-]|\.\d)"
_PROGRAM = r"(?<![\w/.:-])\w[\w./-]*\.(?:py|sh)\b"
_SOURCE = re.compile(r"<!-- source: ([^>]*?) -->")
_NUMBER = re.compile(r"(?:(?<![\w.])[-+])?(?<![\w.])\d\w*(?:\.\w+)*")


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def mentions(text: str, tree: Path) -> Iterator[tuple[int, str, str]]:
    """Find what only this repository has.

    Args:
        text: Text of a file or of a description.
        tree: The branch.

    Yields:
        Line number, what was found, and what to do.

    """
    for pattern, what, todo in _MENTIONS:
        for found in re.finditer(pattern, text):
            name = found[0].rstrip("./*-")
            if "/" in name and (tree / name).exists():
                continue
            yield _line(text, found), f"{what}: {found[0]}", todo


def text_faults(text: str, tree: Path) -> Iterator[tuple[int, str, str]]:
    """Find what a description may not hold; as `mentions`, which it includes."""
    yield from mentions(text, tree)
    for pattern in _LINKS:
        for found in re.finditer(pattern, text):
            fault = f"a relative link: {found[0]}"
            yield _line(text, found), fault, "write the whole URL"
    for found in re.finditer(_COMMIT, text):
        todo = "drop it; a number of seven digits is written as 1.05 M"
        yield _line(text, found), f"a commit id of this repository: {found[0]}", todo
    for found in re.finditer(_PROGRAM, text):
        if not any(True for _ in tree.rglob(found[0])):
            todo = "name a program or test of the branch, as upstream would call it"
            fault = f"a file that the branch doesn't have: {found[0]}"
            yield _line(text, found), fault, todo


def check_text(where: str, text: str, tree: Path) -> None:
    """Refuse a text with anything of `text_faults`.

    Raises:
        PatchSetError: It has; every line is named, with what to do.

    """
    _refuse(
        "a text for upstream holds what upstream can't see",
        where,
        text_faults,
        text,
        tree,
    )


def check_files(paths: Iterable[str], tree: Path, stock: Mapping[str, bytes]) -> None:
    """Refuse files of a commit that mention what only this repository has.

    Args:
        paths: The commit's files; of those in `stock`, only new lines are read.
        tree: The branch with the commit.
        stock: Upstream's bytes of the files that are patched.

    Raises:
        PatchSetError: One does.

    """
    for path in paths:
        lines = (tree / path).read_bytes().decode(errors="replace").split("\n")
        old = set(stock.get(path, b"").decode(errors="replace").split("\n"))
        if path in stock:
            lines = ["" if line in old else line for line in lines]
        what = "a file for upstream mentions what upstream can't see"
        _refuse(what, path, mentions, "\n".join(lines), tree)


def _refuse(
    what: str,
    where: str,
    find: Callable[[str, Path], Iterator[tuple[int, str, str]]],
    text: str,
    tree: Path,
) -> None:
    faults = sorted(set(find(text, tree)))
    if faults:
        raise PatchSetError(
            what,
            got="\n".join(f"{where}:{line}: {fault}" for line, fault, _ in faults),
            todo="\n".join(dict.fromkeys(todo for _, _, todo in faults)),
        )


def number_faults(text: str, folder: Path) -> list[str]:
    """Compare a text's numbers with the pages that it names.

    A comment `<!-- source: PAGE... -->` says where the numbers below it come from.
    All numbers of a table's row must stand in one line of those pages, every other
    number somewhere on them. Code blocks, backquotes and URLs are left out.

    Args:
        text: A text of results.
        folder: Where the pages lie.

    Returns:
        The faults, each with its line.

    Raises:
        PatchSetError: A page can't be read.

    """
    pages: list[Counter[str]] | None = None
    faults, code = [], False
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if source := _SOURCE.search(line):
            pages = list(_page_lines(folder, source[1].split()))
        elif line.startswith("```"):
            code = not code
        elif not code and (found := _numbers(line)):
            if pages is None:
                faults.append(f"{number}: numbers without `<!-- source: PAGE -->`")
                continue
            header = number < len(lines) and lines[number].startswith("|--")
            if line.startswith("|") and not header:
                if not any(found <= page for page in pages):
                    faults.append(f"{number}: no line of its source has {line.strip()}")
            elif lost := [n for n in found if not any(n in page for page in pages)]:
                faults.append(f"{number}: not on its source: {', '.join(lost)}")
    return faults


def _page_lines(folder: Path, names: list[str]) -> Iterator[Counter[str]]:
    for name in names:
        try:
            text = (folder / name).read_text()
        except OSError as error:
            raise PatchSetError(
                "a page of results can't be read",
                got=str(error),
                allowed=", ".join(sorted(p.name for p in folder.glob("*.md"))),
            ) from error
        for line in text.split("\n"):
            yield _numbers(line)


def _numbers(line: str) -> Counter[str]:
    return Counter(_NUMBER.findall(re.sub(r"`[^`]*`|https?://\S+", "", line)))


def without_sources(text: str) -> str:
    """Return a text of results as upstream sees it."""
    return _SOURCE.sub("", text).strip().replace("\n\n\n", "\n\n")


def imports(tree: Path, path: str) -> set[str]:
    """Return the files that a Python file may import, as paths in the tree.

    Read are import statements, relative ones and neighbours of a script too, and
    strings that name a module or something in it. Not every path exists.
    """
    try:
        parsed = ast.parse((tree / path).read_text(), path)
    except SyntaxError:
        return set()  # the hooks report it
    folder = path.rpartition("/")[0]
    names: set[str] = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = folder.split("/")[: 1 - node.level or None]
                base = ".".join([*above, *filter(None, [base])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"\w+(\.\w+)+", str(node.value)
        ):
            names |= {str(node.value), str(node.value).rpartition(".")[0]}
    found = set()
    for name in names:
        base = name.replace(".", "/")
        for start in (base, f"{folder}/{base}"):
            found |= {f"{start}.py", f"{start}/__init__.py"}
    return found


def borrowed(
    tree: Path, paths: Iterable[str], owners: Mapping[str, str]
) -> dict[str, list[str]]:
    """Say whose new files a commit's Python files import.

    Args:
        tree: The branch with the commit.
        paths: The commit's files.
        owners: File -> the other commit that brings it.

    Returns:
        The other commit -> "FILE imports FILE", sorted.

    """
    found: dict[str, list[str]] = {}
    for path in sorted(p for p in paths if p.endswith(".py")):
        for used in sorted(imports(tree, path) & set(owners)):
            found.setdefault(owners[used], []).append(f"{path} imports {used}")
    return found
