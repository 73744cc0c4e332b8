# SPDX-License-Identifier: Apache-2.0
"""Parsing and exact application of one patch."""

import pytest
from conftest import HEADER, diff_text
from kvpatch.errors import PatchSetError
from kvpatch.mailpatch import (
    HunkError,
    apply_file,
    blob_id,
    load_series,
    parse_patch,
)

OLD = "".join(f"{i}\n" for i in range(30))


def parsed(old, new, context=3):
    text = HEADER.format(subject="a: b") + "\n" + diff_text("f.py", old, new, context)
    return parse_patch("p.patch", text.encode())


@pytest.mark.parametrize(
    "new",
    [
        OLD.replace("\n4\n", "\nfour\n"),
        OLD.replace("\n4\n", "\n").replace("\n25\n", "\n25\nx\ny\n"),
        "first\n" + OLD,
        OLD + "last",
        OLD.rstrip("\n"),
        OLD[2:],
    ],
    ids=["change", "two-hunks", "at-start", "no-newline", "drop-newline", "drop-first"],
)
@pytest.mark.parametrize("context", [3, 0])
def test_applies_and_reverses_to_the_byte(new, context):
    part = parsed(OLD, new, context).files[0]
    assert apply_file(OLD.encode(), part, "p") == new.encode()
    assert apply_file(new.encode(), part, "p", reverse=True) == OLD.encode()


def test_blob_id_is_gits():
    assert blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_an_offset_is_refused_and_its_place_named():
    part = parsed(OLD, OLD.replace("\n14\n", "\nx\n")).files[0]
    with pytest.raises(HunkError) as caught:
        apply_file(b"new\n" + OLD.encode(), part, "p.patch")
    assert (caught.value.number, caught.value.found_at) == (1, 13)
    assert "p.patch" in str(caught.value) and "f.py, hunk 1" in str(caught.value)


def test_a_changed_context_line_is_refused_and_the_second_hunk_named():
    new = OLD.replace("\n4\n", "\nx\n").replace("\n25\n", "\ny\n")
    part = parsed(OLD, new).files[0]
    with pytest.raises(HunkError) as caught:
        apply_file(OLD.replace("\n26\n", "\n26 \n").encode(), part, "p.patch")
    text = str(caught.value)
    assert caught.value.number == 2 and caught.value.found_at is None
    assert "'26 \\n'" in text and "'26\\n'" in text


def test_header_fields():
    patch = parsed(OLD, OLD + "x\n")
    assert patch.subject == "a: b"
    assert patch.body.startswith("Why this can't live in the overlay: ")
    assert list(patch.trailers) == [
        "Kind",
        "Forwarded",
        "Bug",
        "Remove-When",
        "Test",
    ]
    assert patch.changed_lines == 1


GOOD = HEADER.format(subject="a: b") + "\n" + diff_text("f.py", OLD, OLD + "x\n")


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda t: t.replace("index ", "new file mode 100644\nindex "), "new file"),
        (lambda t: t.replace("index ", "rename from x\nindex "), "rename"),
        (lambda t: t.replace("b/f.py\n", "b/g.py\n", 1), "same path"),
        (lambda t: t.replace("f.py", "../f.py"), "inside the tree"),
        (lambda t: t.replace("Subject:", "Topic:"), "Subject"),
        (lambda t: t.replace(",3 +", ",4 +"), "old and"),
        (lambda t: "\n".join(x for x in t.split("\n") if "index" not in x), "index"),
        (lambda t: t + t[t.index("diff --git") :], "twice"),
        (lambda t: t[: t.index("diff --git")], "diff --git"),
        (
            lambda t: t + "\n" + t[t.index("diff --git") :].replace("f.py", "g.py"),
            "`diff --git` or the end",
        ),
    ],
)
def test_malformed_patches_are_refused(edit, says):
    assert edit(GOOD) != GOOD
    with pytest.raises(PatchSetError, match="p.patch") as caught:
        parse_patch("p.patch", edit(GOOD).encode())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "series, says",
    [("a.patch\nb.patch\n", "b.patch"), ("", "a.patch"), ("a.patch\na.patch", "twice")],
)
def test_series_and_files_must_agree(tmp_path, series, says):
    (tmp_path / "a.patch").write_text(GOOD)
    (tmp_path / "series").write_text("# group\n" + series)
    with pytest.raises(PatchSetError, match=says):
        load_series(tmp_path)
    (tmp_path / "series").write_text("# group\na.patch  # why\n")
    assert [p.name for p in load_series(tmp_path)] == ["a.patch"]
