"""The activation that stops at the last row received, against the one that works through all rows: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe.experts import gated
from maxtext_moe_te.moe.experts.base import activate_all
from maxtext_moe_te.moe.rules import ExpertRule
from tests import helpers, tolerances

RULES = {
  "silu": ExpertRule(),
  "gpt-oss": ExpertRule(activation="sigmoid", clamp=7.0, gate_scale=1.702, self_gated=True, up_offset=1.0),
  "linear": ExpertRule(activation="linear"),
}
ROWS, WIDTH = 96, 640  # no power of two wide, so that a row is several tiles


def inputs(seed):
  random = np.random.default_rng(seed)
  draw = lambda *dims: random.standard_normal(dims, np.float32)
  return 3 * draw(ROWS, 2 * WIDTH), draw(ROWS), draw(ROWS, WIDTH)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("sizes", [(5, 0), (0, 40), (17, 40), (48, 48)])
@pytest.mark.parametrize("rule", RULES)
def test_rows_received(rule, sizes, weighted):
  first, weights, d_out = inputs(sum(sizes))
  group_sizes, received = jnp.array(sizes, jnp.int32), sum(sizes)
  d_out[received:] = 0  # what comes back for rows that were not received is nobody's
  weights = weights if weighted else None

  def of(activation):
    out, pull = jax.vjp(lambda first, weights: activation(RULES[rule], first, weights, group_sizes), first, weights)
    return out, *pull(d_out)

  ours, wanted = of(functools.partial(gated.activate_received, interpret=True)), of(activate_all)
  assert helpers.within("out", helpers.relative_error(ours[0][:received], wanted[0][:received]), tolerances.FLOAT32_FORWARD)
  for name, mine, theirs in zip(("d_first", "d_weights"), ours[1:], wanted[1:]):
    if theirs is not None:
      assert helpers.within(name, helpers.relative_error(mine[:received], theirs[:received]), tolerances.FLOAT32_GRADIENT)
  if weighted:
    assert not np.any(ours[2][received:]), "weights of rows that were not received"


def test_a_tile_past_the_last_row_is_left_alone():
  first, weights, _ = inputs(0)
  first[64:] = np.nan
  out = gated.activate_received(RULES["silu"], first, weights, jnp.array([20, 12], jnp.int32), interpret=True)
  assert np.isfinite(out[:32]).all()


@pytest.mark.parametrize(
  ("rule", "width", "reason"),
  [
    (ExpertRule(activation="gelu"), 512, "the activation gelu"),
    (ExpertRule(), 704, "an expert width of 704, no multiple of 128"),
    (ExpertRule(), 768, ""),
  ],
)
def test_what_it_serves(rule, width, reason):
  assert gated.reason_against(rule, width) == reason
