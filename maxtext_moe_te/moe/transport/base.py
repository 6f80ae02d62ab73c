"""What a transport is: it brings rows to the rank that holds their expert, and their results back.

Owns the row order (which row comes from which token) and the passes over [rows, D] that transports share, with hand-written
gradients: both directions gather, neither scatters. A token's combine weight travels with its row and is applied by the expert, so
that nothing here multiplies [rows, D].
"""

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class RowOrder(NamedTuple):
  """Which rows a rank computes, grouped by expert.

  Attributes:
    slot_of_row: int32 [R], index into the flattened [N,K] selection, i.e. token * K + k; negative in unused rows.
    row_of_slot: int32 [N,K], the row that holds a selection, or R where it is not computed here.
    group_sizes: int32 [e], rows of each local expert, unused ones that align the next expert included.
    received: int32 scalar, rows asked for, those that align the next expert included; more than R is an overflow.
  """

  slot_of_row: jax.Array
  row_of_slot: jax.Array
  group_sizes: jax.Array
  received: jax.Array


class Dispatched(NamedTuple):
  """What the experts get, and what `combine` needs afterwards.

  Attributes:
    rows: [R,D], grouped by local expert; unused rows are zero or, past the sum of group_sizes, undefined.
    row_weights: float32 [R], the combine weight of each row; zero or undefined likewise.
    group_sizes: int32 [e].
    received: int32 scalar, rows this rank was sent, whether or not they fit.
    handle: the transport's own, opaque to others.
  """

  rows: jax.Array
  row_weights: jax.Array
  group_sizes: jax.Array
  received: jax.Array
  handle: tuple


class Transport(Protocol):
  """One way to move rows. Called inside a shard_map in which every mesh axis is manual."""

  name: str

  def dispatch(self, x: jax.Array, experts: jax.Array, weights: jax.Array, *, distinct: bool) -> Dispatched:
    """x [T,D], experts int32 [T,K], weights [T,K] -> rows for this rank's experts.

    `distinct` promises that no token names an expert twice. Ids outside [0, E) are sent nowhere.
    """

  def combine(self, rows: jax.Array, handle: tuple, *, sum_dtype) -> jax.Array:
    """rows [R,D], weighted by the experts -> [T,D] in `sum_dtype`: the sum over each token's experts."""


def order_rows(experts: jax.Array, *, first, count: int, capacity: int, alignment: int = 1) -> RowOrder:
  """Groups the selections that name experts [first, first + count) by expert, in token order within an expert.

  Args:
    experts: int32 [N,K].
    first: first local expert; a traced scalar or an int.
    count: e, local experts.
    capacity: R; selections past it are left out, and `received` says so.
    alignment: each expert's rows start at a multiple of this.

  Returns:
    RowOrder.
  """
  slots = experts.size
  local = experts.reshape(-1) - first
  key = jnp.where((local >= 0) & (local < count), local, count)
  sizes = (key[:, None] == jnp.arange(count, dtype=key.dtype)).sum(0, dtype=jnp.int32)
  aligned = -(-sizes // alignment) * alignment
  sorted_key, slot = jax.lax.sort_key_val(key, jnp.arange(slots, dtype=jnp.int32), is_stable=True)
  row = jnp.arange(slots, dtype=jnp.int32)
  if alignment > 1:  # shift each expert's run to its aligned start
    shift = jnp.cumsum(aligned - sizes) - (aligned - sizes)
    row = row + jnp.take(shift, sorted_key, mode="clip")
  row = jnp.where(sorted_key < count, row, capacity)
  if alignment == 1:
    slot_of_row = jnp.where(row < capacity, slot, -1)[:capacity]
  else:
    unused = jnp.full((capacity,), -1, jnp.int32)
    # Rows that do not exist go past the end, each to its own place, so that indices stay unique.
    target = jnp.where(row < capacity, row, capacity + jnp.arange(slots, dtype=jnp.int32))
    slot_of_row = unused.at[target].set(slot, mode="drop", unique_indices=True)
  row_of_slot = jnp.zeros((slots,), jnp.int32).at[slot].set(jnp.minimum(row, capacity), unique_indices=True)
  held = jnp.diff(jnp.minimum(jnp.cumsum(aligned), capacity), prepend=0)
  return RowOrder(slot_of_row, row_of_slot.reshape(experts.shape), held, aligned.sum() if alignment > 1 else sizes.sum())


def _rows_of_tokens(rows: jax.Array, row_of_slot: jax.Array) -> jax.Array:
  """rows [R,...] at row_of_slot [N,K] -> [N,K,...]; zero where a selection was not computed here."""
  return jnp.take(rows, row_of_slot, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def gather_rows(x: jax.Array, order: RowOrder) -> jax.Array:
  """x [N,D] -> rows [R,D]; unused rows are zero."""
  # In pairs of 2-byte numbers where there are pairs: XLA's kernel moves four elements per thread and waits for memory most of the time.
  # Filling, not `where`: under a scan, JAX keeps a loop-invariant array of zeros [R,D] for the whole step and reads it in each layer.
  tokens = order.slot_of_row // order.row_of_slot.shape[1]
  pick = lambda a: a.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)
  if x.dtype.itemsize != 2 or x.shape[1] % 2:
    return pick(x)
  pairs = jax.lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // 2, 2), jnp.uint32)
  return jax.lax.bitcast_convert_type(pick(pairs), x.dtype).reshape(tokens.shape[0], x.shape[1])


def _gather_rows_fwd(x, order):
  return gather_rows(x, order), order


def _gather_rows_bwd(order, d_rows):
  d_x = _rows_of_tokens(d_rows, order.row_of_slot).sum(1, dtype=jnp.promote_types(d_rows.dtype, jnp.float32))
  return d_x.astype(d_rows.dtype), None


gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@jax.custom_vjp
def gather_weights(weights: jax.Array, order: RowOrder) -> jax.Array:
  """weights [N,K] -> [R]; zero in unused rows."""
  picked = jnp.take(weights.reshape(-1), jnp.maximum(order.slot_of_row, 0), mode="clip")
  return jnp.where(order.slot_of_row >= 0, picked, 0)


def _gather_weights_fwd(weights, order):
  return gather_weights(weights, order), order


def _gather_weights_bwd(order, d_row_weights):
  return _rows_of_tokens(d_row_weights, order.row_of_slot), None


gather_weights.defvjp(_gather_weights_fwd, _gather_weights_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine_rows(rows: jax.Array, order: RowOrder, sum_dtype) -> jax.Array:
  """sum_k rows[row_of_slot[n,k]] in `sum_dtype`: rows [R,D] -> [N,D]."""
  return _rows_of_tokens(rows, order.row_of_slot).sum(1, dtype=sum_dtype)


def _combine_rows_fwd(rows, order, sum_dtype):
  return combine_rows(rows, order, sum_dtype), (order, jnp.zeros((), rows.dtype))


def _combine_rows_bwd(sum_dtype, residuals, d_y):
  del sum_dtype
  order, of_rows = residuals
  return gather_rows(d_y.astype(of_rows.dtype), order), None


combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)
