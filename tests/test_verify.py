# SPDX-License-Identifier: Apache-2.0
"""Every promise that verify checks, broken once; and the comparison with stock."""

import dataclasses
import hashlib
import zipfile

import pytest
from conftest import BACKEND, HEAD, SHADOWED
from kvpatch import baseline, cli_apply, export, fetch, load, pin, verify
from kvpatch.errors import PatchSetError


@pytest.fixture
def project(tiny):
    """A project in which every promise holds, and its stock tree."""
    tiny.complete()
    tiny.release()
    export.main(["--rewrite", "--project", str(tiny.root), "--sdist", str(tiny.sdist)])
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
SPLITS, NO_HASH = "patches/pull_requests.toml", "0" * 64


@pytest.mark.parametrize(
    "path, old, new, row, says",
    [
        (GATE, "Kind: hook", "Kind: nice", "headers", "Kind: nice"),
        (GATE, "Forwarded: no", "Forwarded: yes", "headers", "Forwarded: 'yes'"),
        (GATE, "Kind: hook", "Kind: bugfix", "headers", "-"),
        (GATE, "Remove-When: upstream has it\n", "", "headers", "no Remove-When"),
        (GATE, "When: upstream has it", "When: TODO", "headers", "When: TODO"),
        (GATE, "Why this can't", "TODO: why this can't", "headers", "TODO: why"),
        (SPLITS, '"layer-*"', '"lay-*"', "split", "patches/layer-gate.patch"),
        (SPLITS, "vllm/fast/*", "vllm/slow/*", "split", f"vllm_overlay/{BACKEND}"),
        ("UPSTREAM.toml", NO_HASH, NO_HASH[2:], "pin's hashes", "(62 characters)"),
        ("UPSTREAM.toml", NO_HASH, "G" + NO_HASH[1:], "pin's hashes", "wheel_x86"),
        (GATE, "area: edit", "edit", "headers", "isn't `<area>: <what>`"),
        (GATE, "tests/test_layer.py", "tests/none.py", "patched tree", "none.py"),
        (GATE, "From: A Developer", "To: A Developer", "headers", "git am"),
        (GATE, " line 3\n", " line three\n", "series", "layer-gate.patch"),
        (GATE, "\ndiff --git", "\n\ndiff --git", "re-export", "layer-gate.patch"),
        ("vllm_overlay/" + BACKEND, HEAD, "", "licence", BACKEND),
        ("UPSTREAM.toml", '"vllm/slow.py" = "', '# "', "[shadow]", "doesn't list"),
        (
            "UPSTREAM.toml",
            '"vllm/slow.py" = "',
            f'"vllm/slow.py" = "{"0" * 64}"#',
            "[shad",
            "0",
        ),
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


def misses(said):
    """The rows that miss, by name."""
    rows = [line for line in said.split("\n") if line.startswith("MISS")]
    return [row[4:].partition(":")[0].strip() for row in rows]


def test_what_export_fills_in_is_refused_until_a_person_did(project):
    patch = project.load().patches[1]
    new = export.NEW_HEADER.format(subject="area: edit")
    for done, places in (("no trailer", 4), ("Kind", 3), ("Test", 2)):
        new = new.replace(f"{done}: TODO", f"{done}: hook")
        fault = verify.header_faults(dataclasses.replace(patch, header=new))[-1]
        assert "unfilled: TODO: why this can't" in fault
        assert fault.count("TODO") == places


def test_a_file_that_upstream_has_too_comes_with_the_line_to_paste(project, capsys):
    """One row says it, and the rows that would only follow from it are left out."""
    change(project, SPLITS, "vllm/slow.py", 'vllm/__init__.py", "vllm/slow.py')
    copy = project.root / "vllm_overlay/vllm/__init__.py"
    copy.write_text(project.stock["vllm/__init__.py"])
    assert run(project) == 1
    said = capsys.readouterr().out
    shadow = "overlay and [shadow]"
    assert misses(said) == ["overlay licence lines", shadow]
    assert "half patched" not in said and "a clean tree" not in said
    assert said.count(f"until this row holds: {shadow}") == 3
    digest = hashlib.sha256(b"").hexdigest()
    (line,) = [li.strip() for li in said.split("\n") if f'= "{digest}"' in li]
    with open(project.root / "UPSTREAM.toml", "a") as file:
        file.write(line + "\n")
    run(project)
    said = capsys.readouterr().out
    assert misses(said) == ["overlay licence lines", shadow]
    assert "upstream's, unchanged" in said and "doesn't list" not in said
    copy.write_text(HEAD)
    assert run(project) == 0
    assert "until" not in capsys.readouterr().out


def test_a_wrong_sha256_of_a_replaced_file_comes_with_the_right_line(project, capsys):
    digest = hashlib.sha256(project.stock[SHADOWED].encode()).hexdigest()
    change(project, "UPSTREAM.toml", digest, NO_HASH)
    assert run(project) == 1
    said = capsys.readouterr().out
    assert misses(said) == ["overlay and [shadow]"] and "git stash" not in said
    assert f'"{SHADOWED}" = "{digest}"' in said


def test_a_series_that_doesnt_apply_is_told_once(project, capsys):
    change(project, GATE, " line 3\n", " line three\n")
    assert run(project) == 1
    said = capsys.readouterr().out
    assert misses(said) == ["series on the source release"]
    assert said.count("until this row holds: series on the source release") == 5


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
    change(project, "UPSTREAM.toml", f'sha256 = "{"0" * 64}"', f'sha256 = "{digest}"')
    words = ["--project", str(project.root), "--sdist", str(project.sdist)]
    assert verify.main([*words, "--wheel", str(wheel)]) == 0
    said = capsys.readouterr().out
    assert "series on the wheel: 2 files" in said
    assert "apply and reverse, wheel: " in said


@pytest.mark.parametrize("option", ["--wheel", "--sdist"])
def test_a_file_that_isnt_there_is_named_with_its_option(project, option, tmp_path):
    words = ["--project", str(project.root), "--sdist", str(project.sdist)]
    with pytest.raises(PatchSetError) as caught:
        verify.main([*words, option, str(tmp_path / "none")])
    said, other = str(caught.value), {"--wheel", "--sdist"} - {option}
    assert f"given with {option} " in said and other.pop() not in said
    assert {"--wheel": ".whl", "--sdist": ".tar.gz"}[option] in said


def test_a_hash_that_cannot_be_one_is_named_before_anything_is_fetched(
    tiny, monkeypatch
):
    """The tiny project's own hashes are two digits long."""
    monkeypatch.setattr(load, "load_patch_set", lambda root: tiny.load())
    monkeypatch.setattr(pin, "load_pin", lambda root: tiny.load().pin)
    monkeypatch.setattr(fetch, "fetch_release", None)
    monkeypatch.setattr(cli_apply, "fetch_release", None)
    for main, *words in (
        (load.main,),
        (fetch.main, "--wheel"),
        (cli_apply.main, "--project", str(tiny.root)),
    ):
        with pytest.raises(PatchSetError) as caught:
            main(words)
        assert "wheel_x86_64_sha256 = '00' (2 characters)" in str(caught.value)
        assert "64 hex digits" in caught.value.allowed and caught.value.todo
