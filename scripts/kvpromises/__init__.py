# SPDX-License-Identifier: Apache-2.0
"""Behind scripts/promises.py: the list of promises, the processes, the results."""
