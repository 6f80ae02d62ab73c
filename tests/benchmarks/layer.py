"""One MoE layer, forward and backward, bfloat16, uneven routing: ours against MaxText's own paths and the dense ceiling.

    python -m tests.benchmarks.layer --shape deepseek3 --out tests/benchmarks/results/layer-deepseek3-h200.json

Everything between the layer's input and output is timed: gate, router, sort, gather, products, combine, and all their gradients. The
rate counts only the expert products: 3 x 2 x rows x 3 x D x F. The ceiling is a dense bfloat16 product of the same rows and widths
in the same process. An implementation that fails is recorded with its error.
"""

import argparse
import functools
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from tests import helpers
from tests.benchmarks import kernels, record

SHAPES = {
  # E experts on this rank, K rows per token, T tokens, D, F; `forced`: routing ids are drawn, not computed, because K = E here
  "deepseek3": dict(model="deepseek3-671b", experts=8, k=8, tokens=8192, width=7168, expert_width=2048, forced=True),
  "qwen3": dict(model="qwen3-30b-a3b", experts=128, k=8, tokens=16384, width=2048, expert_width=768, forced=False),
  "mixtral": dict(model="mixtral-8x7b", experts=8, k=2, tokens=8192, width=4096, expert_width=14336, forced=False),
  "tiny": dict(model="qwen3-30b-a3b", experts=8, k=2, tokens=256, width=256, expert_width=128, forced=False),
}
IMPLEMENTATIONS = {
  "te": ("ours", dict(experts="te")),
  "ours_ragged_dot": ("ours", dict(experts="ragged_dot")),
  "maxtext_tokamax": ("maxtext", dict(use_tokamax_gmm=True)),
  "maxtext_ragged_dot": ("maxtext", dict(use_tokamax_gmm=False)),
}


def config_of(shape, prefused, **more):
  sequence = 4096 if shape["tokens"] % 4096 == 0 else shape["tokens"]
  return helpers.maxtext_config(
    shape["model"],
    hardware="gpu" if jax.default_backend() == "gpu" else "cpu",
    dtype="bfloat16",
    weight_dtype="bfloat16",
    matmul_precision="default",
    base_emb_dim=shape["width"],
    base_moe_mlp_dim=shape["expert_width"],
    base_mlp_dim=shape["expert_width"],
    num_experts=shape["experts"],
    num_experts_per_tok=shape["k"],
    max_target_length=sequence,
    per_device_batch_size=shape["tokens"] // sequence,
    ici_fsdp_parallelism=1,
    load_balance_loss_weight=0.0,
    routed_bias_update_rate=0.0,
    n_routing_groups=-1,
    topk_routing_group=-1,
    attention="dot_product",
    prefuse_moe_weights=prefused,
    **more,
  )


def inputs_of(shape, config, seed=0):
  """(x, cotangent, ids or None, rows per expert wanted): loads follow Dirichlet(1)."""
  rng = np.random.default_rng(seed)
  load = rng.dirichlet(np.ones(shape["experts"]))
  batch = shape["tokens"] // config.max_target_length
  dims = (batch, config.max_target_length, shape["width"])
  x = rng.standard_normal(dims, np.float32)
  ids = None
  if shape["forced"]:
    ids = jnp.asarray(rng.choice(shape["experts"], (*dims[:2], shape["k"]), p=load), jnp.int32)
  else:
    x[..., 0] = 1.0  # reads the row of the gate kernel that carries the uneven preference
  return jnp.asarray(x, jnp.bfloat16), jnp.asarray(rng.standard_normal(dims, np.float32), jnp.bfloat16), ids, load


