"""The transport of a mesh without an expert axis: nothing travels, rows are only sorted by expert."""

import dataclasses

import jax.numpy as jnp

from maxtext_moe_te.moe.capacity import aligned_rows
from maxtext_moe_te.moe.transport.base import Dispatched, combine_rows, gather_rows, gather_weights, order_rows


@dataclasses.dataclass(frozen=True)
class LocalTransport:
  """Attributes:

  num_experts: E, all of them on every rank.
  alignment: each expert's rows start at a multiple of this.
  """

  num_experts: int
  alignment: int = 1
  name: str = "local"

  def dispatch(self, x, experts, weights, *, distinct):
    """See `Transport.dispatch`. R = T * K, plus what alignment costs."""
    del distinct
    capacity = aligned_rows(experts.size, local_experts=self.num_experts, alignment=self.alignment)
    order = order_rows(experts, first=0, count=self.num_experts, capacity=capacity, alignment=self.alignment)
    row_weights = gather_weights(weights.astype(jnp.float32), order)
    return Dispatched(gather_rows(x, order), row_weights, order.group_sizes, order.received, (order,))

  def combine(self, rows, handle, *, sum_dtype):
    """See `Transport.combine`."""
    return combine_rows(rows, *handle, sum_dtype)
