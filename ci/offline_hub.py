# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face cache that holds the configs which vLLM's own tests ask for.

    python ci/offline_hub.py DIR
    HF_HOME=DIR HF_HUB_OFFLINE=1 pytest tests/v1/attention/test_mla_backends.py

The tests read a model's config from the hub and nothing else of it; without a network
they stop there. The configs below are written for these tests: what the tests use of
the model, without weights, tokenizer or code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

# The dimensions that the DeepSeek-V3 report (arXiv 2412.19437, section 4.2) gives.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
    "rope_theta": 10000.0,
}

# The selector's tests take only the kind of model from it, and pass head sizes
# themselves. Small on purpose: these are no dimensions of the model.
GEMMA4_TEXT: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-ai/DeepSeek-R1": DEEPSEEK_V3,
    "google/gemma-4-31B-it": GEMMA4_TEXT,
}


def write(folder: Path, model: str, config: dict[str, Any]) -> Path:
    """Write one model as huggingface_hub caches it.

    Args:
        folder: What HF_HOME will name.
        model: Organisation and name, with a slash between.
        config: What its config.json says.

    Returns:
        The snapshot's folder.

    Raises:
        FileExistsError: The cache has this model from elsewhere, which stays as it is.

    """
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    # The hub's revisions are commits; this one only has to follow the content.
    revision = hashlib.sha1(text.encode()).hexdigest()
    root = folder / "hub" / ("models--" + model.replace("/", "--"))
    branch = root / "refs" / "main"
    marker = root / "made_offline"
    if root.exists() and not marker.exists():
        raise FileExistsError(
            f"{root} holds {model} from elsewhere; name a folder of its own"
        )
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    branch.parent.mkdir(exist_ok=True)
    marker.touch()
    (snapshot / "config.json").write_text(text)
    branch.write_text(revision)
    return snapshot


def main() -> int:
    """Write all models into the folder."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    made.add_argument("folder", type=Path, help="what HF_HOME will name")
    args = made.parse_args()
    for model, config in MODELS.items():
        print(write(args.folder.resolve(), model, config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
