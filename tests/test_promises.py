# SPDX-License-Identifier: Apache-2.0
"""The list of promises, its tests and docs/promises.md agree; results are read."""

import json
import sys

import promises
import pytest
from kvpromises import report
from kvpromises.listing import Listing

FOLDER = promises.OVERLAY / "tests" / "v1" / "attention"


@pytest.fixture
def listing():
    path = promises.PROJECT / "ci" / "promises.toml"
    return Listing(path, FOLDER, promises.PLAN_CHECKS)


def test_every_test_exists_and_every_gpu_test_has_a_promise(listing):
    assert listing.problems() == []


def test_the_page_shows_the_list(listing):
    page = (promises.PROJECT / "docs" / "promises.md").read_text()
    assert report.page_problems(page, listing) == []
    changed = page.replace("`kernel::test_repeated_blocks`", "`kernel::gone`")
    assert len(report.page_problems(changed, listing)) == 1


def test_a_name_that_does_not_exist_is_a_problem(listing):
    listing.promises[0]["tests"][0] = "dcp::test_gone"
    problems = listing.problems()
    assert any("no such test: dcp::test_gone" in text for text in problems)
    assert any("no promise names dcp::" in text for text in problems)


def results(tmp_path):
    rows = [
        {"test": "gpu::test_scales_far_from_one", "outcome": "passed", "note": "0.01"},
        {"test": "kernel::test_scales", "outcome": "failed", "note": "wrong"},
    ]
    lines = "\n".join(json.dumps({**row, "seconds": 1.0}) for row in rows)
    (tmp_path / "engine.jsonl").write_text(lines)
    (tmp_path / "memcheck-0.log").write_text("========= ERROR SUMMARY: 0 errors\n")
    (tmp_path / "racecheck-0.log").write_text(
        "========= Error: Race reported between Write and Read\n"
        "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    )
    (tmp_path / "host-0.xml").write_text(
        "<testsuites><testsuite><testcase classname='t.test_kimi_k3_kv_balanced_plan' "
        "name='test_balance[a]'/><testcase classname='t.test_kimi_k3_kv_balanced_plan' "
        "name='test_balance[b]'><failure message='uneven'/></testcase></testsuite>"
        "</testsuites>"
    )
    ended = {"engine": (1, 5.0), "racecheck-0": (9, 1.0), "host-0": (1, 2.0)}
    ended |= {f"memcheck-{tile}": (0, 1.0) for tile in range(1)}
    return ended


def test_results_are_gathered(listing, tmp_path):
    ended = results(tmp_path)
    found = report.collect(listing, tmp_path, {"sanitizer": "no tool"}, ended)
    tests = found["tests"]
    assert tests["gpu::test_scales_far_from_one"]["outcome"] == "passed"
    assert tests["kernel::test_scales"]["note"] == "wrong"
    # A process that ended without this test's line.
    assert tests["gpu::test_one_plan_serves_24_layers"]["outcome"] == "failed"
    assert tests["plan::test_balance"] == {
        "outcome": "failed", "cases": 2, "skipped": 0, "note": "uneven",
    }  # fmt: skip
    assert tests["decode::test_target_draft_target"]["outcome"] == "failed"
    assert "2 reports" in tests["racecheck"]["note"]
    # Five tiles of memcheck never ran.
    assert tests["memcheck"]["outcome"] == "failed"
    assert tests["soak"] == {"outcome": "left out", "note": "not asked for"}
    assert tests["sanitizer-sees"] == {"outcome": "left out", "note": "no tool"}
    assert report.failures(found) > 5


def test_the_table_says_what_failed_and_what_was_left_out(listing, tmp_path):
    found = report.collect(listing, tmp_path, {}, {})
    promise = {"text": "x", "tests": ["kernel::a", "kernel::b", "kernel::c"]}
    tests = {
        "kernel::a": {"outcome": "passed", "note": "error 0.01"},
        "kernel::b": {"outcome": "left out", "note": "no GPU"},
    }
    text = report.result_of({**promise, "tests": promise["tests"][:2]}, tests)
    assert text == "passed; left out: `kernel::b`; error 0.01"
    tests["kernel::c"] = {"outcome": "failed", "note": "no"}
    assert report.result_of(promise, tests).startswith("**failed**: `kernel::c`")
    found |= {"facts": {"gpu": "NVIDIA H200"}, "seconds": 12.0}
    page = report.page(f"a\n{report.BEGIN}\nold\n{report.END}\nz\n", listing, found)
    assert page.startswith("a\n") and page.endswith("\nz\n") and "\nold\n" not in page
    assert "gpu NVIDIA H200. 0 tests passed, 0 failed" in page


def test_only_takes_names_of_processes(tmp_path, monkeypatch):
    command = ["promises.py", "--out", str(tmp_path), "--only", "kernel,foo"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"no process: foo; there are .*kernel-inputs"):
        promises.main()
