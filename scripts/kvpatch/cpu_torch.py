# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for CPU builds of torch.

vLLM's workspace empties the accelerator's cache when it grows. A CUDA build of torch
without a GPU does nothing then; a CPU build raises. With this, both do nothing.
"""

import torch

if not torch.accelerator.is_available():
    torch.accelerator.empty_cache = lambda: None
