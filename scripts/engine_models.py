# SPDX-License-Identifier: Apache-2.0
"""Small Kimi K3-shaped models with random weights, for engine checks.

The target has K3's MLA dimensions (512 latent, 64 rope, 128 nope, 128 v) and KDA
layers in between, few layers and a small vocabulary. The draft is a DSpark MLA draft
for it. vLLM's dummy weights are so small that all logits come out alike, so
`install_seeded_weights` replaces them: the same name and seed give the same values in
every engine, and the logits are spread like a trained model's.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

VOCAB = 4096


def target_config(layers: int = 4, heads: int = 12) -> dict:
    """Return the target's HF config.

    Args:
        layers: Decoder layers; every second one is MLA, the others KDA.
        heads: Attention heads of an MLA layer (12 is K3's 96 over 8 ranks).

    """
    mla = list(range(2, layers + 1, 2))
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
        max_position_embeddings=131072,
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
        ),
        torch_dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def draft_config(layers: int = 2, heads: int = 12, target_layers: int = 4) -> dict:
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
        max_position_embeddings=131072,
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
