# SPDX-License-Identifier: Apache-2.0
"""What drift says of another version, on tiny trees edited on purpose."""

import pytest
from conftest import BACKEND, LAYER, REGISTRY, SHADOWED
from kvpatch import drift
from kvpatch.errors import PatchSetError

HELPER = "vllm/helper.py"
HELPER_TEXT = '''\
"""Names that the overlay uses."""


def scale(x: float, by: int = 2) -> float:
    return x * by


class Root:
    def step(self):
        return 0


class Pool:
    def take(self, n: int) -> int:
        return n


def pool() -> Pool:
    return Pool()


class Base(Root):
    size: int = 3

    def __init__(self, a):
        self.a = a

    def run(self, x):
        return x

    def other(self, x):
        return x
'''
OVERLAY = """\
from vllm.helper import Base, pool
from vllm.names import scale


class Fast(Base):
    def run(self, x):
        return scale(self.step() + pool().take(x), by=self.size)
"""


@pytest.fixture
def project(tiny, tmp_path):
    tiny.stock[HELPER] = HELPER_TEXT
    tiny.stock["vllm/names.py"] = "from .helper import *\n"
    tiny.overlay(BACKEND, OVERLAY)
    tiny.release()
    tiny.other = tiny.tree(tmp_path / "other")
    return tiny


def run(tiny, capsys):
    words = ["--project", str(tiny.root), "--sdist", str(tiny.sdist)]
    code = drift.main([*words, "--to", str(tiny.other)])
    return code, capsys.readouterr().out


def edit(tiny, path, old, new):
    file = tiny.other / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def lines(said, word):
    return [li.strip() for li in said.split("\n") if li.startswith(f"  {word} ")]


def test_the_same_release(project, capsys):
    code, said = run(project, capsys)
    assert code == 0 and "applies as it is" in said
    assert len(lines(said, "clean")) == 4
    assert "3 imports from vllm compared" in said


def test_an_offset_names_the_hunk_and_both_lines(project, capsys):
    edit(project, LAYER, "line 1\n", "line 1\nnew\nnew\n")
    code, said = run(project, capsys)
    assert code == 1 and "needs review" in said
    assert len(lines(said, "offset")) == 2
    assert "hunk 1: line 3 -> 5; hunk 2: line 28 -> 30" in said


def test_a_conflict_names_the_hunk(project, capsys):
    edit(project, LAYER, "line 31\n", "line thirty-one\n")
    code, said = run(project, capsys)
    assert code == 1 and "needs work by hand" in said
    assert lines(said, "CONFLICT")[0].endswith("layer-gate.patch: vllm/layer.py")
    assert "hunk 2 (line 28): its lines stand nowhere" in said
    assert "wanted: line 32: 'line 31\\n'" in said
    assert "found:  line 32: 'line thirty-one\\n'" in said
    assert lines(said, "offset") == []
    assert "judged without layer-gate.patch" in said


def test_already_upstream(project, capsys):
    line = '    FAST = "vllm.fast.backend.Fast"\n    B4 ='
    edit(project, REGISTRY, "    B4 =", line)
    code, said = run(project, capsys)
    assert code == 1 and "needs work by hand" in said
    assert "drop the patch" in said
    assert lines(said, "already upstream")[0].endswith(
        f"registry-add.patch: {REGISTRY}"
    )


def test_a_file_that_is_gone(project, capsys):
    (project.other / REGISTRY).unlink()
    _, said = run(project, capsys)
    assert REGISTRY in lines(said, "FILE GONE")[0]


def test_shadowed_and_new_files(project, capsys):
    edit(project, SHADOWED, "SPEED = 1", "SPEED = 9")
    (project.other / BACKEND).parent.mkdir()
    (project.other / BACKEND).write_text("mine\n")
    code, said = run(project, capsys)
    assert code == 1
    assert SHADOWED in lines(said, "MOVED")[0] and BACKEND in lines(said, "new file")[0]


@pytest.mark.parametrize(
    "old, new, word, says",
    [
        ("by: int = 2", "by: int = 3", "CHANGED", "scale"),
        ("def scale", "def scaled", "GONE", "vllm.names.scale"),
        ("def run(self, x)", "def run(self, x, y)", "CHANGED", "Base.run"),
        ("def run(self, x)", "def go(self, x)", "GONE", "Base.run"),
        ("self, a)", "self, a, b)", "CHANGED", "Base.__init__"),
        ("class Base(Root)", "class Base(dict)", "CHANGED", "Base"),
        ("def step(self)", "def step(self, n)", "CHANGED", "Root.step"),
        ("def take(self, n: int)", "def take(self)", "CHANGED", "Pool.take"),
        ("def take", "def took", "GONE", "Pool.take"),
        ("size: int = 3", "size: str = 3", "CHANGED", "Base.size"),
    ],
)
def test_names(project, capsys, old, new, word, says):
    edit(project, HELPER, old, new)
    code, said = run(project, capsys)
    assert code == 1 and says in lines(said, word)[0], said
    assert BACKEND in said


def test_a_method_that_nobody_uses_may_change(project, capsys):
    edit(project, HELPER, "def other(self, x)", "def other(self)")
    assert run(project, capsys)[0] == 0


def test_a_member_is_reported_once_with_the_files_that_use_it(project, capsys):
    """Two files import what leads to Root; one of them calls its step."""
    other = "vllm/fast/other.py"
    text = "from vllm.helper import Base, Root\n\nx = [Base, Root]\n"
    project.overlay(other, text)
    edit(project, HELPER, "def step(self)", "def walk(self)")
    _, said = run(project, capsys)
    assert said.count("Root.step") == 1
    assert f"used by {BACKEND}\n" in said and other not in said
    # Without an import of the class, a file that names the member is still told of.
    project.overlay(BACKEND, "def fast(x):\n    return x.step()\n")
    _, said = run(project, capsys)
    assert said.count("Root.step") == 1
    assert f"named, not imported, by {BACKEND}\n" in said


def test_not_a_tree(project, capsys, tmp_path):
    project.other = tmp_path / "nothing"
    with pytest.raises(PatchSetError, match="names no tree"):
        run(project, capsys)
