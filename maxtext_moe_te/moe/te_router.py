"""Transformer Engine's fused router: score, bias, groups, selection and normalization in one kernel, float32 inside.

It serves the rules whose rounding it shares (`reason_against`); what it does not compute, scale and per-expert factors, follows in
`routing.py`'s order. Between equal scores it does not choose the first expert, as everything else does; logits in float32 hardly
have any. The kernel returns a map over all experts, from which the ids are taken with another top-k.

Imports Transformer Engine at call time, never at import.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxtext_moe_te.moe import routing
from maxtext_moe_te.moe.rules import RouterRule, Selection, Weighting

# What the kernel adds to the sum that it divides sigmoid scores by (`fused_topk_with_score_function.cu`, 2.20.2).
EPSILON = 1e-20


def reason_against(rule: RouterRule, logits_dtype, has_score_function: Callable[[str], bool] | None = None) -> str:
  """Why the kernel does not compute this rule exactly, or nothing.

  Args:
    rule: the router rule.
    logits_dtype: of the gate's projections.
    has_score_function: says which the Transformer Engine at hand has; None for those of 2.20.2.
  """
  if rule.selection is not Selection.TOP:
    return f"experts are selected by {rule.selection.value}"
  if rule.weight_on_input:
    return "the weight is a sigmoid of the logit"
  if jnp.dtype(logits_dtype) != jnp.float32:
    return f"logits in {jnp.dtype(logits_dtype).name} (float32_gate_logits=false) often tie, and it breaks ties otherwise"
  if rule.score_function:
    known = rule.score_function in ("sigmoid", "sqrtsoftplus")
    if not known or (has_score_function and not has_score_function(rule.score_function)):
      return f"it has no score function {rule.score_function}"
    if rule.weighting is not Weighting.SCORES or (rule.bias and not rule.weights_ignore_bias):
      return "it takes weights from scores without bias, as they are"
    # It always divides by the sum, but for K = 1.
    if rule.renormalize != (rule.experts_per_token > 1) or (rule.renormalize and rule.renormalize_epsilon != EPSILON):
      return "it divides scores by their sum"
  elif rule.weighting is Weighting.SOFTMAX_OF_ALL and not rule.renormalize:
    return "it would select on rounded probabilities"
  elif rule.weighting not in (Weighting.SOFTMAX, Weighting.SOFTMAX_OF_ALL) or (rule.bias and rule.weights_ignore_bias):
    return "it takes weights from a softmax of what it selects on"
  if rule.groups and rule.experts_per_token != 2 * rule.groups_kept:
    return f"it values a group by its best {rule.experts_per_token}/{rule.groups_kept} scores, not 2"
  return ""


def route(rule: RouterRule, logits: jax.Array, inputs: routing.RouterInputs, *, dtype) -> routing.Routing:
  """As `routing.route`, for a rule that `reason_against` has nothing against; experts chosen elsewhere are left to that."""
  if inputs.replayed_experts is not None:
    return routing.route(rule, logits, inputs, dtype=dtype)
  scored, k, experts = rule.score_function != "", rule.experts_per_token, logits.shape[-1]
  bias = inputs.bias.astype(logits.dtype) if rule.bias else None
  if not scored and rule.bias:
    logits = logits + bias
  flat = logits.reshape(-1, experts).astype(jnp.float32)
  # No zero-element constant, which crashes the compiler of JAX 0.11.2 in scanned layers: none of the logits.
  kernel_bias = bias.astype(jnp.float32) if scored and rule.bias else jax.lax.slice(jax.lax.stop_gradient(flat[0]), (0,), (0,))
  weights, selected = _select(rule.score_function or "softmax", k, rule.groups, rule.groups_kept, flat, kernel_bias)
  ids = jax.lax.top_k(jnp.where(selected, jax.lax.stop_gradient(weights), -1.0), k)[1].astype(jnp.int32)
  ids = ids.reshape(*logits.shape[:-1], k)
  weights = routing.take_experts(weights.reshape(logits.shape), ids)
  if not scored:
    weights = weights.astype(dtype)
    if rule.renormalize:
      weights = weights / (weights.sum(-1, keepdims=True) + rule.renormalize_epsilon)
  if rule.scale != 1.0:
    weights = weights * rule.scale
  if rule.expert_scale:
    weights = weights * routing.take_experts(inputs.expert_scale.astype(weights.dtype), ids)
  return routing.Routing(ids, weights, routing.function_named(rule.score_function)(logits))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _select(score_function, k, groups, groups_kept, logits, bias):
  """logits float32 [T,E], bias float32 [E] or [0] -> weights float32 [T,E], zero where not selected; bool [T,E]."""
  return _forward(score_function, k, groups, groups_kept, logits, bias)[0]


def _forward(score_function, k, groups, groups_kept, logits, bias):
  weights, selected, saved = _primitive("Fwd").bind(
    logits, bias, num_groups=groups or -1, group_topk=groups_kept or -1, **_static(score_function, k)
  )  # fmt: skip
  return (weights, selected), (selected, saved)


def _backward(score_function, k, groups, groups_kept, residuals, gradients):
  del groups, groups_kept
  selected, saved = residuals
  d_logits = _primitive("Bwd").bind(selected, saved, gradients[0], **_static(score_function, k))
  return d_logits, None


_select.defvjp(_forward, _backward)


def _static(score_function, k):
  from transformer_engine.jax.cpp_extensions import router

  return dict(
    topk=k, use_pre_softmax=0, scaling_factor=1.0, score_function=int(router.ScoreFunction[score_function.upper()]),
    compute_aux_scores=0, routing_map_format=int(router.RoutingMapFormat.BYTEMAP),
  )  # fmt: skip


def _primitive(direction):
  from transformer_engine.jax.cpp_extensions import router

  return getattr(router, f"FusedTopkWithScoreFunction{direction}Primitive").inner_primitive
