"""The contract, kept by Transformer Engine's parts on one GPU. Expert parallelism has processes of its own: test_expert_parallel."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe import block, routing, te_router
from maxtext_moe_te.moe.experts import te
from maxtext_moe_te.moe.transport.local import LocalTransport
from tests.numerics import contract
from tests.numerics.contract import run_block


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


class FusedRouter(contract.Contract):
  """Any parts, with the fused router."""

  def parts(self, layout, num_experts):
    return dataclasses.replace(super().parts(layout, num_experts), route=fused_where_exact)

  def compare(self, case, **more):
    if case.load not in ("equal", "pairs"):
      return super().compare(case, **more)
    # Which of equal scores it takes is not promised; that a token goes to K experts is.
    spec, arrays, cotangent = self.problem(case)
    layout = self.layout(case.batch, case.sequence)
    results = run_block(spec, arrays, cotangent, layout=layout, parts=self.parts(layout, spec.num_experts))
    assert results["rows_per_expert"].sum() == case.batch * case.sequence * case.router.experts_per_token
    assert all(np.isfinite(np.asarray(value, np.float64)).all() for value in results.values())


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngineRouter(FusedRouter, TestLocalTransformerEngine):
  pass


@pytest.mark.gpu
@pytest.mark.te
class TestRouterInFloat32(FusedRouter):
  """Experts in float32, where a wrong choice or weight cannot hide in rounding."""

  axes = {"data": 1}


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngineAligned(TestLocalTransformerEngine):
  """Rows as a transport that pads every expert's rows delivers them."""

  alignment = 128
