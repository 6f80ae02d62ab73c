"""Routing in JAX: from logits to experts and weights, and the load statistics. Per token; knows nothing of devices or meshes.

The arithmetic and its rounding follow MaxText's `RoutedMoE.get_topk` step by step, so that both select the same experts: a
different rounding of a score is a different expert.
"""

import enum
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe.rules import RouterRule, Selection, Weighting


class BalanceLoss(enum.Enum):
  """Which load and which probabilities the load-balance loss multiplies, sequence by sequence."""

  SWITCH_SEQUENCE = "softmax of the scores, experts as dispatched"
  MEGATRON_SEQUENCE = "scores normalized per token, top experts without bias or groups"


class Routing(NamedTuple):
  """Where each token goes.

  Attributes:
    experts: int32 [B,S,K], selected experts, best first; an id outside [0, E) is an unused place.
    weights: [B,S,K]; zero in unused places.
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


class RouterInputs(NamedTuple):
  """What a router may need besides the logits; None where the rule does not ask for it.

  Attributes:
    bias: [E], added to the scores.
    expert_scale: [E], factors on the weights.
    table_experts: int32 [B,S,K], experts by token id, for `Selection.TABLE`.
    key: a PRNG key, for `Selection.RANDOM`.
    replayed_experts: int32 [B,S,K], experts of an earlier run to be used instead of any selection (router replay); places with an
      id outside [0, E) are unused.
  """

  bias: jax.Array | None = None
  expert_scale: jax.Array | None = None
  table_experts: jax.Array | None = None
  key: jax.Array | None = None
  replayed_experts: jax.Array | None = None


def route(rule: RouterRule, logits: jax.Array, inputs: RouterInputs, *, dtype) -> Routing:
  """Selects experts and weights for each token.

  Args:
    rule: the router rule.
    logits: [B,S,E], gate projections in the gate's dtype; scores and the bias are computed in that dtype, as MaxText does.
    inputs: what else the rule needs.
    dtype: the layer's dtype; softmax weights are rounded to it.

  Returns:
    Routing.
  """
  scores = function_named(rule.score_function)(logits)
  biased = scores + inputs.bias.astype(scores.dtype) if rule.bias else scores
  balance_scores = scores if rule.weights_ignore_bias else biased
  replayed = inputs.replayed_experts is not None
  if not replayed and rule.selection is Selection.RANDOM:
    shape = (*logits.shape[:-1], rule.experts_per_token)
    experts = jax.random.randint(inputs.key, (math.prod(shape),), 0, logits.shape[-1], dtype=jnp.int32).reshape(shape)
    return Routing(experts, _weights_on_input(rule, take_experts(biased, experts)), balance_scores)

  if replayed:
    experts, values_from = inputs.replayed_experts, biased
  elif rule.selection is Selection.TABLE:
    experts, values_from = inputs.table_experts, scores
  else:
    eligible = jnp.where(_group_mask(rule, biased), biased, -jnp.inf) if rule.groups else biased
    _, experts = jax.lax.top_k(eligible, rule.experts_per_token)
    values_from = scores if rule.weights_ignore_bias else biased
  if rule.weighting is Weighting.SOFTMAX_OF_ALL:
    values_from = jax.nn.softmax(values_from.astype(jnp.float32), axis=-1)
  experts = selected = experts.astype(jnp.int32)
  if replayed:
    # An unused place reads expert 0, as in MaxText: of scores taken as they are, that enters the sum they are divided by.
    used = (experts >= 0) & (experts < logits.shape[-1])
    selected = jnp.where(used, experts, 0)
  weights = take_experts(values_from, selected)

  if rule.weighting is Weighting.SOFTMAX:
    if replayed:  # unused places stay out of the sum; finite, because a token may have no used place at all
      weights = jnp.where(used, weights, jnp.finfo(jnp.float32).min / 2)
    weights = jax.nn.softmax(weights.astype(jnp.float32), axis=-1)
  if rule.weighting in (Weighting.SOFTMAX, Weighting.SOFTMAX_OF_ALL):
    weights = weights.astype(dtype)
  if replayed and rule.weighting is not Weighting.SCORES:
    weights = weights * used
  if rule.renormalize:
    total = weights.sum(-1, keepdims=True) + rule.renormalize_epsilon
    weights = weights / (jnp.where(total == 0, 1.0, total).astype(weights.dtype) if replayed else total)
  if rule.scale != 1.0:
    weights = weights * rule.scale
  if rule.expert_scale:
    weights = weights * take_experts(inputs.expert_scale.astype(weights.dtype), selected)
  if replayed:
    weights = weights * used
  return Routing(experts, _weights_on_input(rule, weights), balance_scores)


def _weights_on_input(rule, weights):
  return jax.nn.sigmoid(weights.astype(jnp.float32)) if rule.weighting is Weighting.SIGMOID else weights


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
  """scores [B,S,E] or [E] at experts [B,S,K] -> [B,S,K]; its gradient compares instead of scattering, which GPUs do slowly."""
  if scores.ndim == 1:
    return jnp.take(scores, experts, mode="clip")
  return jnp.take_along_axis(scores, experts, axis=-1, mode="clip")


def _take_experts_fwd(scores, experts):
  return take_experts(scores, experts), (experts, scores)


def _take_experts_bwd(residuals, d_weights):
  experts, scores = residuals
  hit = experts[..., None] == jnp.arange(scores.shape[-1], dtype=experts.dtype)
  d_scores = jnp.where(hit, d_weights[..., None], 0).sum(-2)
  if scores.ndim == 1:
    d_scores = d_scores.sum((0, 1))
  return d_scores.astype(scores.dtype), None


take_experts.defvjp(_take_experts_fwd, _take_experts_bwd)


def without_padding(routing: Routing, real: jax.Array, num_experts: int) -> Routing:
  """The routing in which padding selects no expert: its places are unused, and nothing of it reaches a gradient.

  Args:
    routing: of [B,S] tokens.
    real: bool [B,S], false for padding.
    num_experts: E, which is the id of an unused place.

  Returns:
    Routing.
  """
  experts = jnp.where(real[..., None], routing.experts, num_experts)
  return routing._replace(experts=experts, weights=jnp.where(real[..., None], routing.weights, 0))


def rows_per_expert(experts: jax.Array, num_experts: int) -> jax.Array:
  """int32 [..., E]: how many of the ids in the last two axes (tokens, K) name each expert; ids outside [0, E) count nowhere."""
  hit = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)
  return hit.sum((-3, -2), dtype=jnp.int32)


def balance_statistics(
  kind: BalanceLoss, routing: Routing, num_experts: int, *, dtype, real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """The two per-sequence sums whose product is the load-balance loss.

  Args:
    kind: see `BalanceLoss`; the second follows Megatron-LM's seq_aux_loss as MaxText's `megatron_aux_loss_inputs` does.
    routing: of [B,S] tokens.
    num_experts: E.
    dtype: the layer's dtype; the softmax is rounded to it, as MaxText does.
    real: bool [B,S], the tokens that are summed over, `routing` being `without_padding`; None for all.

  Returns:
    (rows [B,E] int32, probability mass [B,E] float32), both summed over the sequence.
  """
  scores = routing.balance_scores.astype(jnp.float32)
  if kind is BalanceLoss.MEGATRON_SEQUENCE:
    probabilities = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    _, experts = jax.lax.top_k(scores, routing.experts.shape[-1])
    experts = experts if real is None else jnp.where(real[..., None], experts, num_experts)
  else:
    probabilities = jax.nn.softmax(scores, axis=-1).astype(dtype).astype(jnp.float32)
    experts = routing.experts
  return rows_per_expert(experts, num_experts), probabilities.sum(1, where=None if real is None else real[..., None])


def load_balance_loss(rows: jax.Array, probability_mass: jax.Array, *, sequence_length: int | jax.Array, experts_per_token: int):
  """Sequence-wise load-balance loss, before its coefficient: E^2 mean_{b,e}(density * probability).

  MaxText's `RoutedMoE.load_balance_loss`; the Switch Transformer's loss (arXiv:2101.03961, eq. 4) of each sequence, averaged.

  Args:
    rows: int32 [B,E], rows of each sequence sent to each expert.
    probability_mass: float32 [B,E], router probabilities summed over the sequence.
    sequence_length: S, of the whole sequence; or int32 [B,1], the real tokens of each, at least 1.
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
