"""What the imported MaxText does is read from its source: one answer for each text, and what follows from it."""

import dataclasses

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import features, rules_from_config, source
from tests import helpers

pytestmark = pytest.mark.host


@pytest.fixture
def edited(monkeypatch):
  """Has a function of MaxText's read otherwise: (target, what stands there, what takes its place)."""
  whole = source.function

  def edit(target, old, new):
    file = whole(target).path.read_text()
    assert file.count(old) == 1
    text = source.of_text(file.replace(old, new), target)
    monkeypatch.setattr(source, "function", lambda asked: text if asked == target else whole(asked))
    features._of.cache_clear()
    return features.of_host()

  yield edit
  features._of.cache_clear()


EDITS = {
  "balance_loss_divides_by_k": (
    "maxtext.layers.moe:RoutedMoE.load_balance_loss",
    "density = jnp.mean(summed_expert_mask, axis=1) / self.num_experts_per_tok",
    "density = jnp.mean(summed_expert_mask, axis=1)",
  ),
  "scales_tiled_gradients": (
    "maxtext.utils.vocabulary_tiling:vocab_tiling_nnx_loss",
    "    grad_reshaped_hidden_states *= loss_cotangent\n",
    "",
  ),
  "optimizer_takes_mesh": (
    "maxtext.optimizers.optimizers:get_optimizer",
    "def get_optimizer(config, learning_rate_schedule, model=None, mesh=None):",
    "def get_optimizer(config, learning_rate_schedule, model=None):",
  ),
}


@pytest.mark.parametrize("name", EDITS)
def test_each_is_read_from_its_function(edited, name):
  here = features.of_host()
  assert getattr(here, name) is True
  assert edited(*EDITS[name]) == dataclasses.replace(here, **{name: False})


def test_tiled_gradients_without_their_factor_are_refused(edited):
  config = helpers.maxtext_config("mixtral-8x7b", num_vocab_tiling=4)
  assert rules_from_config.refusal(config) is None
  edited(*EDITS["scales_tiled_gradients"])
  refusal = rules_from_config.refusal(config)
  assert isinstance(refusal, RefusedError)
  assert f"num_vocab_tiling=4 on this MaxText ({source.version()}), whose backward pass leaves a factor out of the gradients" in str(
    refusal
  )
  assert str(refusal).endswith("needed: num_vocab_tiling=1. Fix: set num_vocab_tiling=1.")


def test_keys_without_effect_are_named():
  from maxtext_moe_te.host import without_effect

  assert without_effect.line(helpers.maxtext_config("mixtral-8x7b")) == ""
  set_in_vain = helpers.maxtext_config("mixtral-8x7b", use_custom_sort_vjp=False, wi_tile_fwd_mlp_dim=512)
  assert without_effect.line(set_in_vain) == (
    "without effect under the plugin, because only MaxText's own MoE layer reads them: use_custom_sort_vjp=False, wi_tile_fwd_mlp_dim=512"
  )
  dense = helpers.maxtext_config("mixtral-8x7b", num_experts=1, num_experts_per_tok=1, use_custom_sort_vjp=False)
  assert without_effect.line(dense) == ""
