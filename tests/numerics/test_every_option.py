"""Settings that change what an MoE layer computes, one at a time, ours against MaxText's own layer in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError
from tests import helpers
from tests.numerics.test_every_model import assert_equal, both, layer_and_inputs

pytestmark = pytest.mark.host

CASES = {
  "mixtral-renormalized": ("mixtral-8x7b", dict(norm_topk_prob=True)),
  "qwen3-not-renormalized": ("qwen3-30b-a3b", dict(norm_topk_prob=False)),
  "gemma4-not-renormalized": ("gemma4-26b", dict(norm_topk_prob=False)),
  "gemma4-scale-fused-at-inference": ("gemma4-26b", dict(model_call_mode="inference", fuse_expert_scales=True)),
  "weights-summed-in-layer-dtype": ("qwen3-30b-a3b", dict(float32_weight_sum=False)),
  "gate-in-float32": ("deepseek3-671b", dict(float32_gate_logits=True)),
  "padded-experts": ("qwen3-30b-a3b", dict(padded_base_moe_mlp_dim=64)),
  "padded-experts-prefused": ("qwen3-30b-a3b", dict(padded_base_moe_mlp_dim=64, prefuse_moe_weights=True)),
  "biased-experts": ("mixtral-8x7b", dict(mlp_bias=True)),
  "activations-in-float32": ("mixtral-8x7b", dict(activations_in_float32=True)),
  "megatron-loss": ("deepseek3-671b", dict(moe_use_megatron_seq_aux_loss=True)),
  "megatron-loss-groups": ("deepseek3-671b", dict(moe_use_megatron_seq_aux_loss=True, n_routing_groups=4, topk_routing_group=2)),
  "megatron-loss-of-a-softmax-router": ("qwen3-30b-a3b", dict(moe_use_megatron_seq_aux_loss=True)),
  "no-loss": ("qwen3-30b-a3b", dict(load_balance_loss_weight=0.0)),
  "bias-update-off": ("deepseek3-671b", dict(routed_bias_update_rate=0.0)),
  "bias-counts-under-accumulation": ("deepseek3-671b", dict(routed_bias_update_rate=1e-3, gradient_accumulation_steps=2)),
  "direct-gather": ("mixtral-8x7b", dict(moe_use_direct_token_gather=True)),
  "router-matmul-vjp": ("deepseek3-671b", dict(router_topk_matmul_vjp=True)),
}
GROUPS = [(2, 1), (4, 2), (4, 3), (8, 4)]


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_maxtext(case):
  model, settings = CASES[case]
  assert_equal(*both(model, **settings))


@pytest.mark.parametrize(("groups", "kept"), GROUPS)
def test_expert_groups(groups, kept):
  assert_equal(*both("deepseek3-671b", n_routing_groups=groups, topk_routing_group=kept))


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek3-671b"])
def test_random_routing_draws_the_same_experts(model, monkeypatch):
  """On one device; MaxText's configuration allows it only with an expert axis, where each device draws from the same key."""
  from maxtext.layers import moe

  config, mesh, module, arrays, _ = layer_and_inputs(model)
  monkeypatch.setitem(config._flat_config, "use_random_routing", True)
  assert config.use_random_routing
  ours, theirs = (
    helpers.run_layer(config, mesh, call, module, *arrays) for call in (helpers.our_call(experts="ragged_dot"), moe.RoutedMoE.__call__)
  )
  assert_equal(ours, theirs)


@pytest.mark.parametrize("setting", ["norm_topk_prob", "float32_gate_logits"])
def test_the_setting_matters_in_bfloat16(setting):
  """What float32 cannot tell apart: MaxText's own layer changes with the setting, and ours changes as much."""
  from maxtext.layers import moe

  def run(call, value):
    config, mesh, module, arrays, _ = layer_and_inputs("qwen3-30b-a3b", dtype="bfloat16", rounded=True, **{setting: value})
    return helpers.run_layer(config, mesh, call, module, *arrays)["y"].astype(np.float32)

  calls = helpers.our_call(experts="ragged_dot"), moe.RoutedMoE.__call__
  (ours_on, theirs_on), (ours_off, theirs_off) = ([run(call, value) for call in calls] for value in (True, False))
  changed = helpers.relative_error(theirs_on, theirs_off)
  assert changed > 0
  assert helpers.within("change", abs(helpers.relative_error(ours_on, ours_off) - changed), 0.2 * changed)


def forced(unused):
  """Arguments of the call: experts chosen elsewhere, a share of the places unused; the first token has no place at all."""

  def given(config):
    experts = jax.lax.top_k(jax.random.normal(jax.random.key(3), (4, config.max_target_length, config.num_experts)), 4)[1]
    experts = experts[..., : config.num_experts_per_tok].astype(jnp.int32)
    if unused:
      experts = jnp.where(jax.random.uniform(jax.random.key(4), experts.shape) < unused, -1, experts).at[0, 0].set(-1)
    return dict(forced_routed_experts=experts)

  return given


REPLAYED = ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek2-16b", "deepseek3-671b", "gpt-oss-20b", "gemma4-26b", "envy-test"]


@pytest.mark.parametrize("unused", [0.0, 0.3], ids=["full", "with-unused-places"])
@pytest.mark.parametrize("model", REPLAYED)
def test_experts_chosen_elsewhere(model, unused):
  assert_equal(*both(model, given=forced(unused)))


def test_llama4_refuses_experts_chosen_elsewhere():
  """MaxText runs an unused place through some expert, with half the token and weight 1: nothing that anybody wants repeated."""
  config, mesh, module, arrays, _ = layer_and_inputs("llama4-17b-16e")
  with pytest.raises(RefusedError, match="forced_routed_experts with decoder_block=llama4"):
    helpers.run_layer(config, mesh, helpers.our_call(), module, *arrays, **forced(0.0)(config))
