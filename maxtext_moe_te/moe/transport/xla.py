"""Expert parallelism with collectives that any device has: all-gather the tokens, reduce-scatter the results.

With static shapes this moves less than a padded all-to-all: a token travels once to each rank instead of min(K, e) times. What it
costs is memory for the group's tokens on every rank; `nccl_ep` is the transport for speed.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.capacity import aligned_rows, balanced_rows, worst_case_rows
from maxtext_moe_te.moe.transport.base import Dispatched, combine_rows, gather_rows, gather_weights, order_rows


@dataclasses.dataclass(frozen=True)
class XlaTransport:
  """Attributes:

  num_experts: E.
  axis: mesh axis names over which experts are split.
  ranks: product of their sizes.
  tokens_split: whether tokens are split over `axis` too; if not, every rank of the group already has all of them.
  alignment: each expert's rows start at a multiple of this.
  capacity_factor: receive capacity over that of balanced routing; 0 for the worst case.
  """

  num_experts: int
  axis: tuple[str, ...]
  ranks: int
  tokens_split: bool
  alignment: int = 1
  capacity_factor: float = 0.0
  name: str = "xla"

  def dispatch(self, x, experts, weights, *, distinct):
    """See `Transport.dispatch`. N = ranks * T if tokens are split, else T; R is the worst case."""
    weights = weights.astype(jnp.float32)
    if self.tokens_split:
      x, experts, weights = (jax.lax.all_gather(a, self.axis, tiled=True) for a in (x, experts, weights))
    count = self.num_experts // self.ranks
    capacity = self.capacity(x.shape[0], experts.shape[1], distinct)
    first = jax.lax.axis_index(self.axis) * count
    order = order_rows(experts, first=first, count=count, capacity=capacity, alignment=self.alignment)
    row_weights = gather_weights(weights, order)
    return Dispatched(gather_rows(x, order), row_weights, order.group_sizes, order.received, (order,))

  def capacity(self, group_tokens: int, experts_per_token: int, distinct: bool = True) -> int:
    """R, in rows, of a call with so many tokens in the whole group."""
    count = self.num_experts // self.ranks
    rows = worst_case_rows(group_tokens=group_tokens, experts_per_token=experts_per_token, local_experts=count, distinct=distinct)
    if self.capacity_factor:
      balanced = balanced_rows(group_tokens=group_tokens, experts_per_token=experts_per_token, ranks=self.ranks)
      rows = min(rows, math.ceil(self.capacity_factor * balanced))
    return aligned_rows(rows, local_experts=count, alignment=self.alignment)

  def combine(self, rows, handle, *, sum_dtype):
    """See `Transport.combine`. Each rank sums what its experts contribute; the ranks' sums are then added."""
    partial = combine_rows(rows, *handle, sum_dtype)
    if self.tokens_split:
      return jax.lax.psum_scatter(partial, self.axis, tiled=True)
    return jax.lax.psum(partial, self.axis)
