# SPDX-License-Identifier: Apache-2.0
"""Every promise that verify checks, broken once; and the comparison with stock."""

import dataclasses
import hashlib
import io
import tarfile
import zipfile

import pytest
from conftest import BACKEND, PIN, SHADOWED
from kvpatch import baseline, export, verify

HEAD = "\n".join(verify.SPDX) + "\n"


@pytest.fixture
def project(tiny, tmp_path):
    """A project in which every promise holds, and its stock tree."""
    for path in ("vllm/fast/__init__.py", BACKEND, SHADOWED):
        file = tiny.root / "vllm_overlay" / path
        file.write_text(HEAD + file.read_text())
    sdist = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(sdist, "w:gz") as tar:
        files = {**tiny.stock, "PKG-INFO": "Name: vllm\nVersion: 1.2.3\n"}
        for path, text in files.items():
            info = tarfile.TarInfo(f"vllm-1.2.3/{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    shadow = hashlib.sha256(tiny.stock[SHADOWED].encode()).hexdigest()
    (tiny.root / "UPSTREAM.toml").write_text(PIN.format(sdist=digest, shadow=shadow))
    tiny.sdist = sdist
    words = ["--project", str(tiny.root), "--sdist", str(sdist)]
    export.main(["--rewrite", *words])
    return tiny


def run(tiny):
    return verify.main(["--project", str(tiny.root), "--sdist", str(tiny.sdist)])


def test_all_hold(project, capsys):
    assert run(project) == 0
    said = capsys.readouterr().out
    assert "all hold" in said and "MISS" not in said
    assert "3 mails on base commit" in said


def change(tiny, path, old, new):
    file = tiny.root / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


GATE = "patches/layer-gate.patch"


@pytest.mark.parametrize(
    "path, old, new, row, says",
    [
        (GATE, "Kind: hook", "Kind: nice", "headers", "Kind: nice"),
        (GATE, "Forwarded: no", "Forwarded: yes", "headers", "Forwarded: 'yes'"),
        (GATE, "Kind: hook", "Kind: bugfix", "headers", "-"),
        (GATE, "Remove-When: upstream has it\n", "", "headers", "no Remove-When"),
        (GATE, "area: edit", "edit", "headers", "isn't `<area>: <what>`"),
        (GATE, "tests/test_layer.py", "tests/none.py", "patched tree", "none.py"),
        (GATE, "From: A Developer", "To: A Developer", "headers", "git am"),
        (GATE, " line 3\n", " line three\n", "series", "layer-gate.patch"),
        (GATE, "\ndiff --git", "\n\ndiff --git", "re-export", "layer-gate.patch"),
        ("vllm_overlay/" + BACKEND, HEAD, "", "licence", BACKEND),
        ("UPSTREAM.toml", '"vllm/slow.py" = "', '# "', "[shadow]", "doesn't list"),
        ("UPSTREAM.toml", '"vllm/slow.py" = "', '"vllm/slow.py" = "0', "[shad", "0"),
    ],
)
def test_a_broken_promise_is_a_miss(project, capsys, path, old, new, row, says):
    change(project, path, old, new)
    if new == "Kind: bugfix":
        change(project, path, "Bug: none\n", "")
        says = "bugfix without Bug"
    capsys.readouterr()
    assert run(project) == 1
    said = capsys.readouterr().out
    misses = [part for part in said.split("\n") if part.startswith("MISS")]
    assert any(row in line for line in misses), said
    assert says in said


def test_a_patch_that_grew_too_long(project):
    patch = project.load().patches[1]
    assert verify.header_faults(patch) == []
    long = dataclasses.replace(patch, files=patch.files * 61)
    assert "changed lines (max 120)" in verify.header_faults(long)[-1]


def outcomes(**names):
    return {f"t.py::{name}": outcome for name, outcome in names.items()}


def test_any_difference_from_stock_counts():
    stock = outcomes(a="passed", b="failed", c="skipped", d="passed")
    same = dict(stock)
    assert baseline.compare(stock, same, {}) == []
    worse = {**stock, **outcomes(a="failed")}
    assert baseline.compare(stock, worse, {}) == ["passed -> failed: t.py::a"]
    better = {**stock, **outcomes(b="passed")}
    assert baseline.compare(stock, better, {}) == ["failed -> passed: t.py::b"]
    gone = outcomes(a="passed", b="failed", c="skipped")
    assert baseline.compare(stock, gone, {}) == ["passed -> gone: t.py::d"]


def test_new_tests_may_pass_or_skip_but_not_fail():
    stock = outcomes(a="passed")
    new = outcomes(a="passed", x="passed", y="skipped", z="failed")
    assert baseline.compare(stock, new, {}) == ["new -> failed: t.py::z"]


def test_a_declared_difference_must_happen():
    stock, allowed = outcomes(a="failed"), outcomes(a="passed")
    assert baseline.compare(stock, outcomes(a="passed"), allowed) == []
    assert len(baseline.compare(stock, stock, allowed)) == 1


def test_outcomes_file(tmp_path):
    file = tmp_path / "o.txt"
    file.write_text("# note\npassed t.py::a[x y]\nerror t.py\n")
    assert baseline.read_outcomes(file) == {"t.py::a[x y]": "passed", "t.py": "error"}


def test_the_wheels_files(project, tmp_path, capsys):
    """A wheel holds no tests and no docs: their patches are passed over there."""
    wheel = tmp_path / "vllm-1.2.3-py3-none-any.whl"
    files = {p: t for p, t in project.stock.items() if p.startswith("vllm/")}
    files["vllm-1.2.3.dist-info/METADATA"] = "Name: vllm\nVersion: 1.2.3\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    change(
        project, "UPSTREAM.toml", 'x86_64_sha256 = "00"', f'x86_64_sha256 = "{digest}"'
    )
    words = ["--project", str(project.root), "--sdist", str(project.sdist)]
    assert verify.main([*words, "--wheel", str(wheel)]) == 0
    said = capsys.readouterr().out
    assert "series on the wheel: 2 files" in said
    assert "apply and reverse, wheel: " in said
