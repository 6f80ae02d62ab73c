"""The contract, kept by Transformer Engine's parts on one GPU. Expert parallelism has processes of its own: test_expert_parallel."""

import dataclasses

import jax.numpy as jnp
import pytest

from maxtext_moe_te.moe import block, routing, te_router
from maxtext_moe_te.moe.experts import te
from maxtext_moe_te.moe.transport.local import LocalTransport
from tests.numerics import contract


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngine(contract.Contract):
  axes = {"data": 1}
  dtype = jnp.bfloat16

  def parts(self, layout, num_experts):
    return block.Parts(transport=LocalTransport(num_experts, self.alignment), grouped_matmul=te.grouped_matmul)


def fused_where_exact(rule, logits, inputs, *, dtype):
  """Transformer Engine's router for the rules it serves."""
  router = routing if te_router.reason_against(rule, logits.dtype) else te_router
  return router.route(rule, logits, inputs, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngineRouter(TestLocalTransformerEngine):
  def parts(self, layout, num_experts):
    return dataclasses.replace(super().parts(layout, num_experts), route=fused_where_exact)


@pytest.mark.gpu
@pytest.mark.te
class TestRouterInFloat32(contract.Contract):
  """The fused router with experts in float32, where a wrong choice or weight cannot hide in rounding."""

  axes = {"data": 1}

  def parts(self, layout, num_experts):
    return dataclasses.replace(super().parts(layout, num_experts), route=fused_where_exact)


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngineAligned(TestLocalTransformerEngine):
  """Rows as a transport that pads every expert's rows delivers them."""

  alignment = 128