def layer_step(kind, options, shape, prefused):
  """(jitted value-and-gradients, its arguments, rows per expert)."""
  from flax import nnx
  from flax.linen import partitioning
  from maxtext.layers import moe

  config = config_of(shape, prefused, **(options if kind == "maxtext" else {}))
  mesh = helpers.mesh_of(config, 1)
  module = helpers.routed_moe(config, mesh)
  x, cotangent, ids, load = inputs_of(shape, config)
  if ids is None:
    preference = np.log(load * shape["experts"] + 1e-3) * 0.5
    module.gate.kernel[...] = module.gate.kernel[...].at[0].set(jnp.asarray(preference, module.gate.kernel.dtype))
  call = helpers.our_call(**options) if kind == "ours" else moe.RoutedMoE.__call__
  graph, state = nnx.split(module)

  @jax.jit
  def step(state, x, ids, cotangent):
    def scalar(state, x):
      y, _, _ = call(nnx.merge(graph, state), x, forced_routed_experts=ids)
      return (y.astype(jnp.float32) * cotangent).sum()

    return jax.value_and_grad(scalar, argnums=(0, 1), allow_int=True)(state, x)

  def run(*arguments):
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
      return step(*arguments)

  return run, (state, x, ids, cotangent)


def dense_ceiling(shape):
  """Milliseconds of the same products with one expert: [R,D] x [D,2F], [R,F] x [F,D], forward and backward."""
  rows, width, expert_width = shape["tokens"] * shape["k"], shape["width"], shape["expert_width"]
  keys = jax.random.split(jax.random.key(0), 4)
  make = lambda key, *dims: jax.random.normal(key, dims, jnp.bfloat16)

  @functools.partial(jax.jit)
  def products(x, h, up, down, d_h, d_y):
    first, second = lambda x, up: x @ up, lambda h, down: h @ down
    a, a_vjp = jax.vjp(first, x, up)
    b, b_vjp = jax.vjp(second, h, down)
    return a, b, a_vjp(d_h), b_vjp(d_y)

  x, h = make(keys[0], rows, width), make(keys[1], rows, expert_width)
  up, down = make(keys[2], width, 2 * expert_width), make(keys[3], expert_width, width)
  d_h, d_y = make(keys[1], rows, 2 * expert_width), make(keys[0], rows, width)
  return record.time_ms(products, x, h, up, down, d_h, d_y)


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--shape", choices=SHAPES, required=True)
  parser.add_argument("--only", nargs="*", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
  parser.add_argument("--tokens", type=int, help="instead of the shape's")
  parser.add_argument("--unfused", action="store_true", help="gate and up kernels as two parameters")
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  import pytest  # noqa: F401  MaxText initializes jax.distributed unless a test framework is loaded

  shape = SHAPES[args.shape] | ({"tokens": args.tokens} if args.tokens else {})
  tflop = 3 * 2 * shape["tokens"] * shape["k"] * 3 * shape["width"] * shape["expert_width"] / 1e12
  results = {"shape": {"name": args.shape, **shape}, "prefused": not args.unfused, "tflop": round(tflop, 3), "layer": {}}
  results["dense"] = dense_ceiling(shape)
  results["dense"]["tflops"] = round(tflop / results["dense"]["median_ms"] * 1e3, 1)
  print("dense", json.dumps(results["dense"]), flush=True)
  for name in args.only:
    kind, options = IMPLEMENTATIONS[name]
    try:
      run, arguments = layer_step(kind, options, shape, not args.unfused)
      timing = record.time_ms(run, *arguments, repeats=20 if "ragged_dot" not in name else 5)
      timing["tflops"] = round(tflop / timing["median_ms"] * 1e3, 1)
      timing["of_dense"] = round(timing["tflops"] / results["dense"]["tflops"], 3)
      if name == "te":
        with tempfile.TemporaryDirectory() as folder:
          with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(3):
              jax.block_until_ready(run(*arguments))
          results["kernels"] = kernels.of_trace(folder, steps=3)
        print(json.dumps(results["kernels"]["by_class_ms"]), flush=True)
    except Exception as error:  # the failure is the result
      timing = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    results["layer"][name] = timing
    print(name, json.dumps(timing), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
