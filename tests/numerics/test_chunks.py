"""A layer whose tokens go through the experts in parts: the same numbers, from less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe.chunks import in_chunks
from tests import helpers

T, D, F = 64, 8, 16


def run(tokens, weights):
  x, ids = tokens
  y = jnp.tanh(x @ weights["a"]) @ weights["b"] * ids[:, None]
  return y, (ids.sum(), x.shape[0])


@pytest.fixture
def arguments():
  keys = jax.random.split(jax.random.key(0), 4)
  weights = {"a": jax.random.normal(keys[0], (D, F)), "b": jax.random.normal(keys[1], (F, D)), "none": None}
  return (jax.random.normal(keys[2], (T, D)), jnp.arange(T) % 3), weights, jax.random.normal(keys[3], (T, D))


def value_and_gradients(chunks, tokens, weights, cotangent):
  def scalar(x, weights):
    y, others = in_chunks(run, chunks, (x, tokens[1]), weights)
    return (y * cotangent).sum(), (y, others)

  return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))(tokens[0], weights)


@pytest.mark.parametrize("chunks", [2, 8, T])
def test_values_and_gradients(arguments, chunks):
  (_, (y, others)), gradients = value_and_gradients(1, *arguments)
  (_, (y_parts, others_parts)), in_parts = value_and_gradients(chunks, *arguments)
  helpers.within("y", helpers.relative_error(y_parts, y), 1e-6)
  for part, whole in zip(jax.tree.leaves(in_parts), jax.tree.leaves(gradients), strict=True):
    assert part.dtype == whole.dtype
    helpers.within("gradient", helpers.relative_error(part, whole), 1e-6)
  assert others_parts[0].shape == (chunks,) and others_parts[0].sum() == others[0].sum()
  assert (others_parts[1] == T // chunks).all() and (others[1] == T).all()


def test_gradients_of_weights_are_summed_in_float32(arguments):
  """In bfloat16, 64 sums would lose what one does not."""
  (x, ids), weights, cotangent = arguments
  cast = functools.partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
  _, (_, exact) = value_and_gradients(1, (cast(x).astype(jnp.float32), ids), jax.tree.map(jnp.float32, cast(weights)), cotangent)
  _, (_, whole) = value_and_gradients(1, (cast(x), ids), cast(weights), cotangent)
  _, (_, parts) = value_and_gradients(T, (cast(x), ids), cast(weights), cotangent)
  for name in ("a", "b"):
    error, of_whole = (helpers.relative_error(np.float32(found[name]), exact[name]) for found in (parts, whole))
    assert error < 1.5 * of_whole + 2**-9


@pytest.mark.host
def test_memory():
  """Compiled, forward and backward, on 8 ranks: the worst case of one part of eight is held, not of all tokens."""
  from flax import nnx
  from flax.linen import partitioning

  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=8, ici_fsdp_parallelism=1, max_target_length=512)
  mesh = helpers.mesh_of(config, 8)
  graph, state = nnx.split(helpers.routed_moe(config, mesh))
  x, _ = helpers.layer_inputs(config)
  temporaries = {}
  for chunks in (1, 8):
    call = helpers.our_call(chunks=chunks)
    scalar = lambda state, x, call=call: call(nnx.merge(graph, state), x)[0].sum()
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
      compiled = jax.jit(jax.grad(scalar, argnums=(0, 1), allow_int=True)).lower(state, x).compile()
    temporaries[chunks] = compiled.memory_analysis().temp_size_in_bytes
  assert temporaries[8] < 0.5 * temporaries[1], temporaries
