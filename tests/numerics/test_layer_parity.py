"""One RoutedMoE layer of each family, ours against MaxText's own, float32, forward and every gradient, on one device."""

import pytest

from tests import helpers, tolerances

pytestmark = pytest.mark.host

FAMILIES = {
  "deepseek3": dict(model_name="deepseek3-671b", n_routing_groups=4, topk_routing_group=2, routed_bias_update_rate=1e-3),
  "deepseek3-no-groups": dict(model_name="kimi-k2-1t", routed_bias_update_rate=0.0),
  "deepseek2": dict(model_name="deepseek2-16b"),
  "mixtral": dict(model_name="mixtral-8x7b"),
  "qwen3": dict(model_name="qwen3-30b-a3b"),
}
ONE_DEVICE = dict(ici_fsdp_parallelism=1)


@pytest.fixture(scope="module")
def maxtext_results():
  """MaxText's results per (family, sparse), computed once."""
  cache = {}

  def get(family, sparse, prefused):
    key = family, sparse, prefused
    if key not in cache:
      from maxtext.layers import moe

      path = dict(sparse_matmul=True) if sparse else dict(sparse_matmul=False, capacity_factor=-1.0)
      config = helpers.maxtext_config(**FAMILIES[family], **ONE_DEVICE, **path, prefuse_moe_weights=prefused)
      mesh = helpers.mesh_of(config, 1)
      module = helpers.routed_moe(config, mesh)
      cache[key] = helpers.run_layer(config, mesh, moe.RoutedMoE.__call__, module, *helpers.layer_inputs(config))
    return cache[key]

  return get


def ours(family, experts, prefused):
  config = helpers.maxtext_config(**FAMILIES[family], **ONE_DEVICE, prefuse_moe_weights=prefused)
  mesh = helpers.mesh_of(config, 1)
  module = helpers.routed_moe(config, mesh)
  return helpers.run_layer(config, mesh, helpers.our_call(experts=experts), module, *helpers.layer_inputs(config))


@pytest.mark.parametrize("prefused", [False, True], ids=["unfused", "prefused"])
@pytest.mark.parametrize("experts", ["reference", "ragged_dot", "blocked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_sparse_path(maxtext_results, family, experts, prefused):
  expected = maxtext_results(family, True, prefused)
  helpers.assert_close(ours(family, experts, prefused), expected, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_dense_path(maxtext_results, family):
  """MaxText's dense path defines the load-balance loss of DeepSeek-V3 on the biased scores; there only the rest is compared."""
  expected = maxtext_results(family, False, False)
  actual = ours(family, "ragged_dot", False)
  if "deepseek3" in family:
    names = ("y", "bias_update", "d_wi_0", "d_wi_1", "d_wo")
    actual, expected = ({n: r[n] for n in names if n in r} for r in (actual, expected))
  helpers.assert_close(actual, expected, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


def test_the_comparison_can_fail(maxtext_results, on_purpose):
  expected = dict(maxtext_results("mixtral", True, False))
  wrong = {**expected, "d_wo": expected["d_wo"] * (1 + 2e-4)}
  with pytest.raises(AssertionError, match="d_wo"):
    helpers.assert_close(wrong, expected, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
