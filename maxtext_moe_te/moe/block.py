"""The MoE layer: routing, dispatch, experts, combine, in one shard_map in which every mesh axis is manual.

Owns how the stages fit together and how their per-device results become global ones. Which implementation each stage uses is
chosen by the caller (`Parts`), once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.moe import routing
from maxtext_moe_te.moe.capacity import balanced_rows
from maxtext_moe_te.moe.chunks import in_chunks
from maxtext_moe_te.moe.experts import blocked, ragged_dot, reference
from maxtext_moe_te.moe.experts.base import Activation, ExpertWeights, GroupedMatmul, activate_all, expert_mlp
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule, Selection
from maxtext_moe_te.moe.transport.base import Transport

GROUPED_MATMULS: dict[str, GroupedMatmul] = {
  "reference": reference.grouped_matmul,
  "ragged_dot": ragged_dot.grouped_matmul,
  "blocked": blocked.grouped_matmul,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
  """What the layer computes, independent of devices.

  Attributes:
    num_experts: E.
    router: the router rule.
    expert: the expert rule.
    dtype: of rows, products and the result.
    sum_dtype: in which a token's K results are summed.
    load_balance_coefficient: factor on the load-balance loss; 0 computes none.
    balance_loss: its definition.
  """

  num_experts: int
  router: RouterRule
  expert: ExpertRule
  dtype: jnp.dtype
  sum_dtype: jnp.dtype
  load_balance_coefficient: float = 0.0
  balance_loss: routing.BalanceLoss = routing.BalanceLoss.SWITCH_SEQUENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """Which mesh axes split which dims. Axes of size 1 may be named or not.

  Attributes:
    mesh: the mesh; every axis of it is manual inside the layer.
    batch: axes that split B.
    sequence: axes that split S.
    expert: axes that split E.
    width: axes that split the experts' F.
  """

  mesh: jax.sharding.Mesh
  batch: tuple[str, ...] = ()
  sequence: tuple[str, ...] = ()
  expert: tuple[str, ...] = ()
  width: tuple[str, ...] = ()

  def size(self, axes: tuple[str, ...]) -> int:
    """Product of the sizes of `axes`."""
    return math.prod(self.mesh.shape[a] for a in axes)

  @property
  def tokens(self) -> tuple[str, ...]:
    """Axes over which tokens differ."""
    return (*self.batch, *self.sequence)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """The implementation of each stage, chosen once.

  Attributes:
    transport, grouped_matmul, activation, route: of rows, products, what is between them, and scores.
    chunks: in how many parts a device's tokens go through the experts.
  """

  transport: Transport
  grouped_matmul: GroupedMatmul
  activation: Activation = activate_all
  route: Callable[..., routing.Routing] = routing.route
  chunks: int = 1


DEMAND_BINS = 80  # of the rows that a rank is sent of a part, over balanced routing's: up to 2^((i + 1) / 8) in bin i, all else in the last


class MoeOutput(NamedTuple):
  """What leaves the layer. What is measured is each device's own: who reads it reduces it, once for all layers.

  Attributes:
    y: [B,S,D] in the layer's dtype.
    load_balance_loss: float32 scalar with its coefficient, or None.
    rows: int32 [devices that have different tokens, E], rows that their tokens send.
    received: int32 [devices], rows of the fullest part.
    overflowed: int32 [devices], parts whose rows exceeded R. Dropless capacities keep it at 0.
    demand: int32 [devices, DEMAND_BINS], parts by the rows that were sent.
    receive_capacity: int, R, of one part.
  """

  y: jax.Array
  load_balance_loss: jax.Array | None
  rows: jax.Array
  received: jax.Array
  overflowed: jax.Array
  demand: jax.Array
  receive_capacity: jax.Array

  @property
  def rows_per_expert(self) -> jax.Array:
    """int32 [E], over the whole batch."""
    return self.rows.sum(0)


def demand_histogram(rows: jax.Array, balanced: int) -> jax.Array:
  """int32 [DEMAND_BINS]: how many of `rows`, int32 [C], are in each bin, if balanced routing sends `balanced`."""
  edges = np.minimum(balanced * 2.0 ** (np.arange(1, DEMAND_BINS) / 8), 2**31 - 1).astype(np.int32)
  return ((rows[:, None] > edges).sum(1)[:, None] == np.arange(DEMAND_BINS)).sum(0, dtype=jnp.int32)


def largest_demand(histogram: jax.Array) -> jax.Array:
  """What a rank is sent of a part at most, over balanced routing's: the upper edge of the last bin of a histogram that is not empty."""
  last = jnp.max(jnp.where(histogram > 0, jnp.arange(DEMAND_BINS), 0))
  return 2.0 ** ((last + 1) / 8)


