"""What a model family's router and experts compute, as data. Owns no arithmetic: `routing.py` and `experts/` read these rules.

A new model is a new pair of rules, not a new branch in a stage.
"""

import dataclasses
import enum


class Weighting(enum.Enum):
  """How the values of the selected experts become combine weights."""

  SOFTMAX = "softmax"  # over the selected, in float32, then rounded to the layer's dtype
  SOFTMAX_OF_ALL = "softmax of all experts"  # over all E, in float32, then rounded; not renormalized by itself
  SIGMOID = "sigmoid"  # of each, in float32, not rounded
  SCORES = "scores"  # as they are


class Selection(enum.Enum):
  """How a token's experts are chosen."""

  TOP = "top"  # the K largest biased scores, within the best groups if there are groups
  TABLE = "hash table"  # looked up by token id, outside the layer; may repeat an expert
  RANDOM = "random"  # uniform, may repeat an expert: balanced load for benchmarks; weights are the biased scores themselves


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRule:
  """Which experts a token goes to and with what weight.

  In order: score = `score_function`(logits); biased = score + bias; experts are chosen by `selection`; their values (of score if
  `weights_ignore_bias`, else of biased) become weights by `weighting`, then `renormalize`, `scale` and `expert_scale`.

  Attributes:
    experts_per_token: K.
    selection: see `Selection`.
    score_function: name of a function of `jax.nn`, "sqrtsoftplus", or "" for the logits themselves.
    bias: whether a per-expert bias is added to the score.
    weights_ignore_bias: the bias chooses experts but does not enter the weights (DeepSeek-V3, arXiv:2412.19437, eq. 16).
    groups: number of expert groups, 0 for none.
    groups_kept: how many groups a token may use. A group's value is the sum of its two largest biased scores.
    weighting: see `Weighting`.
    renormalize: divide the weights of a token by their sum.
    renormalize_epsilon: added to that sum.
    scale: factor on the final weights.
    expert_scale: whether each expert has a learned factor on its weight.
    weight_on_input: the weight multiplies the token before the expert instead of the expert's result (Llama 4; K = 1).
  """

  experts_per_token: int
  selection: Selection = Selection.TOP
  score_function: str = ""
  bias: bool = False
  weights_ignore_bias: bool = False
  groups: int = 0
  groups_kept: int = 0
  weighting: Weighting = Weighting.SOFTMAX
  renormalize: bool = False
  renormalize_epsilon: float = 0.0
  scale: float = 1.0
  expert_scale: bool = False
  weight_on_input: bool = False

  def __str__(self):
    steps = [self.score_function or "logits"]
    if self.bias:
      steps.append("+ bias (selection only)" if self.weights_ignore_bias else "+ bias")
    if self.groups:
      steps.append(f"best {self.groups_kept} of {self.groups} groups")
    steps.append(f"{self.selection.value} {self.experts_per_token}")
    if self.weighting is not Weighting.SCORES:
      steps.append(self.weighting.value)
    if self.renormalize:
      steps.append("renormalized")
    if self.scale != 1.0:
      steps.append(f"x {self.scale:g}")
    if self.expert_scale:
      steps.append("x per-expert scale")
    if self.weight_on_input:
      steps.append("on the input")
    return ", ".join(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRule:
  """What one expert computes: act(x Wgate + bgate, x Wup + bup) Wdown + bdown, where

      act(g, u) = activation(gate_scale g) (g if self_gated else 1) (u + up_offset)

  Attributes:
    activation: name of a function of `jax.nn`, or "linear".
    clamp: if given, g is clipped from above and u on both sides at this value first.
    gate_scale, self_gated, up_offset: see above; GPT-OSS uses 1.702, True and 1.
    activation_in_float32: the two halves are widened to float32 before the activation.
  """

  activation: str = "silu"
  clamp: float | None = None
  gate_scale: float = 1.0
  self_gated: bool = False
  up_offset: float = 0.0
  activation_in_float32: bool = False

  def __str__(self):
    gate = f"{self.activation}({self.gate_scale:g} g)" if self.gate_scale != 1.0 else f"{self.activation}(g)"
    up = f"(u + {self.up_offset:g})" if self.up_offset else "u"
    clamp = "" if self.clamp is None else f", clamped at {self.clamp:g}"
    return f"{'g ' if self.self_gated else ''}{gate} {up}{clamp}"
