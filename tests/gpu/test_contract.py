"""The contract, kept by Transformer Engine's parts on one GPU. Expert parallelism has processes of its own: test_expert_parallel."""

import jax.numpy as jnp
import pytest

from maxtext_moe_te.moe import block
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


@pytest.mark.gpu
@pytest.mark.te
class TestLocalTransformerEngineAligned(TestLocalTransformerEngine):
  """Rows as a transport that pads every expert's rows delivers them."""

  alignment = 128
