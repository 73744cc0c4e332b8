# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``CudaCommunicator.reduce_scatter`` where PyNccl can't be used.

PyNccl is disabled by ``VLLM_DISABLE_PYNCCL``, and wherever NCCL is linked into torch
and can't be loaded by its name. Its collectives then return at once, so the output of
a reduce-scatter was what the memory held. Decode context parallelism merges its
shards with that collective.
"""

import types
from typing import Any

import pytest
import torch

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

WORLD = 2


class SilentPyNccl:
    """What PyNccl is without its library: no collective does anything."""

    disabled = True

    def reduce_scatter(self, output: torch.Tensor, input_: torch.Tensor) -> None:
        output.fill_(float("nan"))


@pytest.fixture
def communicators(monkeypatch):
    """A communicator of each rank, and torch's collective over their inputs."""
    groups = [types.SimpleNamespace(rank=rank, inputs=None) for rank in range(WORLD)]
    made = []
    for group in groups:
        one: Any = object.__new__(CudaCommunicator)
        one.world_size, one.rank_in_group = WORLD, group.rank
        one.pynccl_comm, one.device_group = SilentPyNccl(), group
        made.append(one)

    def reduce_scatter_tensor(output, input_, group):
        total = torch.stack([group.inputs for group in groups]).sum(0)
        assert input_.is_contiguous() and input_.shape == total.shape
        output.copy_(total.chunk(WORLD)[group.rank])

    monkeypatch.setattr(
        torch.distributed, "reduce_scatter_tensor", reduce_scatter_tensor
    )
    return made


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_torchs_collective_takes_over(communicators, dim):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 6, 8, generator=generator) for _ in range(WORLD)]
    expected = torch.stack(inputs).sum(0).chunk(WORLD, dim)
    for one, value in zip(communicators, inputs):
        one.device_group.inputs = value.movedim(0, dim)
    for rank, one in enumerate(communicators):
        got = one.reduce_scatter(inputs[rank], dim)
        torch.testing.assert_close(got, expected[rank])
        assert got.is_contiguous()


def test_pynccl_is_used_where_it_works(communicators):
    calls = []
    one = communicators[1]
    one.pynccl_comm.disabled = False
    one.pynccl_comm.reduce_scatter = lambda out, value: calls.append(value.shape)
    one.reduce_scatter(torch.zeros(4, 6), 0)
    assert calls == [(4, 6)]
