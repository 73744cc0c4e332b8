# SPDX-License-Identifier: Apache-2.0
"""The upstream branch and its descriptions, on a tiny project."""

import subprocess
from pathlib import Path

import pytest
from conftest import BACKEND, LAYER, REGISTRY, SHADOWED
from kvpatch import make_pr
from kvpatch.errors import PatchSetError
from kvpatch.patchset import load_patch_set
from kvpatch.pr_checks import borrowed, mentions, number_faults

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted((ROOT / "docs" / "pull_requests").glob("*.md"))

TEMPLATE = """\
<!-- markdownlint-disable -->

## Overview

<!-- Summarize. -->

## Claims

<!-- State
them. -->

## Validation

<!-- Show. -->

## Details

<!-- Explain. -->

- [ ] AI assistance was used during the creation of this PR.
"""
ENTRY = """
[[pr]]
name = "{name}"
title = "[Area] {name}"
patches = [{patches}]
overlay = [{overlay}]
issues = ["Fixes https://example.com/1"]
searches = ["some words"]
overview = "What {name} does."
claims = ["It is \\\\1 better."]
details = "How."
"""


@pytest.fixture
def project(tiny, tmp_path):
    tiny.stock[".github/PULL_REQUEST_TEMPLATE.md"] = TEMPLATE
    tiny.release()
    tiny.clone = tiny.tree(tmp_path / "clone", "clone")
    tiny.out = tmp_path / "out"
    split(tiny, ("layer", '"layer-*"', '"vllm/slow.py"'), ("fast", '"*"', '"*"'))
    return tiny


def split(tiny, *entries):
    text = "".join(
        ENTRY.format(name=name, patches=patches, overlay=overlay)
        for name, patches, overlay in entries
    )
    (tiny.root / "patches/pull_requests.toml").write_text(text)


def run(tiny):
    words = [str(tiny.out), "--no-hooks", "--clone", str(tiny.clone)]
    return make_pr.main([*words, "--project", str(tiny.root)])


def git(tree, *args):
    ran = subprocess.run(["git", *args], cwd=tree, capture_output=True, text=True)
    return ran.stdout.strip().split("\n")


def test_one_commit_a_concern_on_the_tag(project):
    assert run(project) == 0
    tree = project.out / "vllm"
    assert git(tree, "log", "--format=%s") == ["[Area] fast", "[Area] layer", "release"]
    assert git(tree, "show", "--format=", "--name-only", "HEAD~1") == [
        "tests/test_layer.py",
        LAYER,
        SHADOWED,
    ]
    assert git(tree, "show", "--format=", "--name-only", "HEAD") == [
        "vllm/fast/__init__.py",
        BACKEND,
        REGISTRY,
    ]
    assert git(tree, "remote", "get-url", "--push", "origin") == [str(project.clone)]
    assert git(project.clone, "branch") == git(project.clone, "branch", "--list")
    assert not git(project.clone, "branch", "--list", make_pr.BRANCH)[0]
    assert (tree / LAYER).read_text() == project.patched_layer


def test_the_description_fills_the_template(project):
    run(project)
    text = (project.out / "1-layer.md").read_text()
    assert "## Overview\n\nWhat layer does.\n\nFixes https://example.com/1\n" in text
    assert "- It is \\1 better." in text
    assert "pytest tests/test_layer.py" in text
    assert '--search "some words"' in text
    assert "- [ ] AI assistance was used" in text
    assert text.count(make_pr.PLACE) >= 6 and text.count("<!--") == 1


PAGE = "| shape | us |\n|---|---|\n| 12x8 | 3.5 |\n| 12x1 | 2.5 |\n\nSpread: 4 %.\n"
TEXT = """\
<!-- source: speed.md -->
On an H200, spread 4 %:

| shape | us |
|---|---|
| 12x8 | 3.5 |

`pytest tests/test_layer.py`
"""


def results(project, text=TEXT, page=PAGE):
    """Give the first pull request a text of results, and its page."""
    for folder, name, what in (
        ("pull_requests", "layer.md", text),
        ("measurements", "speed.md", page),
    ):
        (project.root / "docs" / folder).mkdir(parents=True)
        (project.root / "docs" / folder / name).write_text(what)
    change(project, 'details = "How."', 'details = "How."\nresults = "layer.md"')


