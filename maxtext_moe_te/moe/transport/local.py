"""The transport of a mesh without an expert axis: nothing travels, rows are only sorted by expert."""

import dataclasses

from maxtext_moe_te.moe.transport.base import Dispatched, combine_rows, gather_rows, order_rows


@dataclasses.dataclass(frozen=True)
class LocalTransport:
  """Attributes: num_experts: E, all of them on every rank."""

  num_experts: int
  name: str = "local"

  def dispatch(self, x, experts, weights, *, distinct):
    """See `Transport.dispatch`. R = T * K."""
    del distinct
    order = order_rows(experts, first=0, count=self.num_experts, capacity=experts.size)
    return Dispatched(gather_rows(x, order), order.group_sizes, (order, weights))

  def combine(self, rows, handle, *, sum_dtype):
    """See `Transport.combine`."""
    order, weights = handle
    return combine_rows(rows, weights, order, sum_dtype)
