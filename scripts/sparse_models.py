# SPDX-License-Identifier: Apache-2.0
"""Small models with DeepSeek Sparse Attention and random weights, for engine checks.

Two shapes: DeepSeek-V3.2's (latent 512, rope 64) and GLM-5.3-Flash's sparse layers
(latent 512, no rope part, an indexer that scores pools of tokens). Attention and
indexer dimensions are the real ones, of one tensor-parallel rank of 8; hidden size,
layers and vocabulary are small. With three layers all MLPs are dense, as the first
three of the real models are; a fourth layer has experts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import engine_models

LAYERS = 3
VOCAB = engine_models.VOCAB
TOPK = 2048
DENSE_LAYERS = 3
# Factor on the query projections. Scores then have a deviation of about 2.5, so that a
# few of the 2048 tokens carry most of the weight. At 1 the softmax is so flat that the
# output is close to zero, and a wrong attention would hardly change a logit.
SHARPNESS = 2.5
# The first transformers with the layer type "indexed_attention" of glm_config.
TRANSFORMERS = (5, 18)
BACKEND = "FLASHINFER_MLA_SPARSE_SM90"
MODULE = "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm90"


def _common(layers: int, heads: int) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        q_lora_rank=1536,
        kv_lora_rank=512,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        index_topk=TOPK,
        index_head_dim=128,
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def deepseek_config(layers: int = LAYERS, heads: int = 16) -> dict[str, Any]:
    """Return the HF config of a DeepSeek-V3.2-shaped model.

    Args:
        layers: Decoder layers; the first three have a dense MLP, later ones experts.
        heads: Attention heads (16 is the real 128 over 8 ranks).

    """
    config = _common(layers, heads)
    config.update(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=64,
        first_k_dense_replace=DENSE_LAYERS,
        moe_layer_freq=1,
        rope_theta=10000.0,
    )
    return config


def glm_config(layers: int = LAYERS, heads: int = 8) -> dict[str, Any]:
    """Return the HF config of a model with GLM-5.3-Flash's sparse attention layers.

    The real model has linear attention (KDA) layers in between and hyper-connections
    around; both are left out, since they have nothing to do with sparse attention.

    Args:
        layers: Decoder layers, all with sparse attention; the first three have a dense
            MLP, later ones experts.
        heads: Attention heads (8 is the real 64 over 8 ranks).

    """
    config = _common(layers, heads)
    kinds = ["dense"] * min(DENSE_LAYERS, layers)
    config.update(
        architectures=["Glm5NextForCausalLM"],
        model_type="glm5_next_text",
        qk_nope_head_dim=256,
        qk_rope_head_dim=0,
        v_head_dim=256,
        index_n_heads=32,
        index_kpool=4,
        indexer_rope_interleave=False,
        mla_use_nope=True,
        mhc=False,
        swiglu_limit=10.0,
        layer_types=["indexed_attention"] * layers,
        mlp_layer_types=kinds + ["sparse"] * (layers - len(kinds)),
    )
    return config


MODELS = {"dsv32": deepseek_config, "glm": glm_config}


def transformers_gap() -> str:
    """Return why this environment can't read the GLM model's config; empty if it can.

    A missing transformers is no gap: the engine says that itself.
    """
    try:
        got = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if tuple(int(part) for part in got.split(".")[:2]) >= TRANSFORMERS:
        return ""
    wanted = ".".join(map(str, TRANSFORMERS))
    return (
        "the glm runs are left out: their config has layers of type "
        f"'indexed_attention', which transformers {got} doesn't know; it takes "
        f"{wanted} or newer. Install that, or name other runs with --only"
    )


def attention_only(config: Any) -> Any:
    """Say in an HF config that all layers are attention; return it.

    vLLM takes every Glm5Next model for a hybrid with recurrent layers, unless the
    config names plain attention layers only. The class of the config itself rewrites
    that name, so this goes in as `hf_overrides`, after it.
    """
    if getattr(config, "model_type", "") == "glm5_next_text":
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def write_model(folder: Path, model: str, layers: int = LAYERS) -> Path:
    """Write the config of `MODELS[model]` into a folder below `folder`; return it."""
    name = f"{model}-{layers}"
    return engine_models.write_model(folder / name, MODELS[model](layers))


def install_weights(seed: int = 1) -> None:
    """Make `load_format="dummy"` fill parameters by name and seed, with sharp scores.

    Works in this process only: run the engine with VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    engine_models.install_seeded_weights(seed)
    fill = DummyModelLoader.load_weights

    @torch.no_grad()
    def load_weights(self, model, model_config) -> None:
        fill(self, model, model_config)
        for name, parameter in model.named_parameters():
            if name.endswith(".q_b_proj.weight"):
                parameter.data.mul_(SHARPNESS)

    DummyModelLoader.load_weights = load_weights


def install_scales(k_scale: float) -> None:
    """Give every MLA layer this scale of the FP8 cache instead of 1 (this process)."""
    from vllm.model_executor.layers.attention import mla_attention

    stock = mla_attention.set_default_quant_scales

    def set_scales(layer, register_buffer: bool = False) -> None:
        stock(layer, register_buffer=register_buffer)
        layer._k_scale.fill_(k_scale)
        layer._k_scale_float = k_scale

    mla_attention.set_default_quant_scales = set_scales


def file_hash(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned_hash(upstream_toml: Path) -> str | None:
    """Return the sha256 that UPSTREAM.toml pins for the stock backend, if it does."""
    import tomllib

    shadow = tomllib.loads(upstream_toml.read_text()).get("shadow", {})
    value = shadow.get(MODULE.replace(".", "/") + ".py")
    return value if isinstance(value, str) else None


def install_stock(path: Path) -> None:
    """Put the stock backend file in the place of the installed one (this process).

    Args:
        path: vLLM's own `flashinfer_mla_sparse_sm90.py`.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: The module was imported before, so it is too late.

    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no stock backend at {path}; pass vLLM's own file with --stock"
        )
    if MODULE in sys.modules:
        raise RuntimeError(f"{MODULE} was imported already; install the stock first")
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    parent = importlib.import_module(MODULE.rpartition(".")[0])
    setattr(parent, MODULE.rpartition(".")[2], module)
