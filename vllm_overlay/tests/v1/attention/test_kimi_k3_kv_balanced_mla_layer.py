# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kimi K3's MLA layer with an FP8 cache and this backend's decode, on a CPU.

The layer, its batches and the reference are those of ``test_kimi_k3_fp8_cache``; the
impl is the real one, its kernel the stand-in. What the layer hands over (an FP8 query
and both scales) must be what the impl takes, with prefills in the batch and without.
"""

import pytest

from tests.v1.attention import kimi_k3_kv_balanced_mla_utils as utils
from tests.v1.attention import test_kimi_k3_fp8_cache as layers
from tests.v1.attention.test_kimi_k3_fp8_cache import (  # noqa: F401
    _cpu_ops,
    _environment,
)
from vllm.models.kimi_k3.nvidia.kv_balanced_mla.backend import KvBalancedDecodeMetadata

pytestmark = pytest.mark.skip_global_cleanup


class Batch(layers.Batch):
    """A batch whose decodes carry this backend's metadata."""

    def decode_metadata(self):
        common = super().decode_metadata()
        return KvBalancedDecodeMetadata(
            block_table=common.block_table,
            seq_lens=common.seq_lens,
            dcp_tot_seq_lens=None,
            query_len=self.decodes[0][1],
        )


BATCHES = {
    name: Batch(batch.decodes, batch.prefills)
    for name, batch in layers.BATCHES.items()
    if batch.decodes
}


@pytest.mark.parametrize("rope", [False, True], ids=["nope", "rope"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0), (2.0, 0.25)])
@pytest.mark.parametrize("name", list(BATCHES))
def test_layer_decodes_its_fp8_cache(monkeypatch, name, scales, rope):
    core = utils.install_fake_core(monkeypatch)
    config = utils.make_config(speculative=7)
    batch = BATCHES[name]
    out, _, metadata, layer = layers.run_layer(
        batch,
        cache_dtype="fp8",
        rope=rope,
        scales=scales,
        impl=utils.make_impl(config),
        config=config,
    )
    expected = layers.exact(batch, layer, scales, fp8=True)
    assert core.count("plan") == core.count("decode") == 1
    layers.check_output(batch, out, expected, metadata)
