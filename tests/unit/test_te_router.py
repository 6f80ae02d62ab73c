"""Which router rules Transformer Engine's kernel computes exactly, and what a user is told about the others."""

import dataclasses

import pytest

from maxtext_moe_te.moe import te_router
from maxtext_moe_te.moe.rules import RouterRule, Selection, Weighting

DEEPSEEK3 = RouterRule(
  experts_per_token=8, score_function="sigmoid", bias=True, weights_ignore_bias=True, groups=8, groups_kept=4,
  weighting=Weighting.SCORES, renormalize=True, renormalize_epsilon=1e-20, scale=2.5,
)  # fmt: skip
GEMMA4 = RouterRule(experts_per_token=8, weighting=Weighting.SOFTMAX_OF_ALL, renormalize=True, expert_scale=True)
SERVED = {
  "mixtral": RouterRule(experts_per_token=2),
  "qwen3": RouterRule(experts_per_token=8, renormalize=True),
  "gpt_oss": RouterRule(experts_per_token=4, bias=True),
  "deepseek3": DEEPSEEK3,
  "kimi-k2": dataclasses.replace(DEEPSEEK3, groups=0, groups_kept=0),
  "gemma4": GEMMA4,
}
OTHERS = {
  "the weight is a sigmoid of the logit": RouterRule(experts_per_token=1, weighting=Weighting.SIGMOID, weight_on_input=True),
  "experts are selected by random": RouterRule(experts_per_token=2, selection=Selection.RANDOM),
  "it would select on rounded probabilities": RouterRule(experts_per_token=6, weighting=Weighting.SOFTMAX_OF_ALL, scale=16.0),
  "it divides scores by their sum": dataclasses.replace(DEEPSEEK3, renormalize=False),
  "it has no score function softmax": dataclasses.replace(DEEPSEEK3, score_function="softmax"),
  "it takes weights from scores without bias, as they are": dataclasses.replace(DEEPSEEK3, weights_ignore_bias=False),
  "it takes weights from a softmax of what it selects on": RouterRule(experts_per_token=2, bias=True, weights_ignore_bias=True),
  "it values a group by its best 8/2 scores, not 2": dataclasses.replace(DEEPSEEK3, groups_kept=2),
}


@pytest.mark.parametrize("name", SERVED)
def test_served(name):
  assert te_router.reason_against(SERVED[name], "float32") == ""


@pytest.mark.parametrize("reason", OTHERS)
def test_not_served(reason):
  assert te_router.reason_against(OTHERS[reason], "float32") == reason


@pytest.mark.parametrize("name", SERVED)
def test_logits_that_tie_are_not_served(name):
  found = te_router.reason_against(SERVED[name], "bfloat16")
  assert found == "logits in bfloat16 (float32_gate_logits=false) often tie, and it breaks ties otherwise"
