"""The MoE layer once more, written from its definition: every expert computes every token, in float64. For tests to compare with.

Shares no code with `maxtext_moe_te.moe` but the data types that name what to compute. Nothing is sorted, sent, grouped or masked:
a token's result is the sum over all experts of how often it selected that expert, times the weight, times the expert's result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_moe_te.moe.block import LayerSpec
from maxtext_moe_te.moe.routing import BalanceLoss, RouterInputs
from maxtext_moe_te.moe.rules import Selection, Weighting

SCORES = {
  "": lambda x: x,
  "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
  "softmax": lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
  "sqrtsoftplus": lambda x: jnp.sqrt(jnp.log(1 + jnp.exp(x))),
}
ACTIVATIONS = {
  "silu": lambda g: g / (1 + jnp.exp(-g)),
  "sigmoid": lambda g: 1 / (1 + jnp.exp(-g)),
  "gelu": lambda g: 0.5 * g * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))),  # jax.nn.gelu's default
  "relu": lambda g: jnp.where(g > 0, g, 0.0),
  "linear": lambda g: g,
}


def results(spec: LayerSpec, arrays: dict, cotangent) -> dict:
  """Output, loss, load and every gradient.

  Args:
    spec: what to compute; its dtypes are ignored.
    arrays: x [B,S,D], logits [B,S,E], router_inputs, weights, as `moe_block` takes them.
    cotangent: [B,S,D], weights of the scalar that is differentiated; the load-balance loss enters it with factor 3.

  Returns:
    dict of float64 arrays named as `contract.run_block` names them, and what tells how much rounding can matter: `margin`, how far
    the closest selection of any token is from another one, exact ties left out; `kink`, how far the closest value is from where the
    activation's slope jumps; `divisor`, the smallest sum by which weights are divided.
  """
  with jax.enable_x64(True):
    wide = lambda a: jnp.asarray(np.asarray(a, np.float64)) if jnp.issubdtype(a.dtype, jnp.floating) else jnp.asarray(a)
    return jax.device_get(_results(spec, jax.tree.map(wide, arrays), wide(cotangent)))


@functools.partial(jax.jit, static_argnums=0)
def _results(spec, arrays, cotangent):
  integers = {name: arrays["router_inputs"]._asdict()[name] for name in ("table_experts", "replayed_experts")}

  def scalar(x, logits, bias, expert_scale, weights):
    inputs = RouterInputs(bias=bias, expert_scale=expert_scale, **integers)
    out = layer(spec, x, logits, inputs, weights)
    return (out["y"] * cotangent).sum() + 3.0 * out["load_balance_loss"], out

  inputs = arrays["router_inputs"]
  differentiated = (arrays["x"], arrays["logits"], inputs.bias, inputs.expert_scale, arrays["weights"])
  (_, out), gradients = jax.value_and_grad(scalar, argnums=(0, 1, 2, 3, 4), has_aux=True)(*differentiated)
  if spec.load_balance_coefficient == 0.0:
    del out["load_balance_loss"]
  return out | name_gradients(*gradients)


def name_gradients(d_x, d_logits, d_bias, d_expert_scale, d_weights) -> dict:
  """The gradients that exist, by name."""
  named = {"d_x": d_x, "d_logits": d_logits, "d_bias": d_bias, "d_expert_scale": d_expert_scale}
  named |= {f"d_{name}": gradient for name, gradient in d_weights._asdict().items()}
  return {name: gradient for name, gradient in named.items() if gradient is not None}


def layer(spec, x, logits, inputs, weights):
  """y [B,S,D], load-balance loss, rows [E], margin, kink and divisor, by name."""
  rule = spec.router
  selected, weight, balance, margin, divisor = route(rule, logits, inputs)
  seen = x[:, :, None] * weight[..., None] if rule.weight_on_input else jnp.broadcast_to(x[:, :, None], (*logits.shape, x.shape[-1]))
  computed, kink = experts(spec.expert, seen, weights)
  how_much = selected if rule.weight_on_input else selected * weight
  y = (how_much[..., None] * computed).sum(2)

  density = selected
  probability = jnp.exp(balance) / jnp.exp(balance).sum(-1, keepdims=True)
  if spec.balance_loss is BalanceLoss.MEGATRON_SEQUENCE:
    density, density_margin = best(balance, rule.experts_per_token)
    margin = jnp.minimum(margin, density_margin)
    probability = balance / balance.sum(-1, keepdims=True)
  # mean over sequences of sum over experts of density times probability, times E
  per_sequence = (density.mean(1) / rule.experts_per_token * probability.mean(1)).sum(-1) * spec.num_experts
  loss = per_sequence.mean() * spec.load_balance_coefficient
  rounding = {"margin": margin, "kink": kink, "divisor": divisor}
  return {"y": y, "load_balance_loss": loss, "rows_per_expert": selected.sum((0, 1)), **rounding}


def experts(rule, x, weights):
  """x [B,S,E,D], the token as each expert sees it -> ([B,S,E,D], kink)."""
  gate_kernel, up_kernel = (weights.gate, weights.up) if weights.fused is None else jnp.split(weights.fused, 2, -1)
  gate = jnp.einsum("bsed,edf->bsef", x, gate_kernel)
  up = jnp.einsum("bsed,edf->bsef", x, up_kernel)
  if weights.gate_bias is not None:
    gate, up = gate + weights.gate_bias, up + weights.up_bias
  kink = jnp.abs(gate).min() if rule.activation == "relu" else jnp.inf
  if rule.clamp is not None:
    kink = jnp.minimum(kink, jnp.minimum(jnp.abs(gate - rule.clamp).min(), jnp.abs(jnp.abs(up) - rule.clamp).min()))
    gate, up = jnp.where(gate > rule.clamp, rule.clamp, gate), jnp.where(jnp.abs(up) > rule.clamp, rule.clamp * jnp.sign(up), up)
  hidden = ACTIVATIONS[rule.activation](rule.gate_scale * gate) * (up + rule.up_offset)
  if rule.self_gated:
    hidden = hidden * gate
  out = jnp.einsum("bsef,efd->bsed", hidden, weights.down)
  return (out if weights.down_bias is None else out + weights.down_bias), kink


def route(rule, logits, inputs):
  """(how often each expert is selected [B,S,E], its weight [B,S,E], what the balance loss reads [B,S,E], margin, divisor)."""
  num_experts = logits.shape[-1]
  scores = SCORES[rule.score_function](logits)
  biased = scores if inputs.bias is None else scores + inputs.bias
  values = scores if rule.weights_ignore_bias else biased
  balance = values
  margin = jnp.inf
  unused = jnp.zeros((*logits.shape[:2], 1))
  if inputs.replayed_experts is not None:
    values = biased
    selected = (inputs.replayed_experts[..., None] == jnp.arange(num_experts)).sum(2).astype(logits.dtype)
    unused = rule.experts_per_token - selected.sum(-1, keepdims=True)
  elif rule.selection is Selection.TABLE:
    values = scores
    selected = (inputs.table_experts[..., None] == jnp.arange(num_experts)).sum(2).astype(logits.dtype)
  else:
    eligible = biased
    if rule.groups:
      in_groups = biased.reshape(*biased.shape[:2], rule.groups, -1)
      kept, margin = best(jnp.sort(in_groups, -1)[..., -2:].sum(-1), rule.groups_kept)
      eligible = jnp.where(jnp.repeat(kept, num_experts // rule.groups, -1) > 0, biased, -jnp.inf)
    selected, expert_margin = best(eligible, rule.experts_per_token)
    margin = jnp.minimum(margin, expert_margin)

  total = lambda weight: (selected * weight).sum(-1, keepdims=True)
  if rule.weighting is Weighting.SOFTMAX:
    weight = jnp.exp(values) / jnp.where(total(jnp.exp(values)) == 0, 1.0, total(jnp.exp(values)))
  elif rule.weighting is Weighting.SOFTMAX_OF_ALL:
    weight = jnp.exp(values) / jnp.exp(values).sum(-1, keepdims=True)
  else:
    weight = values
  divisor = 1.0
  if rule.renormalize:
    # MaxText reads expert 0's score for an unused place and, of scores taken as they are, lets it into the sum.
    stray = unused * weight[..., :1] if rule.weighting is Weighting.SCORES else 0.0
    sum_of_weights = total(weight) + stray + rule.renormalize_epsilon
    sum_of_weights = jnp.where(sum_of_weights == 0, 1.0, sum_of_weights)
    weight, divisor = weight / sum_of_weights, sum_of_weights.min()
  weight = weight * rule.scale
  if rule.expert_scale:
    weight = weight * inputs.expert_scale
  return selected, 1 / (1 + jnp.exp(-weight)) if rule.weighting is Weighting.SIGMOID else weight, balance, margin, divisor


def best(values, count):
  """(1 where a value is among the `count` largest of the last dim, the first of equals winning; the smallest gap to the next, if not 0)."""
  index = jnp.arange(values.shape[-1])
  mine, other = values[..., :, None], values[..., None, :]
  beaten_by = ((other > mine) | ((other == mine) & (index[None, :] < index[:, None]))).sum(-1)
  if count >= values.shape[-1]:
    return jnp.ones_like(values), jnp.inf
  ordered = jnp.sort(values, -1)[..., ::-1]
  gap = ordered[..., count - 1] - ordered[..., count]
  return (beaten_by < count).astype(values.dtype), jnp.where(gap == 0, jnp.inf, gap).min()
