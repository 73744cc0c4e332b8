# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The attention benchmarks know KIMI_K3_KV_BALANCED_MLA."""

import ast
from pathlib import Path

import yaml

from vllm.v1.attention.backends.registry import AttentionBackendEnum

NAME = "KIMI_K3_KV_BALANCED_MLA"
BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "attention_benchmarks"


def backend_properties() -> dict[str, dict[str, str]]:
    """``_BACKEND_PROPERTIES`` of the MLA runner, which needs a GPU to be imported."""
    tree = ast.parse((BENCHMARKS / "mla_runner.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
            if names == ["_BACKEND_PROPERTIES"]:
                return ast.literal_eval(node.value)
    raise AssertionError("mla_runner.py has no _BACKEND_PROPERTIES")


def test_runner_gives_a_packed_query():
    """A (nope, pe) tuple is refused by the decode."""
    assert backend_properties()[NAME] == {"query_format": "concat"}


def test_decode_benchmark_lists_the_backend():
    config = yaml.safe_load((BENCHMARKS / "configs" / "mla_decode.yaml").read_text())
    assert NAME in config["backends"]
    for name in config["backends"]:
        assert name in AttentionBackendEnum.__members__
