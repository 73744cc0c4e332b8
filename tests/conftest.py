# SPDX-License-Identifier: Apache-2.0
"""A tiny upstream project and a tiny patch set for it."""

import difflib
import hashlib
import io
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvpatch import probe, verify
from kvpatch.mailpatch import blob_id
from kvpatch.patchset import load_patch_set

REGISTRY = "vllm/registry.py"
LAYER = "vllm/layer.py"
TEST = "tests/test_layer.py"
BACKEND = "vllm/fast/backend.py"
SHADOWED = "vllm/slow.py"

STOCK = {
    "vllm/__init__.py": "",
    REGISTRY: "import enum\n\n\nclass Backends(enum.Enum):\n"
    + "".join(f'    B{i} = "m.b{i}"\n' for i in range(9)),
    LAYER: "".join(f"line {i}\n" for i in range(40)),
    TEST: "def test_layer():\n    assert True\n",
    SHADOWED: "SPEED = 1\n",
}
PIN = """\
[upstream]
project = "vllm"
version = "1.2.3"
tag = "v1.2.3"
sdist_sha256 = "{sdist}"
wheel_x86_64_sha256 = "00"

[[registry]]
file = "vllm/registry.py"
enum = "Backends"
member = "FAST"
module = "vllm.fast.backend"

[shadow]
"vllm/slow.py" = "{shadow}"
"""
HEADER = """\
From: A Developer <dev@example.com>
Subject: [PATCH] {subject}

Why this can't live in the overlay: the hook needs a line of its own.

Kind: hook
Forwarded: no
Bug: none
Remove-When: upstream has it
Test: tests/test_layer.py
---
"""
# Where verify wants every patch and overlay file to be.
SPLIT = """
[[pr]]
name = "all"
title = "[Area] all"
patches = ["registry-*", "layer-*"]
overlay = ["vllm/fast/*", "vllm/slow.py"]
issues = []
searches = []
overview = "All."
claims = []
details = ""
"""
HEAD = "\n".join(verify.SPDX) + "\n"


def diff_text(path: str, old: str, new: str, context: int = 3) -> str:
    """Return git's form of one file's edit."""
    body = "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(
            old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}",
            n=context, lineterm="\n",
        )
    )  # fmt: skip
    ids = f"{blob_id(old.encode())}..{blob_id(new.encode())} 100644"
    return f"diff --git a/{path} b/{path}\nindex {ids}\n{body}"


@dataclass
class Tiny:
    """A project with a patch set, and the upstream that it is for."""

    root: Path
    stock: dict[str, str] = field(default_factory=lambda: dict(STOCK))
    sdist: Path = Path()

    def write_patch(self, name, edits, subject="area: edit a file", listed=True):
        """Write a patch from `{path: (old, new)}`."""
        text = HEADER.format(subject=subject)
        text += "\n" + "".join(diff_text(p, *e) for p, e in edits.items())
        (self.root / "patches" / name).write_text(text)
        if listed:
            with open(self.root / "patches" / "series", "a") as series:
                series.write(name + "\n")

    def overlay(self, path, text):
        """Write a file of the overlay."""
        file = self.root / "vllm_overlay" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def complete(self):
        """Add what verify asks for: licence lines and a split into pull requests."""
        for path in ("vllm/fast/__init__.py", BACKEND, SHADOWED):
            file = self.root / "vllm_overlay" / path
            file.write_text(HEAD + file.read_text())
        (self.root / "patches/pull_requests.toml").write_text(SPLIT)

    def release(self, version="1.2.3", shadow=None):
        """Pack `stock` as a source release, `sdist`, and pin it.

        `shadow` is the sha256 that [shadow] gets, if not that of the stock file.
        """
        self.sdist = self.root.parent / f"vllm-{version}.tar.gz"
        info = f"Name: vllm\nVersion: {version}\n"
        with tarfile.open(self.sdist, "w:gz") as tar:
            for path, text in {**self.stock, "PKG-INFO": info}.items():
                member = tarfile.TarInfo(f"vllm-{version}/{path}")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        digest = hashlib.sha256(self.sdist.read_bytes()).hexdigest()
        if shadow is None:
            shadow = hashlib.sha256(self.stock[SHADOWED].encode()).hexdigest()
        text = PIN.format(sdist=digest, shadow=shadow).replace("1.2.3", version)
        text = text.replace('= "00"', f'= "{"0" * 64}"')
        (self.root / "UPSTREAM.toml").write_text(text)

    def load(self):
        """Load the patch set."""
        return load_patch_set(self.root)

    def tree(self, where, kind="sdist"):
        """Write a stock tree of a kind and return its folder."""
        for path, text in self.stock.items():
            if kind == "installed" and not path.startswith("vllm/"):
                continue
            (where / path).parent.mkdir(parents=True, exist_ok=True)
            (where / path).write_text(text)
        if kind == "sdist":
            (where / "PKG-INFO").write_text("Name: vllm\nVersion: 1.2.3\n")
        elif kind == "installed":
            info = where / "vllm-1.2.3.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Name: vllm\nVersion: 1.2.3\n")
        else:
            git(where, "init", "-q")
            git(where, "add", "-A")
            git(where, "commit", "-qm", "release")
            git(where, "tag", "v1.2.3")
        return where


def git(where, *args):
    """Run git with a fixed identity."""
    who = ["-c", "user.name=dev", "-c", "user.email=dev@example.com"]
    subprocess.run(["git", *who, *args], cwd=where, check=True, capture_output=True)


def replace(text, *pairs):
    """Replace several strings, each exactly once."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def snapshot(root):
    """Return every path below a folder with bytes and mode (git's own data aside)."""
    return {
        p.relative_to(root).as_posix(): (
            p.read_bytes() if p.is_file() else None, p.stat().st_mode
        )
        for p in sorted(root.rglob("*"))
        if ".git" not in p.relative_to(root).parts
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_import_probe(monkeypatch):
    """Tiny trees hold nothing to import; test_probe.py does it where it matters."""
    monkeypatch.setattr(probe, "importable", lambda root: False)


@pytest.fixture
def tiny(tmp_path):
    """Return a project whose patches touch a registry, a layer (twice) and a test."""
    root = tmp_path / "project"
    (root / "patches").mkdir(parents=True)
    (root / "patches" / "series").write_text("# order\n")
    made = Tiny(root)
    shadow = hashlib.sha256(STOCK[SHADOWED].encode()).hexdigest()
    (root / "UPSTREAM.toml").write_text(PIN.format(sdist="00", shadow=shadow))
    reg = replace(
        STOCK[REGISTRY], ("B4 =", 'FAST = "vllm.fast.backend.Fast"\n    B4 =')
    )
    layer1 = replace(STOCK[LAYER], ("line 5\n", "line five\n"), ("line 30\n", ""))
    layer2 = replace(layer1, ("line 20\n", "line 20\nhook()\n"))
    test = STOCK[TEST] + "\n\ndef test_hook():\n    assert True\n"
    made.write_patch("registry-add.patch", {REGISTRY: (STOCK[REGISTRY], reg)})
    made.write_patch("layer-gate.patch", {LAYER: (STOCK[LAYER], layer1)})
    made.write_patch(
        "layer-hook.patch", {LAYER: (layer1, layer2), TEST: (STOCK[TEST], test)}
    )
    made.overlay("vllm/fast/__init__.py", "")
    made.overlay(BACKEND, "class Fast:\n    pass\n")
    made.overlay(SHADOWED, "SPEED = 2\n")
    made.patched_layer = layer2
    return made
