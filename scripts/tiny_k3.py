# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Kimi K3-shaped model, and run it through vLLM on a GPU.

The model has K3's MLA dimensions and random weights: it shows that the engine starts,
captures graphs and decodes, not what it says. With --write-only the folder can be
served: it holds a byte-level tokenizer, so that the OpenAI endpoint takes text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_DIR = HERE.parent / "build" / "tiny_k3"
BACKEND = "KIMI_K3_KV_BALANCED_MLA"
SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="model folder")
    made.add_argument("--layers", type=int, default=4, help="every second is MLA")
    made.add_argument("--heads", type=int, default=12, help="attention heads (MLA)")
    made.add_argument("--hidden", type=int, default=1024, help="hidden size")
    made.add_argument("--write-only", action="store_true", help="don't run it")
    made.add_argument("--kv-cache-dtype", default="fp8")
    made.add_argument("--attention-backend", default=BACKEND, help="or `auto`")
    made.add_argument("--eager", action="store_true", help="no CUDA graphs")
    made.add_argument("--prompts", default="5,100,1000,3000", help="prompt lengths")
    made.add_argument("--tokens", type=int, default=16, help="to generate for each")
    made.add_argument("--max-model-len", type=int, default=8192)
    return made


def byte_characters() -> list[str]:
    """Return the character that stands for each of the 256 bytes in a byte-level BPE.

    Bytes that print stand for themselves, the others for characters from 256 up.

    """
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in prints else chr(next(others)) for b in range(256)]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are bytes; spare ids stand for `<x123>`.

    Args:
        folder: The model's folder.
        vocab_size: Size of the model's vocabulary.

    """
    names = [*SPECIAL, *byte_characters()]
    names += [f"<x{i}>" for i in range(len(names), vocab_size)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, name in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "post_processor": None,
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": 131072,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
        "{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write(folder: Path, layers: int, heads: int, hidden: int) -> dict[str, Any]:
    """Write the model's folder and return its configuration.

    Raises:
        SystemExit: A size that the model can't have.

    """
    sys.path.insert(0, str(HERE))
    from engine_models import target_config, write_model

    for name, value, step in (
        ("--layers", layers, 2),
        ("--heads", heads, 1),
        ("--hidden", hidden, 128),
    ):
        if value < step or value % step:
            raise SystemExit(
                f"error: {name} is {value}; allowed are multiples of {step} from {step}"
            )
    config = target_config(layers, heads)
    config.update(hidden_size=hidden, intermediate_size=2 * hidden)
    write_model(folder, config)
    write_tokenizer(folder, config["vocab_size"])
    return config


def main() -> int:
    """Write the model and run it; return 0 when every prompt got its tokens."""
    args = parser().parse_args()
    write(args.dir, args.layers, args.heads, args.hidden)
    if args.write_only:
        print(args.dir)
        return 0
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if args.attention_backend != "auto":
        options["attention_backend"] = args.attention_backend
    llm = LLM(
        model=str(args.dir),
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
        kv_cache_dtype=args.kv_cache_dtype,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        **options,
    )
    print(f"engine up after {time.monotonic() - begin:.0f} s", flush=True)
    lengths = [int(n) for n in args.prompts.split(",")]
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 4000 + 4 for j in range(n)]}
        for i, n in enumerate(lengths)
    ]
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    begin = time.monotonic()
    done = llm.generate(prompts, sampling, use_tqdm=False)
    for length, request in zip(lengths, done):
        print(f"{length:>6} tokens -> {list(request.outputs[0].token_ids)}")
    counts = [len(request.outputs[0].token_ids) for request in done]
    short = [n for n, count in zip(lengths, counts) if count < args.tokens]
    print(f"{time.monotonic() - begin:.2f} s for {len(lengths)} prompts")
    print(f"FAILED: too few tokens for prompts of {short}" if short else "OK")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
