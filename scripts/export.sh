#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Write edits of the patched tree back to patches/ and vllm_overlay/. Options: --help.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/kv.py" export "$@"
