"""A layer's tokens in parts, one after the other, so that only one part's receive buffers exist at a time.

Each part is computed anew in the backward pass: what would otherwise be kept of all parts is what the parts are to save. Compiled for 8
expert ranks and DeepSeek-V3's widths, 8 parts hold a third of the temporaries of one. Parts never overlap.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def in_chunks(run: Callable[[Any, Any], tuple[jax.Array, Any]], chunks: int, tokens: Any, weights: Any) -> tuple[jax.Array, Any]:
  """`run(tokens, weights)`, part by part.

  The weights' gradients are summed over parts in float32, so that more parts round no more than one does.

  Args:
    run: (tokens, weights) -> (y [T,D], integers or other results that have no gradient).
    chunks: C, number of parts; divides T.
    tokens: arrays [T, …]; integers among them have no gradient.
    weights: arrays that all parts share, or None among them.

  Returns:
    tuple: y [T,D]; the other results with a leading dim of C.
  """
  if chunks == 1:
    y, others = run(tokens, weights)
    return y, jax.tree.map(lambda a: jnp.asarray(a)[None], others)
  split = jax.tree.map(lambda a: a.reshape(chunks, a.shape[0] // chunks, *a.shape[1:]), tokens)
  y, others = _scanned(run, split, weights)
  return y.reshape(-1, *y.shape[2:]), others


def _forward(run, tokens, weights):
  return jax.lax.scan(lambda _, part: (None, run(part, weights)), None, tokens)[1]


def _scanned(run, tokens, weights):
  # Not jax.checkpoint in a scan: there the weights' gradients are summed in their own dtype, and rounded once per part.
  @jax.custom_vjp
  def scanned(tokens, weights):
    return _forward(run, tokens, weights)

  def forward(tokens, weights):
    return _forward(run, tokens, weights), (tokens, weights)

  def backward(residuals, gradients):
    tokens, weights = residuals

    def of_part(sums, part):
      part_tokens, d_y = part
      _, pull, _ = jax.vjp(run, part_tokens, weights, has_aux=True)
      d_tokens, d_weights = pull(d_y)
      sums = jax.tree.map(lambda total, d: total + d.astype(total.dtype), sums, d_weights)
      return sums, jax.tree.map(lambda d: None if d.dtype == jax.dtypes.float0 else d, d_tokens)

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), weights)
    sums, d_tokens = jax.lax.scan(of_part, zeros, (tokens, gradients[0]))
    return d_tokens, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, weights)

  scanned.defvjp(forward, backward)
  return scanned(tokens, weights)
