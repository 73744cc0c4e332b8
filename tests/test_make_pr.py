# SPDX-License-Identifier: Apache-2.0
"""The upstream branch and its descriptions, on a tiny project."""

import hashlib
import io
import subprocess
import tarfile

import pytest
from conftest import BACKEND, LAYER, PIN, REGISTRY, SHADOWED
from kvpatch import make_pr
from kvpatch.errors import PatchSetError

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
issues = ["https://example.com/1"]
searches = ["some words"]
overview = "What {name} does."
claims = ["It is \\\\1 better."]
details = "How."
"""


@pytest.fixture
def project(tiny, tmp_path):
    tiny.stock[".github/PULL_REQUEST_TEMPLATE.md"] = TEMPLATE
    sdist = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(sdist, "w:gz") as tar:
        for path, text in tiny.stock.items():
            info = tarfile.TarInfo(f"vllm-1.2.3/{path}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    shadow = hashlib.sha256(tiny.stock[SHADOWED].encode()).hexdigest()
    (tiny.root / "UPSTREAM.toml").write_text(PIN.format(sdist=digest, shadow=shadow))
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
    assert "## Overview\n\nWhat layer does.\n\nhttps://example.com/1" in text
    assert "- It is \\1 better." in text
    assert "pytest tests/test_layer.py" in text
    assert '--search "some words"' in text
    assert "- [ ] AI assistance was used" in text
    assert text.count(make_pr.PLACE) >= 6 and text.count("<!--") == 1


def test_measurements_are_in_the_description(project):
    folder = project.root / "docs/measurements"
    folder.mkdir(parents=True)
    (folder / "2026-01-01-h200.md").write_text("12 us\n")
    run(project)
    text = (project.out / "2-fast.md").read_text()
    assert "2026-01-01-h200" in text and "12 us" in text


def test_a_description_shows_the_results_that_it_names(project):
    folder = project.root / "docs/measurements"
    folder.mkdir(parents=True)
    (folder / "speed.md").write_text(
        "# Speed\n\n## Fast\n\n12 us\n\n## Slow\n\n99 us\n"
    )
    (folder / "size.md").write_text("7 MiB\n")
    toml = project.root / "patches/pull_requests.toml"
    named = toml.read_text().replace(
        'details = "How."', 'details = "How."\nresults = ["speed.md#Fast"]', 1
    )
    toml.write_text(named)
    run(project)
    first, second = (
        (project.out / name).read_text() for name in ("1-layer.md", "2-fast.md")
    )
    assert "<summary>Fast</summary>\n\n12 us" in first
    assert "99 us" not in first and "7 MiB" not in first
    assert "99 us" in second and "7 MiB" in second


@pytest.mark.parametrize("name", ["no.md", "speed.md#No"])
def test_results_that_do_not_exist(project, name):
    folder = project.root / "docs/measurements"
    folder.mkdir(parents=True)
    (folder / "speed.md").write_text("## Fast\n\n12 us\n")
    toml = project.root / "patches/pull_requests.toml"
    toml.write_text(toml.read_text() + f'results = ["{name}"]\n')
    with pytest.raises(PatchSetError, match="a page of results"):
        run(project)
    assert not project.out.exists()


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
