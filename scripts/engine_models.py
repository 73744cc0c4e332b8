# SPDX-License-Identifier: Apache-2.0
"""Small Kimi K3-shaped models with random weights, for engine checks.

The target has K3's MLA dimensions (512 latent, 64 rope, 128 nope, 128 v) and KDA
layers in between, few layers and a small vocabulary. The draft is a DSpark MLA draft
for it. vLLM's dummy weights are so small that all logits come out alike, so
`install_seeded_weights` replaces them: the same name and seed give the same values in
every engine, and the logits are spread like a trained model's. `write_checkpoint`
writes the same kind of weights to disk, for engines of several ranks: each rank then
loads its shard of one model.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

VOCAB = 4096


def target_config(
    layers: int = 4,
    heads: int = 12,
    k3_kda: bool = False,
    max_tokens: int = 131072,
    mla_every: int = 2,
) -> dict:
    """Return the target's HF config.

    Args:
        layers: Decoder layers.
        heads: Attention heads of an MLA layer (12 is K3's 96 over 8 ranks).
        k3_kda: KDA layers as in Kimi K3 (full-rank gate); else as in Kimi Linear.
        max_tokens: Longest context.
        mla_every: Every so many layers one is MLA, the others KDA.

    """
    mla = list(range(mla_every, layers + 1, mla_every))
    kda = dict(use_full_rank_gate=True, gate_lower_bound=-5.0) if k3_kda else {}
    return dict(
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=max_tokens,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_use_nope=True,
        mla_use_output_gate=True,
        head_dim=128,
        linear_attn_config=dict(
            kda_layers=[i for i in range(1, layers + 1) if i not in mla],
            full_attn_layers=mla,
            num_heads=8,
            head_dim=128,
            short_conv_kernel_size=4,
            **kda,
        ),
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def draft_config(
    layers: int = 2,
    heads: int = 12,
    target_layers: int = 4,
    max_tokens: int = 131072,
) -> dict:
    """Return the HF config of a DSpark draft for `target_config`."""
    taps = [0, target_layers - 2]
    return dict(
        architectures=["K3DSparkModel"],
        model_type="k3_dspark",
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        hidden_size=1024,
        target_hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        max_position_embeddings=max_tokens,
        rope_theta=50000.0,
        tie_word_embeddings=False,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        markov_rank=64,
        block_size=7,
        target_layer_ids=taps,
        num_target_layers=len(taps),
        mask_token_id=3,
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def write_model(folder: Path, config: dict) -> Path:
    """Write `config.json` into `folder` (made if missing) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed into place: several processes may write and read it at once.
    part = folder / f"config.json.{os.getpid()}"
    part.write_text(json.dumps(config, indent=1))
    part.replace(folder / "config.json")
    return folder


def _mla_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    rank = config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (rank, hidden),
        "q_a_layernorm.weight": (rank,),
        "q_b_proj.weight": (heads * (nope + rope), rank),
        "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (nope + value), latent),
        "o_proj.weight": (hidden, heads * value),
    }
    if config.get("mla_use_output_gate"):
        shapes["g_proj.weight"] = (heads * value, hidden)
    return shapes


def _kda_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    kda, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, head = kda["num_heads"], kda["head_dim"]
    size, width = heads * head, kda["short_conv_kernel_size"]
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{x}_proj.weight": (size, hidden) for x in "qkv"},
        **{f"{x}_conv1d.weight": (size, 1, width) for x in "qkv"},
        "b_proj.weight": (heads, hidden),
        "f_a_proj.weight": (head, hidden),
        "f_b_proj.weight": (size, head),
        "dt_bias": (size,),
        "A_log": (1, 1, heads, 1),
        "o_norm.weight": (head,),
        "o_proj.weight": (hidden, size),
    }
    if kda.get("use_full_rank_gate"):
        shapes["g_proj.weight"] = (size, hidden)
    else:
        shapes["g_a_proj.weight"] = (head, hidden)
        shapes["g_b_proj.weight"] = (size, head)
    return shapes


