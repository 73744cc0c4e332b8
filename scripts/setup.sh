#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/common.sh"

usage() {
  cat <<'TEXT'
usage: scripts/setup.sh [--cpu|--gpu] [--env-only] [-- MAIN JOB'S OPTIONS]

Make an environment in .venv (KVPATCH_ENV names another folder), patch the vLLM in it
and the source tree in build/vllm, then run the main job (scripts/demo.py). A second
run goes on where the first one stopped.

  --gpu       the release's wheel with all that it depends on (the default where a
              Hopper GPU is found)
  --cpu       the source release without CUDA, and torch for the CPU (the default
              elsewhere); about 2 GB
  --env-only  stop before the main job
  --          options of the main job; see scripts/demo.py --help

  PYTHON           the interpreter to build on, 3.11 or newer
  TORCH_INDEX_URL  where pip finds CPU builds of torch, if your index has none
TEXT
}

kind="" main_job=1
while [ $# -gt 0 ]; do
  case $1 in
    --cpu | --gpu) kind=${1#--} ;;
    --env-only) main_job=0 ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    *) usage >&2; die "unknown option: $1" ;;
  esac
  shift
done
kind=${kind:-$(machine_kind)}
python="$env_dir/bin/python"
stamp="$env_dir/.kvpatch-$kind"

pip_install() {
  "$python" -m pip install -qq --disable-pip-version-check --progress-bar off "$@"
}

# pip says nothing for minutes while it unpacks: show that it lives.
with_pulse() {
  "$@" &
  local pid=$! waited=0
  # shellcheck disable=SC2064
  trap "kill $pid 2>/dev/null || true" EXIT
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    if [ $((waited % 15)) = 0 ]; then printf '    ... %ds\n' "$waited"; fi
  done
  trap - EXIT
  wait "$pid"
}

install_cpu() {
  local torch=()
  if [ -n "${TORCH_INDEX_URL:-}" ]; then torch=(--extra-index-url "$TORCH_INDEX_URL"); fi
  step "torch for the CPU"
  # An index that has no CPU build offers the CUDA one, which works too but is large.
  with_pulse pip_install "${torch[@]}" 'torch==2.13.0+cpu' 2>/dev/null ||
    with_pulse pip_install "${torch[@]}" 'torch==2.13.0'
  step "what vLLM imports"
  with_pulse pip_install "${torch[@]}" -r "$project/ci/requirements-cpu.txt"
  # Their dependencies pull Triton (1 GB), which nothing here needs.
  pip_install --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.11
  step "vLLM from its source release, without CUDA"
  local sdist
  sdist=$("$python" "$project/scripts/kv.py" fetch)
  VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 \
    with_pulse pip_install --no-deps --no-build-isolation "$sdist"
}

install_gpu() {
  step "vLLM's wheel and its dependencies (several GB)"
  local wheel
  if [ "$(uname -m)" = x86_64 ]; then
    wheel=$("$python" "$project/scripts/kv.py" fetch --wheel)
  else # the pin holds no hash of other wheels; apply.sh checks the files it patches
    wheel="vllm==$(sed -n 's/^version = "\(.*\)"$/\1/p' "$project/UPSTREAM.toml")"
  fi
  with_pulse pip_install "$wheel" matplotlib
}

if outdated "$stamp" "$project/UPSTREAM.toml" "$project/ci/requirements-cpu.txt"; then
  if [ ! -x "$python" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    step "an environment in $env_dir, on $("$base" --version)"
    make_env "$base" "$env_dir"
  fi
  "install_$kind"
  touch "$stamp"
else
  step "the environment in $env_dir is complete"
fi

step "the patched package in the environment"
PYTHON="$python" "$project/scripts/apply.sh" --installed
step "the patched source tree (its tests, docs and benchmarks) in build/vllm"
PYTHON="$python" "$project/scripts/apply.sh" --no-import

if [ "$main_job" = 1 ]; then
  step "the main job"
  "$python" "$project/scripts/demo.py" "$@"
fi
step "done"
