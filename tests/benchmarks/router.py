"""The router alone, forward and backward, bfloat16 layer with float32 logits: ours in JAX against Transformer Engine's kernel.

python -m tests.benchmarks.router --out tests/benchmarks/results/router-h200.json
"""

import argparse
import json

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe import routing, te_router
from maxtext_moe_te.moe.rules import RouterRule
from tests.benchmarks import record
from tests.unit.test_te_router import DEEPSEEK3

SHAPES = {"deepseek3": (DEEPSEEK3, 8192, 256), "qwen3": (RouterRule(experts_per_token=8, renormalize=True), 16384, 128)}


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  results = {}
  for name, (rule, tokens, experts) in SHAPES.items():
    keys = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(keys[0], (1, tokens, experts))
    cotangent = jax.random.normal(keys[1], (1, tokens, rule.experts_per_token))
    inputs = routing.RouterInputs(bias=0.1 * jax.random.normal(keys[2], (experts,)) if rule.bias else None)
    results[name] = {"tokens": tokens, "experts": experts, "rule": str(rule)}
    for router in (routing, te_router):

      def scalar(logits, router=router, rule=rule, inputs=inputs, cotangent=cotangent):
        routed = router.route(rule, logits, inputs, dtype=jnp.bfloat16)
        return (routed.weights.astype(jnp.float32) * cotangent).sum(), routed.experts

      results[name][router.__name__.rpartition(".")[2]] = record.time_ms(jax.jit(jax.value_and_grad(scalar, has_aux=True)), logits)
    print(name, json.dumps(results[name]), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