def moe_block(
  x: jax.Array,
  logits: jax.Array,
  router_inputs: routing.RouterInputs,
  weights: ExpertWeights,
  *,
  spec: LayerSpec,
  layout: Layout,
  parts: Parts,
  real: jax.Array | None = None,
) -> MoeOutput:
  """Runs the layer.

  Args:
    x: [B,S,D].
    logits: [B,S,E], the gate's projections before score function and bias, in the gate's dtype.
    router_inputs: what the router rule needs besides, for the whole batch.
    weights: of all E experts, in float32 or the layer's dtype. Those in float32 are cast inside, so that their gradients are summed
      over devices unrounded.
    spec: what to compute.
    layout: how arrays are split over the mesh.
    parts: with what.
    real: bool [B,S], false for padding: such a token is sent to no expert, its y is 0, and the load, the load-balance loss and all
      gradients are those of a batch without it. None where every token counts.

  Returns:
    MoeOutput.
  """
  tokens = P(layout.batch or None, layout.sequence or None, None)
  expert, width = layout.expert or None, layout.width or None
  weight_specs = ExpertWeights(
    down=P(expert, width, None),
    fused=P(expert, None, width),
    gate=P(expert, None, width),
    up=P(expert, None, width),
    gate_bias=P(expert, width),
    up_bias=P(expert, width),
    down_bias=P(expert, None),
  )
  router_specs = routing.RouterInputs(bias=P(), expert_scale=P(), table_experts=tokens, key=P(), replayed_experts=tokens)
  run = jax.shard_map(
    functools.partial(_per_device, spec, layout, parts),
    mesh=layout.mesh,
    in_specs=(tokens, tokens, P(*tokens[:2]), _given(router_specs, router_inputs), _given(weight_specs, weights)),
    out_specs=MoeOutput(tokens, P(), P(layout.tokens or None), *(P(layout.mesh.axis_names),) * 3, P()),
    check_vma=False,
  )
  return run(x, logits, real, router_inputs, weights)


def _given(specs, arrays):
  """`specs` with None where `arrays` has None."""
  return type(specs)(*(None if array is None else spec for spec, array in zip(specs, arrays)))


