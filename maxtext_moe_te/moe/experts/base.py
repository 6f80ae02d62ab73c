"""What the experts compute, given a way to multiply grouped rows. Owns biases, activation, row weights and the names for remat.

An implementation is one function, `grouped_matmul(rows [R,k], kernels [e,k,n], group_sizes int32 [e]) -> [R,n]`, which must leave
the rows past the sum of group_sizes finite or untouched by anything that is used.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext_moe_te.moe.routing import function_named
from maxtext_moe_te.moe.rules import ExpertRule

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# (rule, [R,2F] with the gate half first, row weights float32 [R] or None, group sizes int32 [e]) -> [R,F] in the same dtype
Activation = Callable[[ExpertRule, jax.Array, jax.Array | None, jax.Array], jax.Array]


class ExpertWeights(NamedTuple):
  """The weights of e experts. Either `fused` or both `gate` and `up` are given.

  Attributes:
    down: [e,F,D].
    fused: [e,D,2F], gate half first, or None.
    gate: [e,D,F] or None.
    up: [e,D,F] or None.
    gate_bias: [e,F] or None; up_bias likewise.
    down_bias: [e,D] or None.
  """

  down: jax.Array
  fused: jax.Array | None = None
  gate: jax.Array | None = None
  up: jax.Array | None = None
  gate_bias: jax.Array | None = None
  up_bias: jax.Array | None = None
  down_bias: jax.Array | None = None


def activate(rule: ExpertRule, gate: jax.Array, up: jax.Array) -> jax.Array:
  """The gated activation: gate [R,F], up [R,F] -> [R,F]."""
  if rule.activation_in_float32:
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
  if rule.clamp is not None:
    gate, up = jnp.minimum(gate, rule.clamp), jnp.clip(up, -rule.clamp, rule.clamp)
  activated = function_named(rule.activation)(gate * rule.gate_scale if rule.gate_scale != 1.0 else gate)
  if rule.self_gated:
    activated = gate * activated
  return activated * (up + rule.up_offset if rule.up_offset else up)


def activate_all(rule: ExpertRule, first: jax.Array, row_weights: jax.Array | None, group_sizes: jax.Array) -> jax.Array:
  """An `Activation` by XLA, which works through all R rows."""
  del group_sizes
  hidden = activate(rule, *jnp.split(first, 2, axis=-1))
  if row_weights is not None:
    hidden = hidden * row_weights[:, None]  # float32 from here
  return hidden.astype(first.dtype)


def expert_mlp(
  grouped_matmul: GroupedMatmul,
  rows,
  row_weights,
  group_sizes,
  weights: ExpertWeights,
  rule: ExpertRule,
  activation: Activation = activate_all,
) -> jax.Array:
  """Runs each row through its expert and weights the result.

  The weight multiplies the activation, F wide, instead of the result, D wide: the last product is linear. Rounding happens as
  often as without it.

  The tensors that remat policies may keep, recompute or offload carry MaxText's own names: moe_x_sorted (the rows), moe_mlpwi_0
  and moe_mlpwi_1 (the first product, both halves, since neither is of use alone), moe_mlpwo (the result); mlpwi_0 and mlpwo as well, as
  MaxText has it.

  Args:
    grouped_matmul: see the module's docstring.
    rows: [R,D] in the layer's dtype, grouped by expert.
    row_weights: float32 [R], or None for weights of 1.
    group_sizes: int32 [e].
    weights: in the layer's dtype.
    rule: the expert rule.
    activation: between the products.

  Returns:
    [R,D] in the layer's dtype; rows past the sum of group_sizes are undefined.
  """
  rows = checkpoint_name(rows, "moe_x_sorted")
  fused = weights.fused if weights.fused is not None else jnp.concatenate([weights.gate, weights.up], axis=-1)
  first = grouped_matmul(rows, fused, group_sizes)
  if weights.gate_bias is not None:
    bias = jnp.concatenate([weights.gate_bias, weights.up_bias], axis=-1)
    first = (first + bias_of_rows(bias, group_sizes, rows.shape[0])).astype(rows.dtype)
  for name in ("mlpwi_0", "moe_mlpwi_0", "moe_mlpwi_1"):
    first = checkpoint_name(first, name)
  out = grouped_matmul(activation(rule, first, row_weights, group_sizes), weights.down, group_sizes)
  if weights.down_bias is not None:
    bias = bias_of_rows(weights.down_bias, group_sizes, rows.shape[0])
    out = (out + (bias if row_weights is None else bias * row_weights[:, None])).astype(rows.dtype)
  return checkpoint_name(checkpoint_name(out, "mlpwo"), "moe_mlpwo")


def expert_of_rows(group_sizes: jax.Array, rows: int) -> jax.Array:
  """int32 [rows]: the expert of each row; e for the rows past the sum of group_sizes."""
  return (jnp.cumsum(group_sizes)[None, :] <= jnp.arange(rows)[:, None]).sum(1, dtype=jnp.int32)


def bias_of_rows(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
  """bias [e,n] -> float32 [rows,n]; its gradient sums over many rows, which bfloat16 would not survive. Zero for unused rows."""
  wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
  return jnp.take(wide, expert_of_rows(group_sizes, rows), axis=0, mode="fill", fill_value=0)
