"""MaxText 0.2.4: the same layer and the same losses as its own, and what it computes differently than 0.2.5 refused."""

import contextlib

import pytest

from maxtext_moe_te.errors import CapacityError, OptionError, RefusedError
from maxtext_moe_te.host import rules_from_config
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from tests import helpers
from tests.host.test_training import DEEPSEEK3, MIXTRAL
from tests.numerics import test_every_model as every

pytestmark = [pytest.mark.host, pytest.mark.host_0_2_4]

REFUSED = {
  **every.REFUSED,
  "kimi-k2-1t": "model_name=kimi-k2-1t on MaxText 0.2.4, which leaves the router bias in the weights; needed: MaxText 0.2.5.",
}
DATA8 = ["ici_fsdp_parallelism=1", "ici_data_parallelism=8"]


def balanced(model):
  """The weight of the balance loss: none where 0.2.4's takes the router bias for a score."""
  return 0.0 if model.startswith(rules_from_config.BIAS_FREE_WEIGHTS) else 0.01


@pytest.mark.parametrize("model", [model for model in every.MODELS if model not in REFUSED])
def test_layer_equals_maxtext(model):
  every.assert_equal(*every.both(model, load_balance_loss_weight=balanced(model)))


@pytest.mark.parametrize("model", [model for model in every.MODELS if model in REFUSED])
def test_refused(model):
  assert REFUSED[model] in str(rules_from_config.refusal(every.reduced(model, load_balance_loss_weight=0.0)))


@pytest.mark.parametrize(
  "changes,said",
  [
    (dict(model="deepseek3-671b"), "load_balance_loss_weight=0.01 on MaxText 0.2.4, whose balance loss adds the router bias; needed"),
    (dict(model="mixtral-8x7b", pure_nnx=False, enable_nnx=False, pure_nnx_decoder=False), "the model built with Linen; needed"),
  ],
  ids=["biased-balance-loss", "linen"],
)
def test_what_0_2_4_does_otherwise_is_refused(changes, said):
  refusal = rules_from_config.refusal(every.reduced(**changes))
  assert isinstance(refusal, RefusedError) and said in str(refusal)


CASES = {
  "mixtral": [*MIXTRAL, "load_balance_loss_weight=0.01"],
  "deepseek3-accumulated": [*DEEPSEEK3, "gradient_accumulation_steps=2", "per_device_batch_size=2"],
}
# Its sparse path takes the balance loss and the bias update of the first device's tokens for those of all.
DENSE = ["sparse_matmul=false", "capacity_factor=-1"]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_maxtext(tmp_path, case):
  words = ["steps=6", *CASES[case], *DATA8]
  plain = helpers.train_keeping_gradients(tmp_path, [*words, *DENSE])
  ours = helpers.train_keeping_gradients(tmp_path, words, options=MoeTeOptions())
  helpers.assert_same_training(ours, plain, moved=0.05)
  metrics = ours[0]
  assert metrics[-1]["moe_te/overflow"] == 0 and metrics[-1]["moe_te/receive_rows_max"] > 0


@pytest.mark.parametrize("value,said", [(False, None), (True, "unknown MaxText key 'te_moe_block'")])
def test_an_overlay_may_switch_off_what_0_2_4_has_not(tmp_path, value, said):
  overlay = Overlay(("test",), maxtext={"te_moe_block": value, "capacity_factor": -1.0})
  with contextlib.nullcontext() if said is None else pytest.raises(OptionError, match=said):
    assert len(helpers.train(tmp_path, [*MIXTRAL, *DATA8, "steps=1"], overlay=overlay, options=MoeTeOptions())) == 1


def test_a_finite_capacity_is_checked(tmp_path):
  words = [*MIXTRAL, "ici_expert_parallelism=4", "ici_fsdp_parallelism=2"]
  with pytest.raises(CapacityError, match="the step's update was not applied"):
    helpers.train(tmp_path, words, options=MoeTeOptions(capacity_factor=1.0))


def test_a_step_is_built(tmp_path):
  from maxtext_moe_te.host import step

  built = step.build(helpers.tiny_run(tmp_path, [*MIXTRAL, *DATA8]), options=MoeTeOptions(offload=("query_proj",)))
  assert built.named_bytes["query_proj"] > 0
  assert built.lowered.as_text()
