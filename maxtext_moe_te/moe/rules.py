"""What a model family's router and experts compute, as data. Owns no arithmetic: `routing.py` and `experts/` read these rules.

A new model is a new pair of rules, not a new branch in a stage.
"""

import dataclasses
import enum


class Weighting(enum.Enum):
  """How the values of the selected experts become combine weights."""

  SOFTMAX = "softmax over the selected"  # in float32, then rounded to the layer's dtype
  SCORES = "scores as they are"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRule:
  """Which experts a token goes to and with what weight.

  In order: score = `score_function`(logits); biased = score + bias; the `experts_per_token` largest of biased (within the
  `groups_kept` best of `groups` groups, if groups are used) are selected; their values (of score if `weights_ignore_bias`, else of
  biased) become weights by `weighting`, then `renormalize`, then `scale`.

  Attributes:
    experts_per_token: K.
    score_function: name of a function of `jax.nn`, "sqrtsoftplus", or "" for the logits themselves.
    bias: whether a per-expert bias is added to the score.
    weights_ignore_bias: the bias chooses experts but does not enter the weights (DeepSeek-V3, arXiv:2412.19437, eq. 16).
    groups: number of expert groups, 0 for none.
    groups_kept: how many groups a token may use. A group's value is the sum of its two largest biased scores.
    weighting: see `Weighting`.
    renormalize: divide the weights of a token by their sum.
    renormalize_epsilon: added to that sum.
    scale: factor on the final weights.
  """

  experts_per_token: int
  score_function: str = ""
  bias: bool = False
  weights_ignore_bias: bool = False
  groups: int = 0
  groups_kept: int = 0
  weighting: Weighting = Weighting.SOFTMAX
  renormalize: bool = False
  renormalize_epsilon: float = 0.0
  scale: float = 1.0

  def __str__(self):
    steps = [self.score_function or "logits"]
    if self.bias:
      steps.append("+ bias (selection only)" if self.weights_ignore_bias else "+ bias")
    if self.groups:
      steps.append(f"best {self.groups_kept} of {self.groups} groups")
    steps.append(f"top {self.experts_per_token}")
    if self.weighting is Weighting.SOFTMAX:
      steps.append("softmax")
    if self.renormalize:
      steps.append("renormalized")
    if self.scale != 1.0:
      steps.append(f"x {self.scale:g}")
    return ", ".join(steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRule:
  """What one expert computes: activation(x Wgate + bgate, x Wup + bup) Wdown + bdown.

  Attributes:
    activation: name of a function of `jax.nn` applied to the gate half, or "linear"; the result multiplies the up half.
    clamp: if positive, the gate half is clipped from above and the up half on both sides at this value before the activation.
    activation_in_float32: the two halves are widened to float32 before the activation.
  """

  activation: str = "silu"
  clamp: float = 0.0
  activation_in_float32: bool = False

  def __str__(self):
    return f"{self.activation}-gated" + (f", clamped at {self.clamp:g}" if self.clamp else "")
