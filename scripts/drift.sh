#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What another vLLM would do to the patch set. Options: --help.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/kv.py" drift "$@"
