"""What a transport is: it brings rows to the rank that holds their expert, and their results back.

Owns the row order (which row comes from which token) and the two passes over [rows, D] that every transport shares, with
hand-written gradients: both directions gather, neither scatters.
"""

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class RowOrder(NamedTuple):
  """Which rows a rank computes, grouped by expert.

  Attributes:
    token_of_row: int32 [R], index of the token a row copies.
    slot_of_row: int32 [R], index into the flattened [N,K] selection, i.e. token * K + k.
    row_of_slot: int32 [N,K], the row that holds a selection, or R where it is not computed here.
    group_sizes: int32 [e], rows of each local expert. Rows past their sum are unused.
  """

  token_of_row: jax.Array
  slot_of_row: jax.Array
  row_of_slot: jax.Array
  group_sizes: jax.Array

  @property
  def used(self):
    """bool [R]: rows that hold a token."""
    return jnp.arange(self.token_of_row.shape[0]) < self.group_sizes.sum()


class Dispatched(NamedTuple):
  """What the experts get, and what `combine` needs afterwards.

  Attributes:
    rows: [R,D], grouped by local expert; unused rows are zero.
    group_sizes: int32 [e].
    handle: the transport's own, opaque to others.
  """

  rows: jax.Array
  group_sizes: jax.Array
  handle: tuple


class Transport(Protocol):
  """One way to move rows. Called inside a shard_map in which every mesh axis is manual."""

  name: str

  def dispatch(self, x: jax.Array, experts: jax.Array, weights: jax.Array, *, distinct: bool) -> Dispatched:
    """x [T,D], experts int32 [T,K], weights [T,K] -> rows for this rank's experts.

    `distinct` promises that no token names an expert twice. Ids outside [0, E) are sent nowhere.
    """

  def combine(self, rows: jax.Array, handle: tuple, *, sum_dtype) -> jax.Array:
    """rows [R,D] as the experts left them -> [T,D] in `sum_dtype`: the weighted sum over each token's experts."""


def order_rows(experts: jax.Array, *, first, count: int, capacity: int) -> RowOrder:
  """Groups the selections that name experts [first, first + count) by expert, in token order within an expert.

  Args:
    experts: int32 [N,K].
    first: first local expert; a traced scalar or an int.
    count: e, local experts.
    capacity: R; selections past it would be lost, so give `capacity.worst_case_rows`.

  Returns:
    RowOrder.
  """
  slots = experts.size
  local = experts.reshape(-1) - first
  key = jnp.where((local >= 0) & (local < count), local, count)
  sorted_key, order = jax.lax.sort_key_val(key, jnp.arange(slots, dtype=jnp.int32), is_stable=True)
  ends = jnp.searchsorted(sorted_key, jnp.arange(count, dtype=key.dtype), side="right").astype(jnp.int32)
  row = jnp.arange(slots, dtype=jnp.int32)
  row_of_slot = jnp.zeros((slots,), jnp.int32).at[order].set(jnp.where(row < ends[-1], row, capacity), unique_indices=True)
  return RowOrder(
      token_of_row=order[:capacity] // experts.shape[-1],
      slot_of_row=order[:capacity],
      row_of_slot=row_of_slot.reshape(experts.shape),
      group_sizes=jnp.diff(ends, prepend=0),
  )


def _rows_of_tokens(rows: jax.Array, order: RowOrder) -> jax.Array:
  """[N,K,D]: the row of each selection, zero where it was not computed here."""
  picked = jnp.take(rows, order.row_of_slot, axis=0, mode="clip")
  return jnp.where((order.row_of_slot < rows.shape[0])[..., None], picked, 0)


@jax.custom_vjp
def gather_rows(x: jax.Array, order: RowOrder) -> jax.Array:
  """x [N,D] -> rows [R,D]; unused rows are zero."""
  return jnp.where(order.used[:, None], jnp.take(x, order.token_of_row, axis=0, mode="clip"), 0)


def _gather_rows_fwd(x, order):
  return gather_rows(x, order), order


def _gather_rows_bwd(order, d_rows):
  d_x = _rows_of_tokens(d_rows, order).astype(jnp.float32).sum(1)
  return d_x.astype(d_rows.dtype), None


gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def combine_rows(rows: jax.Array, weights: jax.Array, order: RowOrder, sum_dtype) -> jax.Array:
  """sum_k weights[n,k] * rows[row_of_slot[n,k]], summed in `sum_dtype`: rows [R,D], weights [N,K] -> [N,D]."""
  picked = _rows_of_tokens(rows, order).astype(sum_dtype)
  return jnp.einsum("nkd,nk->nd", picked, weights.astype(sum_dtype), precision=jax.lax.Precision.HIGHEST)


def _combine_rows_fwd(rows, weights, order, sum_dtype):
  return combine_rows(rows, weights, order, sum_dtype), (rows, weights, order)


def _combine_rows_bwd(sum_dtype, residuals, d_y):
  rows, weights, order = residuals
  d_y = d_y.astype(sum_dtype)
  row_weights = jnp.take(weights.reshape(-1), order.slot_of_row, mode="clip").astype(sum_dtype)
  d_rows = jnp.take(d_y, order.token_of_row, axis=0, mode="clip") * row_weights[:, None]
  d_rows = jnp.where(order.used[:, None], d_rows, 0).astype(rows.dtype)
  picked = _rows_of_tokens(rows, order).astype(sum_dtype)
  d_weights = jnp.einsum("nkd,nd->nk", picked, d_y, precision=jax.lax.Precision.HIGHEST)
  return d_rows, d_weights.astype(weights.dtype), None


combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)
