"""The gated activation and the row weights as one kernel that stops at the last row received.

A rank's receive buffer holds the worst case, R rows; most steps fill a part of it. XLA's elementwise code works through all of R, three
times in a step, and may widen it to float32 in memory. Here a tile past the last row ends at once: the work goes with the rows received.
Where the buffer is full, XLA's is as fast.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxtext_moe_te.moe.experts.base import activate
from maxtext_moe_te.moe.rules import ExpertRule

try:
  from jax.experimental.pallas import triton
except ImportError:  # deprecated in JAX 0.12
  triton = None

ACTIVATIONS = ("silu", "sigmoid", "relu", "linear", "")  # what Triton computes as XLA does
ROWS, WIDTH, WARPS = 16, 512, 4  # of a tile, and who works on it
LEAST_ROWS, LEAST_WIDTH = 8, 128


def reason_against(rule: ExpertRule, width: int) -> str:
  """Why the kernel does not serve experts of this rule and this F on one rank, or nothing."""
  if triton is None:
    return "a JAX whose Pallas writes no Triton kernels"
  if rule.activation not in ACTIVATIONS:
    return f"the activation {rule.activation}"
  return "" if width % LEAST_WIDTH == 0 else f"an expert width of {width}, no multiple of {LEAST_WIDTH}"


def activate_received(
  rule: ExpertRule, first: jax.Array, row_weights: jax.Array | None, group_sizes: jax.Array, interpret: bool = False
) -> jax.Array:
  """Activates the rows of all groups and weights them, in float32 in between.

  Args:
    rule: the expert rule.
    first: [R,2F], the gate half first.
    row_weights: float32 [R], or None for weights of 1.
    group_sizes: int32 [e].
    interpret: run without a GPU, slowly.

  Returns:
    [R,F] in the dtype of `first`. Rows past the last group's, as those of its gradients, are undefined.
  """
  if row_weights is None:
    row_weights = jnp.ones((first.shape[0],), jnp.float32)
  return _activated(rule, interpret, first, row_weights, group_sizes.sum(dtype=jnp.int32)[None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _activated(rule, interpret, first, row_weights, count):
  return _forward(rule, interpret, first, row_weights, count)[0]


def _forward(rule, interpret, first, row_weights, count):
  tiles = _Tiles(first.shape[0], first.shape[1] // 2, interpret)

  def kernel(count, first, weights, out):
    out[...] = _weighted(rule)(*_loaded(first, weights)).astype(out.dtype)

  wanted = {"half": jax.ShapeDtypeStruct((tiles.all_rows, tiles.all_width), first.dtype)}
  (out,) = tiles.call(kernel, wanted, count=count, both=first.reshape(tiles.all_rows, 2, tiles.all_width), rows=row_weights)
  return out, (first, row_weights, count)


def _backward(rule, interpret, residuals, d_out):
  first, row_weights, count = residuals
  tiles = _Tiles(*d_out.shape, interpret)

  def kernel(count, first, weights, d_out, d_first, d_weights):
    _, pull = jax.vjp(_weighted(rule), *_loaded(first, weights))
    d_gate, d_up, d_of_rows = pull(d_out[...].astype(jnp.float32))
    d_first[:, 0, :], d_first[:, 1, :] = d_gate.astype(d_first.dtype), d_up.astype(d_first.dtype)
    d_weights[...] = d_of_rows

  both = first.reshape(tiles.all_rows, 2, tiles.all_width)
  wanted = {
    "both": jax.ShapeDtypeStruct(both.shape, first.dtype),
    "sums": jax.ShapeDtypeStruct((tiles.all_width // tiles.width, tiles.all_rows), jnp.float32),
  }
  d_first, d_weights = tiles.call(kernel, wanted, count=count, both=both, rows=row_weights, half=d_out)
  d_weights = jnp.where(jnp.arange(tiles.all_rows) < count, d_weights.sum(0), 0)
  return d_first.reshape(first.shape), d_weights, None


_activated.defvjp(_forward, _backward)


def _weighted(rule):
  return lambda gate, up, weights: activate(rule, gate, up) * weights[:, None]


def _loaded(first, weights):
  """A tile's halves and weights, in float32."""
  return first[:, 0, :].astype(jnp.float32), first[:, 1, :].astype(jnp.float32), weights[...]


class _Tiles:
  """How [R,F] is cut, and how a kernel is called on each tile that holds a row received."""

  def __init__(self, rows: int, width: int, interpret: bool):
    self.all_rows, self.all_width, self._interpret = rows, width, interpret
    self.rows = next((size for size in (ROWS, LEAST_ROWS) if rows % size == 0), 1)
    self.width = next(size for size in (WIDTH, WIDTH // 2, LEAST_WIDTH) if width % size == 0)
    self._specs = dict(
      count=pl.BlockSpec((1,), lambda i, j: (0,)),
      both=pl.BlockSpec((self.rows, 2, self.width), lambda i, j: (i, 0, j)),
      half=pl.BlockSpec((self.rows, self.width), lambda i, j: (i, j)),
      rows=pl.BlockSpec((self.rows,), lambda i, j: (i,)),
      sums=pl.BlockSpec((None, self.rows), lambda i, j: (j, i)),
    )

  def call(self, kernel, wanted, **arrays):
    """`kernel` on the tiles of `arrays`, the first of which is the number of rows received; both by the names of `_specs`."""

    def of_tile(count, *refs):
      pl.when(pl.program_id(0) * self.rows < count[0])(lambda: kernel(count, *refs))

    return pl.pallas_call(
      of_tile,
      grid=(self.all_rows // self.rows, self.all_width // self.width),
      in_specs=[self._specs[name] for name in arrays],
      out_specs=[self._specs[name] for name in wanted],
      out_shape=list(wanted.values()),
      compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
      interpret=self._interpret,
      name=kernel.__qualname__.partition(".")[0].strip("_") + "_received_rows",
    )(*arrays.values())
