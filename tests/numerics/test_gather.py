"""The one pass over [rows, D] that every transport shares: bit for bit a copy, in any dtype and of any width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.moe.transport import base
from tests import helpers, tolerances

SLOT_OF_ROW = np.array([3, -1, 0, 5, 2, -1, 1, 4], np.int32)  # 3 tokens, K = 2, two unused rows
ROW_OF_SLOT = np.array([[2, 6], [4, 0], [7, 3]], np.int32)


def order(slot_of_row=SLOT_OF_ROW, row_of_slot=ROW_OF_SLOT):
  return base.RowOrder(jnp.asarray(slot_of_row), jnp.asarray(row_of_slot), jnp.array([8]), jnp.int32(8))


@pytest.mark.parametrize("width", [1, 2, 7, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_rows_are_copies(dtype, width):
  bits = np.random.default_rng(0).integers(0, 256, (3, width * jnp.dtype(dtype).itemsize), np.uint8)  # NaN and infinity among them
  x = bits.view(jnp.dtype(dtype))
  rows = np.asarray(base.gather_rows(jnp.asarray(x), order()))
  wanted = np.where((SLOT_OF_ROW >= 0)[:, None], x[SLOT_OF_ROW // 2], np.zeros((), x.dtype))
  assert np.array_equal(rows.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize(("tokens", "rows", "width"), [(0, 0, 8), (3, 0, 8), (3, 8, 0)])
def test_nothing_to_copy(tokens, rows, width):
  empty = order(SLOT_OF_ROW[:rows], ROW_OF_SLOT[:tokens])
  assert base.gather_rows(jnp.ones((tokens, width), jnp.bfloat16), empty).shape == (rows, width)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_gradients(dtype):
  """Through both directions: the backward pass of one is made of the other."""
  x, r = jnp.arange(24.0, dtype=dtype).reshape(3, 8) / 8, jnp.arange(64.0, dtype=dtype).reshape(8, 8) / 8

  def first(function, a):
    return jax.grad(lambda a: (function(a).astype(jnp.float32) ** 3).sum() / 64)(a)

  picks = (np.arange(6)[None, :] == SLOT_OF_ROW[:, None]).reshape(8, 3, 2).sum(2).astype(np.float32)  # [rows, tokens]
  for ours, plain, a in (
    (lambda x: base.gather_rows(x, order()), lambda x: (picks @ x.astype(jnp.float32)).astype(dtype), x),
    (lambda r: base.combine_rows(r, order(), jnp.float32), lambda r: picks.T @ r.astype(jnp.float32), r),
  ):
    twice = [jax.grad(lambda a, f=f: (first(f, a).astype(jnp.float32) ** 2).sum())(a) for f in (ours, plain)]
    assert np.abs(np.asarray(twice[1], np.float32)).max() > 0
    bound = tolerances.BFLOAT16_GRADIENT if dtype == "bfloat16" else tolerances.FLOAT32_FORWARD
    assert helpers.within("gradient", helpers.relative_error(*twice), bound)
