"""The activation that stops at the last row received, on a GPU, against XLA's in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe.experts import gated
from maxtext_moe_te.moe.experts.base import activate_all
from tests import helpers, tolerances
from tests.numerics.test_gated import RULES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", [(0, 0), (300, 1), (128, 900), (1024, 1024)])
@pytest.mark.parametrize("width", [768, 2048])
@pytest.mark.parametrize("rule", RULES)
def test_rows_received(rule, width, sizes):
  received, rows = sum(sizes), 2048
  keys = jax.random.split(jax.random.key(received), 3)
  first = (3 * jax.random.normal(keys[0], (rows, 2 * width))).astype(jnp.bfloat16).at[received:].set(jnp.nan)
  weights = jax.random.uniform(keys[1], (rows,)).at[received:].set(jnp.nan)
  d_out = jax.random.normal(keys[2], (rows, width), jnp.bfloat16).at[received:].set(jnp.nan)

  def of(activation, *arrays):
    out, pull = jax.vjp(lambda first, weights: activation(RULES[rule], first, weights, jnp.array(sizes, jnp.int32)), *arrays[:2])
    return out, *pull(arrays[2])

  ours = jax.jit(lambda *arrays: of(gated.activate_received, *arrays))(first, weights, d_out)
  with jax.default_matmul_precision("highest"):
    wanted = of(activate_all, *(a.astype(jnp.float32) for a in (first, weights, d_out)))
  assert not np.any(np.asarray(ours[2])[received:])
  for name, mine, theirs in zip(("out", "d_first", "d_weights"), ours, wanted):
    if received:
      error = helpers.relative_error(np.asarray(mine[:received], np.float32), np.asarray(theirs[:received]))
      assert helpers.within(name, error, tolerances.BFLOAT16_ROUNDING)