def checkpoint_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a target's or draft's checkpoint."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    vocab = config["vocab_size"]
    draft = config["model_type"] == "k3_dspark"
    root = "" if draft else "model."
    shapes: dict[str, tuple[int, ...]] = {}
    if draft:
        rank = config["markov_rank"]
        taps = config["target_hidden_size"] * config["num_target_layers"]
        shapes.update(
            {
                "context_proj.weight": (hidden, taps),
                "context_norm.weight": (hidden,),
                "final_norm.weight": (hidden,),
                "markov_head.markov_w1.weight": (vocab, rank),
                "markov_head.markov_w2.weight": (config["draft_vocab_size"], rank),
            }
        )
    else:
        shapes.update(
            {
                "model.embed_tokens.weight": (vocab, hidden),
                "model.norm.weight": (hidden,),
                "lm_head.weight": (vocab, hidden),
            }
        )
    kda_layers = config.get("linear_attn_config", {}).get("kda_layers", ())
    for layer in range(config["num_hidden_layers"]):
        # HF counts KDA layers from one.
        attention = _kda_shapes if layer + 1 in kda_layers else _mla_shapes
        shapes.update(
            {
                f"{root}layers.{layer}.{name}": shape
                for name, shape in {
                    "input_layernorm.weight": (hidden,),
                    "post_attention_layernorm.weight": (hidden,),
                    "mlp.gate_proj.weight": (wide, hidden),
                    "mlp.up_proj.weight": (wide, hidden),
                    "mlp.down_proj.weight": (hidden, wide),
                    **{f"self_attn.{n}": s for n, s in attention(config).items()},
                }.items()
            }
        )
    return shapes


def write_checkpoint(folder: Path, config: dict, seed: int = 1) -> Path:
    """Write a model with seeded weights, once: config.json and model.safetensors."""
    import torch
    from safetensors.torch import save_file

    write_model(folder, config)
    path = folder / "model.safetensors"
    if path.exists():
        return folder
    tensors = {}
    for name, shape in checkpoint_shapes(config).items():
        exact = name.endswith(("A_log", "dt_bias", "conv1d.weight"))
        dtype = torch.float32 if exact else torch.bfloat16
        tensors[name] = torch.empty(shape, dtype=dtype)
        _fill(name, tensors[name], seed)
    part = folder / f"{os.getpid()}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(path)
    return folder


def _fill(name: str, tensor, seed: int) -> None:
    import torch

    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))

    def normal(std: float, mean: float = 0.0):
        values = torch.randn(
            tensor.shape,
            generator=generator,
            device=tensor.device,
            dtype=torch.float32,
        )
        tensor.copy_(values.mul_(std).add_(mean))

    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        normal(0.3)
    elif tensor.dim() <= 1:
        # Norm weights lie around one, biases around zero.
        normal(0.1, 0.0 if leaf in ("bias", "dt_bias") else 1.0)
    elif "lm_head" in name:
        normal(4.0 * tensor.shape[-1] ** -0.5)
    elif "embed_tokens" in name:
        normal(1.0)
    elif "conv1d" in name:
        normal(0.5)
    else:
        normal(tensor.shape[-1] ** -0.5)


def install_seeded_weights(seed: int = 1) -> None:
    """Make `load_format="dummy"` fill parameters by name and seed.

    Works in this process only: run the engine with VLLM_ENABLE_V1_MULTIPROCESSING=0.
    """
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @torch.no_grad()
    def load_weights(self, model, model_config) -> None:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                _fill(name, parameter.data, seed)

    DummyModelLoader.load_weights = load_weights


def install_scales(q_scale: float, k_scale: float) -> None:
    """Give every MLA layer these scales instead of 1 (this process only)."""
    from vllm.models.kimi_k3.nvidia import mla

    stock = mla.set_default_quant_scales

    def set_scales(layer, register_buffer: bool = False) -> None:
        stock(layer, register_buffer=register_buffer)
        layer._q_scale.fill_(q_scale)
        layer._k_scale.fill_(k_scale)
        layer._q_scale_float, layer._k_scale_float = q_scale, k_scale

    mla.set_default_quant_scales = set_scales
