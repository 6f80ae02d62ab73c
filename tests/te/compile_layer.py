"""Compiles the layer with Transformer Engine's parts for described GPUs and prints what came out: compile_layer GPU CASE.

Cases: local, local-mxfp8, expert4 (fsdp 2 x expert 4), expert4-mxfp8, unscanned, router.
"""

import collections
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxtext_moe_te.moe import block, routing, te_router
from maxtext_moe_te.moe.experts import gated, te
from maxtext_moe_te.moe.experts.base import ExpertWeights, activate_all
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.moe.transport.local import LocalTransport
from maxtext_moe_te.tools import described

E, K, B, S, D, F, LAYERS = 16, 4, 8, 256, 256, 512, 3


def main(gpu: str, case: str) -> dict:
  """Compiles a step of three layers and their gradients."""
  mxfp8, expert = case.endswith("mxfp8"), case.startswith("expert4")
  outer, ranks = (2, 4) if expert else (1, 1)
  devices, capability = described.devices(gpu, f"1x{outer * ranks}x1")
  mesh = Mesh(np.array(devices).reshape(outer, ranks, 1), ("fsdp", "expert", "tensor"))
  layout = block.Layout(mesh=mesh, batch=("fsdp", "expert"), expert=("expert",) if expert else ())
  if expert:
    group = nccl_ep.Bootstrap(num_experts=E, experts_per_token=K, ranks=ranks, max_tokens_per_rank=B * S // (outer * ranks), width=D)
    group.check()
    described.pretend_group(group, outer)
    transport = nccl_ep.NcclEpTransport(group)
  else:
    transport = LocalTransport(E, te.MXFP8_BLOCK if mxfp8 else 1)
  parts = block.Parts(
    transport=transport,
    grouped_matmul=te.grouped_matmul_mxfp8 if mxfp8 else te.grouped_matmul,
    activation=gated.activate_received if expert else activate_all,
    route=te_router.route if case == "router" else routing.route,
  )
  spec = block.LayerSpec(
    num_experts=E,
    router=RouterRule(experts_per_token=K),
    expert=ExpertRule(),
    dtype=jnp.dtype(jnp.bfloat16),
    sum_dtype=jnp.dtype(jnp.float32),
    load_balance_coefficient=0.01,
  )

  def layer(x, weights):
    gate, fused, down = weights
    out = block.moe_block(x, x @ gate, routing.RouterInputs(), ExpertWeights(down=down, fused=fused), spec=spec, layout=layout, parts=parts)
    return x + out.y, out.load_balance_loss

  def loss(x, weights):
    if case == "unscanned":
      for i in range(LAYERS):
        x, _ = layer(x, tuple(w[i] for w in weights))
      return (x.astype(jnp.float32) ** 2).sum()
    x, balance = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return (x.astype(jnp.float32) ** 2).sum() + balance.sum()

  def shaped(*dims, split=P()):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, split))

  per_expert = P(None, layout.expert or None)
  weights = shaped(LAYERS, D, E), shaped(LAYERS, E, D, 2 * F, split=per_expert), shaped(LAYERS, E, F, D, split=per_expert)
  x = shaped(B, S, D, split=P(layout.batch))
  lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, weights)
  compiled = lowered.compile(compiler_options=described.COMPILER_OPTIONS)
  calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text()))
  return {"capability": capability, "calls": calls, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
  print("RESULT", json.dumps(main(*sys.argv[1:])))
