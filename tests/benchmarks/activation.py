"""The gated activation between an expert's products, forward and backward: the kernel that stops at the last row received, and XLA's.

    python -m tests.benchmarks.activation --out tests/benchmarks/results/activation-h200.json

For a full receive buffer, half of it and an eighth. Each time is the median over calls of one call that runs it `CALLS` times, divided.
"""

import argparse
import json

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.experts import gated
from maxtext_moe_te.moe.experts.base import activate_all
from maxtext_moe_te.moe.rules import ExpertRule
from tests.benchmarks import record

SHAPES = {"deepseek3": (131072, 2048), "qwen3": (131072, 768)}  # R, F
SHARES = (1.0, 0.5, 0.125)
CALLS = 8


def repeated(activation, sizes):
  """Value and gradients, over and over: each call's gradient is the next one's input, so that none is left out."""

  def once(carry, _):
    first, weights, d_out = carry
    out, pull = jax.vjp(lambda first, weights: activation(ExpertRule(), first, weights, sizes), first, weights)
    d_first, d_weights = pull(d_out)
    return (d_first, d_weights, out), None

  return jax.jit(lambda *arrays: jax.lax.scan(once, arrays, None, length=CALLS)[0])


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  results = {"calls": CALLS, "shapes": {}}
  for name, (rows, width) in SHAPES.items():
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
      jax.random.normal(keys[0], (rows, 2 * width), jnp.bfloat16),
      jax.random.uniform(keys[1], (rows,), jnp.float32),
      jax.random.normal(keys[2], (rows, width), jnp.bfloat16),
    )
    found = {}
    for share in SHARES:
      sizes = jnp.array([int(rows * share) // 4] * 4, jnp.int32)
      for activation in (activate_all, gated.activate_received):
        times = record.time_ms(repeated(activation, sizes), *arrays)
        found[f"{activation.__name__}, {share:g} of {rows} rows"] = {k: round(v / CALLS, 4) for k, v in times.items() if k.endswith("ms")}
    results["shapes"][name] = {"rows": rows, "width": width, "times": found}
    print(name, json.dumps(found), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
