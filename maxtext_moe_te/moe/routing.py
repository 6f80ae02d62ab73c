"""Routing in JAX: from logits to experts and weights, and the load statistics. Per token; knows nothing of devices or meshes.

The arithmetic and its rounding follow MaxText's `RoutedMoE.get_topk` step by step, so that both select the same experts: a
different rounding of a score is a different expert.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.rules import RouterRule, Weighting


class BalanceLoss(enum.Enum):
  """Which load and which probabilities the load-balance loss multiplies, sequence by sequence."""

  SWITCH_SEQUENCE = "softmax of the scores, experts as dispatched"
  MEGATRON_SEQUENCE = "scores normalized per token, top experts without bias or groups"


class Routing(NamedTuple):
  """Where each token goes.

  Attributes:
    experts: int32 [B,S,K], selected experts, best first.
    weights: [B,S,K], combine weights.
    balance_scores: [B,S,E], what the load-balance loss reads.
  """

  experts: jax.Array
  weights: jax.Array
  balance_scores: jax.Array


def function_named(name: str):
  """The activation or score function that MaxText means by `name`."""
  if name in ("", "linear"):
    return lambda x: x
  if name == "sqrtsoftplus":  # DeepSeek-V4's router
    return lambda x: jnp.sqrt(jax.nn.softplus(x))
  return getattr(jax.nn, name)


def route(rule: RouterRule, logits: jax.Array, bias: jax.Array | None, *, dtype) -> Routing:
  """Selects experts and weights for each token.

  Args:
    rule: the router rule.
    logits: [B,S,E], gate projections in the gate's dtype; scores and the bias are computed in that dtype, as MaxText does.
    bias: [E] or None, as the rule says.
    dtype: the layer's dtype; softmax weights are rounded to it.

  Returns:
    Routing.
  """
  scores = function_named(rule.score_function)(logits)
  biased = scores + bias.astype(scores.dtype) if rule.bias else scores
  eligible = jnp.where(_group_mask(rule, biased), biased, -jnp.inf) if rule.groups else biased
  _, experts = jax.lax.top_k(eligible, rule.experts_per_token)
  weights = take_experts(scores if rule.weights_ignore_bias else biased, experts)

  if rule.weighting is Weighting.SOFTMAX:
    weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1).astype(dtype)
  if rule.renormalize:
    weights = weights / (weights.sum(-1, keepdims=True) + rule.renormalize_epsilon)
  if rule.scale != 1.0:
    weights = weights * rule.scale
  return Routing(experts.astype(jnp.int32), weights, scores if rule.weights_ignore_bias else biased)


def _group_mask(rule: RouterRule, biased: jax.Array) -> jax.Array:
  """bool [B,S,E]: experts whose group is among the `groups_kept` best. arXiv:2412.19437, section 2.1.2 (node-limited routing)."""
  grouped = biased.reshape(*biased.shape[:-1], rule.groups, -1)
  best_two, _ = jax.lax.top_k(grouped, 2)
  group_scores = best_two.astype(jnp.float32).sum(-1)
  _, kept = jax.lax.top_k(group_scores, rule.groups_kept)
  mask = (kept[..., None] == jnp.arange(rule.groups)).any(-2)
  return jnp.repeat(mask, grouped.shape[-1], axis=-1)


@jax.custom_vjp
def take_experts(scores: jax.Array, experts: jax.Array) -> jax.Array:
  """scores [B,S,E] at experts [B,S,K] -> [B,S,K]. Its gradient compares instead of scattering, which GPUs do slowly."""
  return jnp.take_along_axis(scores, experts, axis=-1)


def _take_experts_fwd(scores, experts):
  return take_experts(scores, experts), (experts, scores.shape[-1])


def _take_experts_bwd(residuals, d_weights):
  experts, num_experts = residuals
  hit = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)
  return jnp.where(hit, d_weights[..., None], 0).sum(-2).astype(d_weights.dtype), None


take_experts.defvjp(_take_experts_fwd, _take_experts_bwd)


def rows_per_expert(experts: jax.Array, num_experts: int) -> jax.Array:
  """int32 [..., E]: how many of the ids in the last two axes (tokens, K) name each expert; ids outside [0, E) count nowhere."""
  hit = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)
  return hit.sum((-3, -2), dtype=jnp.int32)


def balance_statistics(kind: BalanceLoss, routing: Routing, num_experts: int, *, dtype) -> tuple[jax.Array, jax.Array]:
  """The two per-sequence sums whose product is the load-balance loss.

  Args:
    kind: see `BalanceLoss`; the second follows Megatron-LM's seq_aux_loss as MaxText's `megatron_aux_loss_inputs` does.
    routing: of [B,S] tokens.
    num_experts: E.
    dtype: the layer's dtype; the softmax is rounded to it, as MaxText does.

  Returns:
    (rows [B,E] int32, probability mass [B,E] float32), both summed over the sequence.
  """
  scores = routing.balance_scores.astype(jnp.float32)
  if kind is BalanceLoss.MEGATRON_SEQUENCE:
    probabilities = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    _, experts = jax.lax.top_k(scores, routing.experts.shape[-1])
    return rows_per_expert(experts, num_experts), probabilities.sum(1)
  probabilities = jax.nn.softmax(scores, axis=-1).astype(dtype).astype(jnp.float32)
  return rows_per_expert(routing.experts, num_experts), probabilities.sum(1)


def load_balance_loss(rows: jax.Array, probability_mass: jax.Array, *, sequence_length: int, experts_per_token: int):
  """Sequence-wise load-balance loss, before its coefficient: E^2 mean_{b,e}(density * probability).

  MaxText's `RoutedMoE.load_balance_loss`; the Switch Transformer's loss (arXiv:2101.03961, eq. 4) of each sequence, averaged.

  Args:
    rows: int32 [B,E], rows of each sequence sent to each expert.
    probability_mass: float32 [B,E], router probabilities summed over the sequence.
    sequence_length: S, of the whole sequence.
    experts_per_token: K.

  Returns:
    float32 scalar, the mean over the B sequences given.
  """
  density = rows / (sequence_length * experts_per_token)
  probability = probability_mass / sequence_length
  return jnp.mean(density * probability) * rows.shape[-1] ** 2


def bias_update(rows: jax.Array, rate: float) -> jax.Array:
  """float32 [..., E]: the loss-free balancing step, rate * sign(mean load - load). arXiv:2408.15664, algorithm 1."""
  return jnp.sign(rows.sum(-1, keepdims=True) / rows.shape[-1] - rows) * rate