def change(project, old, new):
    toml = project.root / "patches/pull_requests.toml"
    assert old in toml.read_text()
    toml.write_text(toml.read_text().replace(old, new, 1))


def test_a_description_shows_its_results_without_their_sources(project):
    results(project)
    assert run(project) == 0
    first, second = (
        (project.out / name).read_text() for name in ("1-layer.md", "2-fast.md")
    )
    assert "Test results:\n\nOn an H200, spread 4 %:\n\n| shape | us |" in first
    assert "source:" not in first and "3.5" not in second
    assert "no measurements are recorded" in second


@pytest.mark.parametrize("lost", ["pull_requests/layer.md", "measurements/speed.md"])
def test_results_that_do_not_exist(project, lost):
    results(project)
    (project.root / "docs" / lost).unlink()
    with pytest.raises(PatchSetError, match="of results can't be read"):
        run(project)
    assert not project.out.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "See [the page](2026-01-01.md#fast).",
            "a relative link: ](2026-01-01.md#fast)",
        ),
        ("![times](times.png)", "a relative link"),
        ('<img src="times.png">', "a relative link"),
        ("Command: ci/gpu.sh --only bench", "a path of this repository: ci/gpu.sh"),
        (
            "Run `scripts/check.py` for it.",
            "a path of this repository: scripts/check.py",
        ),
        ("`patches/layer-gate.patch` is the remedy.", "a path of this repository"),
        ("See docs/measurements/speed.md.", "a page of this repository"),
        ("Passed with this patch\nset.", "words for this repository"),
        ("All of this repository's tests passed.", "words for this repository"),
        ("Measured at 1c5add5.", "a commit id of this repository: 1c5add5"),
        ("Measured at 1790318, alone.", "a commit id of this repository: 1790318"),
        ("`python engine_check.py` ran.", "a file that the branch doesn't have"),
        ("`pytest tests/test_no.py` ran.", "a file that the branch doesn't have"),
    ],
)
def test_a_text_with_what_upstream_cannot_see(project, line, said):
    results(project, TEXT + line)
    with pytest.raises(PatchSetError) as caught:
        run(project)
    assert f"docs/pull_requests/layer.md:9: {said}" in str(caught.value)
    assert "to do:" in str(caught.value)


@pytest.mark.parametrize("key", ["overview", "details"])
def test_the_splits_own_texts_are_read_too(project, key):
    old = {"overview": "What layer does.", "details": "How."}[key]
    change(project, old, f"{old} See ci/run.")
    with pytest.raises(PatchSetError, match=f"toml, layer, {key}:1: a path of this"):
        run(project)


def test_a_text_may_name_what_upstream_has(project):
    text = """
See [vLLM](https://github.com/vllm-project/vllm/commit/458e74eb907f96069e6d8a4f3c9f4570)
and [below](#below); `python vllm/registry.py`, tests/test_layer.py::test_hook.
"""
    results(project, TEXT + text)
    assert run(project) == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("12x8 | 3.5", "12x8 | 3.6", "6: no line of its source has | 12x8 | 3.6 |"),
        ("12x8 | 3.5", "12x1 | 3.5", "6: no line of its source has | 12x1 | 3.5 |"),
        ("spread 4 %", "spread 5 %", "2: not on its source: 5"),
        ("<!-- source: speed.md -->", "", "2: numbers without `<!-- source: PAGE -->`"),
    ],
)
def test_a_number_that_is_not_on_its_page(project, old, new, said):
    results(project, TEXT.replace(old, new))
    with pytest.raises(PatchSetError, match="numbers of a text") as caught:
        run(project)
    assert f"docs/pull_requests/layer.md:{said}" in str(caught.value)


def test_a_link_without_a_word(project):
    change(project, "Fixes https://example.com/1", "https://example.com/1")
    with pytest.raises(PatchSetError, match="without a word on what it is"):
        run(project)


@pytest.mark.parametrize(
    "line",
    ["# see scripts/promises.py", "# H200: docs/measurements", "# our patch set"],
)
def test_a_file_that_mentions_what_upstream_cannot_see(project, line):
    project.overlay(BACKEND, f"class Fast:\n    pass\n\n\n{line}\n")
    with pytest.raises(PatchSetError, match=f"{BACKEND}:5: ") as caught:
        run(project)
    assert "a file for upstream mentions" in str(caught.value)


