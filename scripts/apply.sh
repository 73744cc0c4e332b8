#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Apply the patch set to a vLLM tree, check it, reverse it, or tell what is applied.
# PYTHON names the interpreter (3.11 or newer) if it isn't python3.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/kv.py" apply "$@"
