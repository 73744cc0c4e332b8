# SPDX-License-Identifier: Apache-2.0
"""Upstream's documentation generator, run on the assembled tree, gives our rows."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
from kvpatch.patchset import load_patch_set
from kvpatch.state import look
from kvpatch.target import open_tree

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "vllm"
# Backend | Dtypes | KV Dtypes | Block Sizes | Head Sizes | Sink | Non-Causal | Sparse
# | MM Prefix | DCP | Attention Types | Compute Cap.
GOLDEN = (
    "| `KIMI_K3_KV_BALANCED_MLA` | bf16 | `fp8`, `fp8_e4m3` | %64 | Any | ❌ | ✅ | ❌ "
    "| ❌ | ✅ | Decoder | 9.x |"
)


@pytest.fixture(scope="module")
def blocks():
    """Return the generated blocks; the part that writes pages is left out."""
    if not TREE.exists():
        pytest.skip("there is no assembled tree (scripts/apply.sh makes it)")
    ps = load_patch_set(ROOT)
    if not look(open_tree(TREE, ps.pin), ps).is_patched:
        pytest.skip("build/vllm isn't as this checkout would patch it")
    folder = TREE / "docs/mkdocs/gen_files"
    writer = types.ModuleType("generated_content")
    writer.fill_markers = lambda *args, **kwargs: None
    sys.modules["generated_content"] = writer
    path, bytecode = list(sys.path), sys.dont_write_bytecode
    try:
        sys.dont_write_bytecode = True
        spec = importlib.util.spec_from_file_location(
            "generate_attention_backends", folder / "generate_attention_backends.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.build_blocks()
    finally:
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        del sys.modules["generated_content"]


def test_the_decode_table_has_our_row(blocks):
    rows = [r for r in blocks["table-mla-decode"].split("\n") if "KV_BALANCED" in r]
    assert rows == [GOLDEN]


def test_no_priority_list_names_the_backend(blocks):
    """It is chosen by name only, so other models never see it."""
    for name, text in blocks.items():
        if name.startswith("priority"):
            assert "KV_BALANCED" not in text
            assert name != "priority-mla" or "`FLASHMLA`" in text
