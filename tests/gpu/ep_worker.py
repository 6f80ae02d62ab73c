"""One rank of an expert-parallel check or benchmark: python -m tests.gpu.ep_worker RANK RANKS PORT [options].

All ranks hold the same global inputs; each compares its shards of output and gradients with a float32 oracle of the whole batch that
it computes by itself. Rank 0 prints the result as one JSON line.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile

SHAPES = {
  # experts, K, batch per rank, sequence, D, F
  "check": (16, 4, 4, 128, 256, 256),
  "uneven": (8, 2, 2, 96, 512, 256),
  "deepseek3": (16, 8, 2, 4096, 7168, 2048),
  "qwen3": (128, 8, 4, 4096, 2048, 768),
}


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("rank", type=int)
  parser.add_argument("ranks", type=int)
  parser.add_argument("port", type=int)
  parser.add_argument("--one-gpu", action="store_true", help="all ranks share GPU 0")
  parser.add_argument("--shape", choices=SHAPES, default="check")
  parser.add_argument("--data", type=int, default=1, help="size of the data axis outside the expert axis")
  parser.add_argument("--bench", action="store_true", help="time ours and Transformer Engine's moe() instead of checking")
  parser.add_argument("--chunks", type=int, default=1, help="in how many parts a rank's tokens go through the group made for all of them")
  parser.add_argument("--capacity-factor", type=float, default=0.0, help="of that group; 0 for the worst case")
  parser.add_argument("--even", action="store_true", help="balanced routing instead of Dirichlet(1)")
  parser.add_argument("--keep", metavar="FOLDER", help="leave the profile of each rank there")
  parser.add_argument("--out")
  args = parser.parse_args()
  os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.3" if args.one_gpu else "0.7"  # NCCL EP allocates beside XLA's pool
  import jax

  devices = [0] if args.one_gpu else [args.rank]
  jax.distributed.initialize(f"127.0.0.1:{args.port}", args.ranks, args.rank, local_device_ids=devices)
  layer = Layer(args)
  result = layer.bench() if args.bench else layer.check()
  if args.rank == 0:
    print("RESULT", json.dumps(result), flush=True)
    if args.out:
      from tests.benchmarks import record

      record.write(args.out, result)
  from maxtext_moe_te.moe.transport import nccl_ep

  nccl_ep.finalize()


class Layer:
  """The layer on the mesh of all ranks, its inputs, and the oracle."""

  def __init__(self, args):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from maxtext_moe_te.moe import block, te_runtime
    from maxtext_moe_te.moe.experts import te
    from maxtext_moe_te.moe.rules import ExpertRule, RouterRule
    from maxtext_moe_te.moe.transport import nccl_ep

    self.args = args
    self.experts, self.k, batch, self.sequence, self.width, self.expert_width = SHAPES[args.shape]
    self.batch = batch * args.ranks
    expert_ranks = args.ranks // args.data
    self.mesh = Mesh(np.array(jax.devices()).reshape(args.data, expert_ranks), ("data", "expert"))
    self.layout = block.Layout(mesh=self.mesh, batch=("data", "expert"), expert=("expert",))
    self.group = nccl_ep.Bootstrap(
      num_experts=self.experts,
      experts_per_token=self.k,
      ranks=expert_ranks,
      max_tokens_per_rank=batch * self.sequence,
      width=self.width,
      capacity_factor=args.capacity_factor,
    )
    te_runtime.check_grouped_gemm(jax.devices()[0].compute_capability)
    te_runtime.prepare_nccl_ep()
    nccl_ep.bootstrap(self.group, self.mesh, "expert")
    self.parts = block.Parts(transport=nccl_ep.NcclEpTransport(self.group), grouped_matmul=te.grouped_matmul, chunks=args.chunks)
    self.spec = block.LayerSpec(
      num_experts=self.experts,
      router=RouterRule(experts_per_token=self.k),
      expert=ExpertRule(),
      dtype=jnp.dtype(jnp.bfloat16),
      sum_dtype=jnp.dtype(jnp.float32),
    )
    rng = np.random.default_rng(0)
    draw = lambda *dims, scale=1.0: (rng.standard_normal(dims, np.float32) * scale).astype(jnp.bfloat16)
    x = draw(self.batch, self.sequence, self.width)
    x[..., 0] = 1.0
    gate = draw(self.width, self.experts, scale=self.width**-0.5).astype(np.float32)
    if not args.even:
      gate[0] += np.log(rng.dirichlet(np.ones(self.experts)) * self.experts + 1e-3) * 0.5
    self.inputs = dict(
      x=x,
      gate=gate,
      fused=draw(self.experts, self.width, 2 * self.expert_width, scale=self.width**-0.5),
      down=draw(self.experts, self.expert_width, self.width, scale=self.expert_width**-0.5),
    )
    self.cotangent = draw(self.batch, self.sequence, self.width)

  def value_and_gradients(self, layout, parts, spec):
    """A function of (inputs, cotangent) -> (y, gradients)."""
    import jax
    import jax.numpy as jnp

    from maxtext_moe_te.moe import block, routing
    from maxtext_moe_te.moe.experts.base import ExpertWeights

    def scalar(inputs, cotangent):
      logits = jnp.dot(inputs["x"].astype(jnp.float32), inputs["gate"], precision="highest")
      out = block.moe_block(
        inputs["x"],
        logits,
        routing.RouterInputs(),
        ExpertWeights(down=inputs["down"], fused=inputs["fused"]),
        spec=spec,
        layout=layout,
        parts=parts,
      )
      return (out.y.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(), out

    return jax.value_and_grad(scalar, has_aux=True)

  def globally(self, array, spec):
    import jax
    from jax.sharding import NamedSharding

    return jax.make_array_from_callback(array.shape, NamedSharding(self.mesh, spec), lambda index: array[index])

  def on_mesh(self):
    from jax.sharding import PartitionSpec as P

    tokens, experts = P(("data", "expert")), P("expert")
    specs = dict(x=tokens, gate=P(), fused=experts, down=experts)
    return {n: self.globally(a, specs[n]) for n, a in self.inputs.items()}, self.globally(self.cotangent, tokens)

  def check(self):
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from maxtext_moe_te.moe import block
    from maxtext_moe_te.moe.experts import reference
    from maxtext_moe_te.moe.transport.local import LocalTransport

    inputs, cotangent = self.on_mesh()
    step = jax.jit(self.value_and_gradients(self.layout, self.parts, self.spec))
    runs = [step(inputs, cotangent) for _ in range(3)]
    (_, out), gradients = runs[0]
    one = Mesh(np.array(jax.local_devices()).reshape(1, 1), ("data", "expert"))
    oracle_parts = block.Parts(transport=LocalTransport(self.experts), grouped_matmul=reference.grouped_matmul)
    oracle_spec = dataclasses.replace(self.spec, dtype=jnp.dtype(jnp.float32))
    wide = {n: jnp.asarray(a, jnp.float32) for n, a in self.inputs.items()}
    oracle = jax.jit(self.value_and_gradients(block.Layout(mesh=one), oracle_parts, oracle_spec))
    (_, wanted), wanted_gradients = oracle(wide, jnp.asarray(self.cotangent, jnp.float32))
    rows, most, overflow = self.measured(out)
    errors = {"y": self.error(out.y, wanted.y)}
    errors |= {f"d_{n}": self.error(gradients[n], wanted_gradients[n]) for n in gradients}
    same = all(
      np.array_equal(np.asarray(s.data, np.float32), np.asarray(t.data, np.float32))
      for run in runs[1:]
      for s, t in zip(out.y.addressable_shards, run[0][1].y.addressable_shards)
    )
    return {
      "rank": self.args.rank,
      "errors": errors,
      "repeats_identical": same,
      "rows_equal": np.array_equal(rows, np.asarray(wanted.rows_per_expert)),
      "receive_rows_max": int(most),
      "receive_capacity": int(out.receive_capacity.addressable_data(0)),
      "overflow": int(overflow),
    }

  def measured(self, out):
    """Rows per expert, those of the fullest part of a rank, and how many parts overflowed, over all ranks."""
    import jax
    import numpy as np

    totals = jax.jit(lambda out: (out.rows_per_expert, out.received.max(), out.overflowed.sum()))(out)
    return [np.asarray(total.addressable_data(0)) for total in totals]

  def error(self, ours, wanted):
    """Relative Frobenius error of this rank's shards."""
    import numpy as np

    wanted = np.asarray(wanted, np.float64)
    norms = np.array([0.0, 0.0])
    for shard in ours.addressable_shards:
      part = wanted[shard.index]
      norms += [np.square(np.asarray(shard.data, np.float64) - part).sum(), np.square(part).sum()]
    return float(np.sqrt(norms[0] / norms[1]))

  def bench(self):
    import jax

    from tests.benchmarks import kernels, record

    inputs, cotangent = self.on_mesh()
    step = jax.jit(self.value_and_gradients(self.layout, self.parts, self.spec))
    rows_per_rank = self.batch * self.sequence * self.k / self.args.ranks
    tflop = 3 * 2 * rows_per_rank * 3 * self.width * self.expert_width / 1e12
    dims = zip(("experts", "k", "batch_per_rank", "sequence", "width", "expert_width"), SHAPES[self.args.shape])
    result = {"shape": {"name": self.args.shape, **dict(dims)}}
    routing = "even" if self.args.even else "Dirichlet(1)"
    result |= {"ranks": self.args.ranks, "routing": routing, "one_gpu": self.args.one_gpu}
    result |= {"capacity": self.group.capacity, "tflop_per_rank": tflop}
    ours = record.time_ms(step, inputs, cotangent)
    result["ours"] = ours | {"tflops": round(tflop / ours["median_ms"] * 1e3, 1)}
    kept = os.path.join(self.args.keep, str(self.args.rank)) if self.args.keep else ""
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder, create_perfetto_trace=True):
        for _ in range(3):
          jax.block_until_ready(step(inputs, cotangent))
      result["kernels"] = kernels.of_trace(folder, steps=3)
    _, out = step(inputs, cotangent)[0]
    result["receive_rows_max"] = int(self.measured(out)[1])
    try:
      upstream = record.time_ms(functools.partial(self.upstream(), cotangent=cotangent), inputs)
      result["te_moe"] = upstream | {"tflops": round(tflop / upstream["median_ms"] * 1e3, 1)}
    except Exception as error:  # the failure is the result
      result["te_moe"] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return result

  def upstream(self):
    """Transformer Engine's one-piece moe() on the same arrays and the same NCCL EP group."""
    import jax
    import jax.numpy as jnp
    from transformer_engine.jax import moe as te_moe
    from transformer_engine.jax.quantize import noop_quantizer_set
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    group = self.group
    te_moe.record_ep_bootstrap_signature_for_moe(
      num_experts=group.num_experts,
      max_tokens_per_rank=group.max_tokens_per_rank,
      recv_capacity_per_rank=group.capacity,
      hidden_dim=group.width,
      ep_size=group.ranks,
    )

    def scalar(inputs, cotangent):
      y, _, _ = te_moe.moe(
        inputs["x"],
        inputs["gate"].astype(jnp.bfloat16),
        inputs["fused"],
        inputs["down"],
        num_experts=self.experts,
        num_experts_per_tok=self.k,
        activation_type="silu",
        score_function="softmax",
        use_pre_softmax=False,
        apply_topk_weights_early=True,
        quantizer_sets=(noop_quantizer_set, noop_quantizer_set),
        ep_axis="expert",
        data_parallelism_axes=("data",) if self.args.data > 1 else (),
        dtype=jnp.bfloat16,
        recv_capacity_per_rank=group.capacity,
      )
      return (y.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum()

    step = jax.jit(jax.value_and_grad(scalar))

    def run(inputs, cotangent):
      resource = MeshResource(ep_resource="expert", dp_resource="data" if self.args.data > 1 else None)
      with jax.set_mesh(self.mesh), self.mesh, global_shard_guard(resource):
        return step(inputs, cotangent)

    return run


if __name__ == "__main__":
  sys.exit(main())
