#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/serve.sh [--tiny | --model MODEL] [--draft MODEL] [--print] [-- OPTIONS]

Print, then run, `vllm serve` for Kimi K3 on Hopper GPUs with an FP8 KV cache and the
KIMI_K3_KV_BALANCED_MLA backend.

  --tiny         a tiny K3-shaped model with random weights, on one GPU
  --model MODEL  name or folder of the real model (default: moonshotai/Kimi-K3)
  --draft MODEL  DSpark draft for speculative decoding, on the same backend
  --print        print the command and stop
  --             further options of `vllm serve`; they come last, so they win

The real model runs tensor parallel over the 8 GPUs of a node. The MXFP4 weights are
about 1.7 TB: one node of 8 H200 (1.1 TB) can't hold them. On several nodes, add vLLM's
multi-node options after `--`, and check that 96 heads divide evenly.

Environment: KVPATCH_ENV (the environment's folder, default .venv)
TEXT
}

model=moonshotai/Kimi-K3 draft="" tiny=0 print=0
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=1 ;;
    --model | --draft)
      if [ $# -lt 2 ]; then die "$1 needs a model's name or folder"; fi
      if [ "$1" = --model ]; then model=$2; else draft=$2; fi
      shift
      ;;
    --print) print=1 ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
  shift
done

backend=KIMI_K3_KV_BALANCED_MLA
common=(--kv-cache-dtype fp8 --attention-backend "$backend")
if [ "$tiny" = 1 ]; then
  model="$project/build/tiny_k3"
  command=(vllm serve "$model" "${common[@]}" --load-format dummy
    --served-model-name tiny-k3 --max-model-len 8192 --max-num-seqs 16
    --gpu-memory-utilization 0.3)
else
  # What vLLM's own recipe sets on Hopper, with the cache and the backend of this set.
  command=(vllm serve "$model" "${common[@]}" --tensor-parallel-size 8
    --trust-remote-code --gpu-memory-utilization 0.95 --max-num-batched-tokens 4096
    --moe-backend marlin --disable-custom-all-reduce --disable-flashinfer-autotune
    --enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3)
fi
if [ -n "$draft" ]; then
  command+=(--speculative-config "{\"model\": \"$draft\", \"method\": \"dspark\",\
 \"num_speculative_tokens\": 7, \"attention_backend\": \"$backend\",\
 \"kv_cache_dtype\": \"fp8\"}")
fi
command+=("$@")

# Quote for a reader who will paste it.
quoted() {
  local word
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,+@-]+$ ]]; then printf ' %s' "$word"; else printf " '%s'" "${word//\'/\'\\\'\'}"; fi
  done
}

printf 'VLLM_ENGINE_READY_TIMEOUT_S=3600 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True'
quoted "${command[@]}"
printf '\n'
if [ "$print" = 1 ]; then exit 0; fi

python="$env_dir/bin/python"
if [ ! -x "$env_dir/bin/vllm" ]; then
  die "there is no vLLM in $env_dir" "to do:   run scripts/setup.sh first"
fi
if [ "$(machine_kind)" != gpu ]; then
  die "the backend needs a Hopper GPU" "got:     no GPU of compute capability 9.0" \
    "to do:   run this on an H100 or H200; --print shows the command anywhere"
fi
if ! PYTHON="$python" "$project/scripts/apply.sh" --installed --check | grep -q '^applied'; then
  die "the vLLM in $env_dir isn't patched" "to do:   run scripts/setup.sh"
fi
if [ "$tiny" = 1 ]; then
  "$python" "$project/scripts/tiny_k3.py" --write-only --dir "$model" >/dev/null
fi
export VLLM_ENGINE_READY_TIMEOUT_S=3600 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
PATH="$env_dir/bin:$PATH" exec "${command[@]}"