def _per_device(spec, layout, parts, x, logits, real, router_inputs, weights) -> MoeOutput:
  """One device's share; shapes are local. [b,s,D] here, T = b * s."""
  b, s, width = x.shape
  x = x.astype(spec.dtype)
  weights = ExpertWeights(*(None if w is None else w.astype(spec.dtype) for w in weights))
  if weights.down_bias is not None and layout.width:
    # The partial products over the split width are added up below; the bias must be in one of them only.
    weights = weights._replace(down_bias=jnp.where(jax.lax.axis_index(layout.width) == 0, weights.down_bias, 0))

  if real is not None:  # whatever stands in padding, NaN too, reaches no sum and no gradient
    logits = jnp.where(real[..., None], logits, 0)
  routed = parts.route(spec.router, logits, router_inputs, dtype=spec.dtype)
  if real is not None:
    routed = routing.without_padding(routed, real, spec.num_experts)
  row_weights = routed.weights
  if spec.router.weight_on_input:
    x = (x * row_weights).astype(spec.dtype)
  k = row_weights.shape[-1]
  # Only a top-k selection never names an expert twice for one token.
  distinct = spec.router.selection is Selection.TOP and router_inputs.replayed_experts is None

  def experts(tokens, weights):
    sent = parts.transport.dispatch(*tokens, distinct=distinct)
    row_weights = None if spec.router.weight_on_input else sent.row_weights
    out = expert_mlp(parts.grouped_matmul, sent.rows, row_weights, sent.group_sizes, weights, spec.expert, parts.activation)
    # The rows received are an integer, but pmax insists.
    return parts.transport.combine(out, sent.handle, sum_dtype=spec.sum_dtype), (jax.lax.stop_gradient(sent.received), sent.rows.shape[0])

  tokens = (x.reshape(b * s, width), routed.experts.reshape(-1, k), row_weights.reshape(-1, k))
  y, (received, capacity) = in_chunks(experts, chunks_of(parts.chunks, b * s), tokens, weights)
  if layout.width:
    y = jax.lax.psum(y, layout.width)

  loss = _load_balance_loss(routed, real, (b, s), spec, layout) if spec.load_balance_coefficient > 0.0 else None
  ranks = layout.size(layout.expert)
  senders = ranks if set(layout.expert) <= set(layout.tokens) else 1
  balanced = balanced_rows(group_tokens=senders * b * s // received.size, experts_per_token=k, ranks=ranks)
  return MoeOutput(
    y=y.reshape(b, s, width).astype(spec.dtype),
    load_balance_loss=loss,
    rows=routing.rows_per_expert(routed.experts, spec.num_experts).sum(0)[None],
    received=received.max(keepdims=True),
    overflowed=(received > capacity).sum(dtype=jnp.int32, keepdims=True),
    demand=demand_histogram(received, balanced)[None],
    receive_capacity=capacity.max(),
  )


def chunks_of(chunks: int, tokens: int) -> int:
  """In how many parts a device's tokens go through the experts: `chunks`, or 1 where there are fewer tokens, as in decoding.

  Raises:
    RefusedError: it does not divide them.
  """
  if tokens % chunks and tokens >= chunks:
    near = max(c for c in range(1, chunks) if tokens % c == 0)
    raise RefusedError(
      found=f"moe_te.chunks={chunks} with {tokens} tokens on a device",
      needed="parts of as many tokens each",
      fix=f"set moe_te.chunks={near}, or change per_device_batch_size or max_target_length",
    )
  return chunks if tokens >= chunks else 1


def _load_balance_loss(routed, real, local_shape, spec, layout):
  """The mean over all sequences, each whole: its sums are taken over the devices that share it first.

  With padding, over the sequences that have a real token, each of the length that its real tokens have.
  """
  sequences, length = local_shape
  rows, probability_mass = routing.balance_statistics(spec.balance_loss, routed, spec.num_experts, dtype=spec.dtype, real=real)
  length = length * layout.size(layout.sequence) if real is None else real.sum(1, keepdims=True, dtype=jnp.int32)
  if layout.sequence:
    rows, probability_mass = jax.lax.psum((rows, probability_mass), layout.sequence)
    length = length if real is None else jax.lax.psum(length, layout.sequence)
  loss = routing.load_balance_loss(
    rows,
    probability_mass,
    sequence_length=length if real is None else jnp.maximum(length, 1),
    experts_per_token=spec.router.experts_per_token,
  )
  loss = loss * spec.load_balance_coefficient
  if real is None:
    return jax.lax.pmean(loss, layout.batch) if layout.batch else loss
  total, counted = loss * sequences, (length > 0).sum(dtype=jnp.int32)  # an empty sequence's loss is 0
  if layout.batch:
    total, counted = jax.lax.psum((total, counted), layout.batch)
  return total / jnp.maximum(counted, 1)