def test_a_patch_that_mentions_what_upstream_cannot_see(project):
    old = project.patched_layer
    project.write_patch("layer-say.patch", {LAYER: (old, old + "# ci/gpu.sh\n")})
    with pytest.raises(PatchSetError, match=f"{LAYER}:41: a path of this repository"):
        run(project)


@pytest.mark.parametrize(
    "line",
    [
        "import vllm.fast.backend",
        "from vllm.fast.backend import Fast",
        "from vllm.fast import backend",
        "from .fast import backend",
        'NAME = "vllm.fast.backend.Fast"',
        "def f():\n    from vllm.fast import backend",
    ],
)
def test_a_commit_that_imports_a_later_ones_module(project, line):
    project.overlay(SHADOWED, line + "\n")
    with pytest.raises(PatchSetError, match="only a later commit brings") as caught:
        run(project)
    assert f"{SHADOWED} imports {BACKEND}" in str(caught.value)
    split(project, ("fast", '"*"', '"vllm/fast/*"'), ("layer", "", '"*"'))
    assert run(project) == 0
    text = (project.out / "2-layer.md").read_text()
    assert "Depends on `[Area] fast`: review this one's own commit only." in text
    assert "Depends on" not in (project.out / "1-fast.md").read_text()


def test_a_script_that_imports_a_later_ones_neighbour(project):
    project.overlay("bench/run.py", "import cases\n")
    project.overlay("bench/cases.py", "")
    split(project, ("run", '"*"', '"bench/run.py"'), ("all", "", '"*"'))
    with pytest.raises(PatchSetError, match="bench/run.py imports bench/cases.py"):
        run(project)


def test_a_file_that_belongs_to_no_concern(project):
    split(project, ("layer", '"layer-*"', '"vllm/slow.py"'))
    with pytest.raises(PatchSetError) as caught:
        run(project)
    assert "registry-add.patch" in str(caught.value) and BACKEND in str(caught.value)
    assert not project.out.exists()


def test_a_patch_that_leans_on_a_later_concern(project):
    edit = (project.patched_layer, project.patched_layer.replace("hook()", "hook(1)"))
    project.write_patch("hook-more.patch", {LAYER: edit})
    split(project, ("more", '"hook-*"', ""), ("all", '"*"', '"*"'))
    with pytest.raises(PatchSetError, match="hook-more.patch doesn't apply"):
        run(project)


def test_a_template_that_changed(project):
    template = project.clone / ".github/PULL_REQUEST_TEMPLATE.md"
    template.write_text(TEMPLATE.replace("## Claims", "## Promises"))
    for words in (["add", "-A"], ["commit", "-qm", "x", "--amend"]):
        who = ["-c", "user.name=d", "-c", "user.email=d@example.com"]
        subprocess.run(["git", *who, *words], cwd=project.clone, check=True)
    subprocess.run(["git", "tag", "-f", "v1.2.3"], cwd=project.clone, check=True)
    with pytest.raises(PatchSetError, match="template changed"):
        run(project)


@pytest.mark.parametrize("path", TEXTS, ids=[p.stem for p in TEXTS])
def test_our_texts_numbers_are_those_of_the_pages(path):
    text, pages = path.read_text(), ROOT / "docs" / "measurements"
    assert number_faults(text, pages) == []
    assert 20 <= text.count("\n") <= 60
    for row in [line for line in text.split("\n") if line.startswith("| ")]:
        cell = next((c for c in row.split("|")[2:] if "." in c), None)
        if cell is not None:
            wrong = text.replace(cell, cell.replace(".", "77."))
            assert number_faults(wrong, pages), row


def test_every_pull_request_of_ours_has_a_text():
    concerns = make_pr.load_concerns(load_patch_set(ROOT))
    assert sorted(c.results for c in concerns) == [p.name for p in TEXTS]


def test_our_bugfix_stands_alone_and_no_file_mentions_this_repository():
    overlay = ROOT / "vllm_overlay"
    concerns = make_pr.load_concerns(load_patch_set(ROOT))
    owners = {p: c.name for c in concerns[1:] for p in c.own_files}
    assert concerns[0].name == "kimi-k3-fp8-cache-hopper"
    assert borrowed(overlay, concerns[0].own_files, owners) == {}
    for path in [p for c in concerns for p in c.own_files]:
        text = (overlay / path).read_text()
        assert list(mentions(text, overlay)) == [], path
