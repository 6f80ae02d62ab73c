"""What the layer measures: each device's own numbers, which add up over microbatches, layers and devices, and cost no collective there."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe import block
from maxtext_moe_te.moe.experts import reference
from maxtext_moe_te.moe.transport.xla import XlaTransport
from tests.numerics import contract


def test_the_largest_demand_survives_a_sum():
  random = np.random.default_rng(0)
  balanced = 4096
  edges = [block.demand_histogram(jnp.asarray([int(balanced * 2 ** ((i + 1) / 8))]), balanced).argmax() for i in range(64)]
  assert edges == list(range(64)), "a bin has its upper edge"
  for most in random.integers(1, 60 * balanced, 50):
    rows = jnp.asarray(np.append(random.integers(0, most, 30), most), jnp.int32)
    summed = sum(block.demand_histogram(part, balanced) for part in jnp.split(rows, [3, 10, 11]))
    assert summed.sum() == rows.size
    named = float(block.largest_demand(summed)) * balanced
    assert most <= named + 1 and (named <= 1.1 * most or most < balanced)


@pytest.fixture
def problem():
  case = dataclasses.replace(contract.CASES["softmax"], batch=8)
  mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  layout = block.Layout(mesh=mesh, batch=("data", "expert"), expert=("expert",))
  spec = block.LayerSpec(
    num_experts=case.experts, router=case.router, expert=case.expert, dtype=jnp.dtype(jnp.float32), sum_dtype=jnp.dtype(jnp.float32)
  )
  parts = block.Parts(transport=XlaTransport(case.experts, ("expert",), 4, True), grouped_matmul=reference.grouped_matmul, chunks=2)
  return spec, layout, parts, *contract.make_arrays(spec, case)


def test_measuring_takes_no_collective_in_the_layer(problem):
  spec, layout, parts, arrays, _ = problem

  def layer(measured, x, logits, router_inputs, weights):
    out = block.moe_block(x, logits, router_inputs, weights, spec=spec, layout=layout, parts=parts)
    return [out.y, *(getattr(out, name) for name in measured)]

  def collectives(*measured):
    text = jax.jit(layer, static_argnums=0).lower(measured, *arrays.values()).compile().as_text()
    return len(re.findall(r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text))

  assert collectives("rows", "received", "overflowed", "demand", "receive_capacity") == collectives() > 0
  assert collectives("rows_per_expert") > collectives(), "what is summed is seen"


def test_what_is_measured_is_what_was_sent(problem):
  spec, layout, parts, arrays, _ = problem
  out = jax.jit(lambda x, *rest: block.moe_block(x, *rest, spec=spec, layout=layout, parts=parts))(*arrays.values())
  k = spec.router.experts_per_token
  tokens = arrays["x"].shape[0] * arrays["x"].shape[1]
  assert out.rows.shape == (8, spec.num_experts) and (out.rows.sum(1) == tokens * k // 8).all()
  chosen = jax.lax.top_k(arrays["logits"], k)[1]
  np.testing.assert_array_equal(out.rows_per_expert, np.bincount(np.ravel(chosen), minlength=spec.num_experts))
  assert out.received.shape == out.overflowed.shape == (8,) and out.demand.shape == (8, block.DEMAND_BINS)
  assert (out.demand.sum(1) == parts.chunks).all()
