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
from maxtext_moe_te.moe.experts import te
from maxtext_moe_te.moe.experts.base import ExpertWeights
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.moe.transport.local import LocalTransport
from tests.te import described

E, K, B, S, D, F, LAYERS = 16, 4, 8, 256, 256, 512, 3


def fake_group(group: nccl_ep.Bootstrap, outer: int) -> None:
  """What `nccl_ep.bootstrap` tells Transformer Engine, without a communicator."""
  import transformer_engine.jax.cpp_extensions as tex
  import transformer_engine_jax
  from transformer_engine.jax.cpp_extensions.misc import jax_dtype_to_te_dtype

  rows, tokens, local = group.capacity, group.max_tokens_per_rank, group.num_experts // group.ranks
  # Any plausible size will do: the buffer is only allocated.
  transformer_engine_jax.ep_handle_mem_size = lambda k, alignment: rows * local + 8 * rows * k + 4 * tokens * group.num_experts
  transformer_engine_jax.set_ep_bootstrap_params(
      bytes(128), group.ranks, 0, group.num_experts, tokens, rows, group.width, max_num_sms=0,
      max_token_dtype=int(jax_dtype_to_te_dtype(jnp.dtype(jnp.bfloat16))), drop_on_overflow=False, borrowed_comm=True,
  )  # fmt: skip
  tex.ep.set_ep_config(
      tex.ep.EpConfig(
          world_size=group.ranks * outer, rank=0, ep_size=group.ranks, num_ep_groups=outer, num_experts=group.num_experts,
          num_local_experts=local, max_tokens_per_rank=tokens, recv_capacity_per_rank=rows, hidden_dim=group.width,
      )
  )  # fmt: skip


def main(gpu: str, case: str) -> dict:
  """Compiles a step of three layers and their gradients."""
  mxfp8, expert = case.endswith("mxfp8"), case.startswith("expert4")
  outer, ranks = (2, 4) if expert else (1, 1)
  devices, capability = described.devices(gpu, outer * ranks)
  mesh = Mesh(np.array(devices).reshape(outer, ranks, 1), ("fsdp", "expert", "tensor"))
  layout = block.Layout(mesh=mesh, batch=("fsdp", "expert"), expert=("expert",) if expert else ())
  if expert:
    group = nccl_ep.Bootstrap(
        num_experts=E, experts_per_token=K, ranks=ranks, max_tokens_per_rank=B * S // (outer * ranks), width=D
    )
    group.check()
    fake_group(group, outer)
    transport = nccl_ep.NcclEpTransport(group)
  else:
    transport = LocalTransport(E, te.MXFP8_BLOCK if mxfp8 else 1)
  parts = block.Parts(
      transport=transport,
      grouped_matmul=te.grouped_matmul_mxfp8 if mxfp8 else te.grouped_matmul,
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
    out = block.moe_block(
        x, x @ gate, routing.RouterInputs(), ExpertWeights(down=down, fused=fused), spec=spec, layout=layout, parts=parts
    )
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
  # On Blackwell XLA asks the driver how much scratch CUB's sort needs; there is no driver here.
  compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_cub_radix_sort": capability < 100})
  calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text()))
  return {"capability": capability, "calls": calls, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
  print("RESULT", json.dumps(main(*sys.argv[1:])))
