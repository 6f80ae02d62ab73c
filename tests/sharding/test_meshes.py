"""The layer on 8 CPU devices against MaxText's own layer on one, float32, forward and every gradient."""

import jax
import pytest

from maxtext_moe_te.errors import RefusedError
from tests import helpers, tolerances

pytestmark = pytest.mark.host

FAMILIES = {
  "deepseek3": dict(model_name="deepseek3-671b", n_routing_groups=4, topk_routing_group=2, routed_bias_update_rate=1e-3),
  "mixtral": dict(model_name="mixtral-8x7b"),
  "qwen3": dict(model_name="qwen3-30b-a3b"),
}
MESHES = {
  "expert4-fsdp2": dict(ici_expert_parallelism=4, ici_fsdp_parallelism=2),
  "expert2-data2-fsdp2": dict(ici_expert_parallelism=2, ici_data_parallelism=2, ici_fsdp_parallelism=2),
  "expert2-tensor2-fsdp2": dict(ici_expert_parallelism=2, ici_tensor_parallelism=2, ici_fsdp_parallelism=2),
  "expert2-context2-tensor2": dict(ici_expert_parallelism=2, ici_context_parallelism=2, ici_tensor_parallelism=2, ici_fsdp_parallelism=1),
  "expert8": dict(ici_expert_parallelism=8, ici_fsdp_parallelism=1),
  "data4-fsdp2": dict(ici_data_parallelism=4, ici_fsdp_parallelism=2),
}


@pytest.fixture(scope="module")
def on_one_device():
  """MaxText's own results on one device, by family."""
  cache = {}

  def get(family, prefused):
    if (family, prefused) not in cache:
      from maxtext.layers import moe

      config = helpers.maxtext_config(**FAMILIES[family], ici_fsdp_parallelism=1, prefuse_moe_weights=prefused)
      mesh = helpers.mesh_of(config, 1)
      module = helpers.routed_moe(config, mesh)
      results = helpers.run_layer(config, mesh, moe.RoutedMoE.__call__, module, *helpers.layer_inputs(config))
      cache[family, prefused] = results
    return cache[family, prefused]

  return get


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_device(on_one_device, family, mesh_name):
  assert jax.device_count() >= 8, "the suite forces 8 CPU devices"
  prefused = "tensor" in mesh_name or family == "mixtral"
  config = helpers.maxtext_config(**FAMILIES[family], **MESHES[mesh_name], prefuse_moe_weights=prefused)
  mesh = helpers.mesh_of(config, 8)
  module = helpers.routed_moe(config, mesh)
  for experts in ("ragged_dot", "blocked") if mesh_name == "expert4-fsdp2" else ("ragged_dot",):
    actual = helpers.run_layer(config, mesh, helpers.our_call(experts=experts), module, *helpers.layer_inputs(config))
    helpers.assert_close(actual, on_one_device(family, prefused), forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


@pytest.mark.parametrize("family", ["deepseek3", "mixtral"])
def test_a_batch_of_one_is_replicated(family):
  """As MaxText's prefill has it: `decode_batch_moe` names no expert axis."""
  from maxtext.layers import moe

  results = []
  for devices, mesh_name in ((1, None), (8, "expert2-data2-fsdp2")):
    config = helpers.maxtext_config(**FAMILIES[family], **MESHES.get(mesh_name, dict(ici_fsdp_parallelism=1)))
    mesh = helpers.mesh_of(config, devices)
    call = helpers.our_call() if mesh_name else moe.RoutedMoE.__call__
    inputs = helpers.layer_inputs(config, batch=1)
    results.append(helpers.run_layer(config, mesh, call, helpers.routed_moe(config, mesh), *inputs))
  helpers.assert_close(results[1], results[0], forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


def test_an_axis_that_splits_tokens_and_width_is_refused():
  config = helpers.maxtext_config("mixtral-8x7b", ici_tensor_sequence_parallelism=2, ici_fsdp_parallelism=4)
  mesh = helpers.mesh_of(config, 8)
  module = helpers.routed_moe(config, mesh)
  with pytest.raises(RefusedError, match="a tensor_sequence axis of 2, which splits both the tokens and the experts' width"):
    helpers.run_layer(config, mesh, helpers.our_call(), module, *helpers.layer_inputs(config))


CHUNKED = [
  ("deepseek3", "expert4-fsdp2", 4),
  ("deepseek3", "expert2-context2-tensor2", 2),
  ("mixtral", "expert8", 8),
  ("qwen3", "data4-fsdp2", 2),
]


@pytest.mark.parametrize(("family", "mesh_name", "chunks"), CHUNKED)
def test_tokens_in_parts_equal_one_device(on_one_device, family, mesh_name, chunks):
  prefused = "tensor" in mesh_name or family == "mixtral"
  config = helpers.maxtext_config(**FAMILIES[family], **MESHES[mesh_name], prefuse_moe_weights=prefused)
  mesh = helpers.mesh_of(config, 8)
  module = helpers.routed_moe(config, mesh)
  actual = helpers.run_layer(config, mesh, helpers.our_call(chunks=chunks), module, *helpers.layer_inputs(config))
  helpers.assert_close(actual, on_one_device(family, prefused), forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


def test_parts_that_do_not_divide_the_tokens():
  config = helpers.maxtext_config("mixtral-8x7b", ici_expert_parallelism=8, ici_fsdp_parallelism=1)
  mesh = helpers.mesh_of(config, 8)
  tokens = 8 * config.max_target_length // 8
  with pytest.raises(RefusedError, match=rf"moe_te\.chunks=3 with {tokens} tokens on a device; .* Fix: set moe_te\.chunks=2, or change"):
    helpers.run_layer(config, mesh, helpers.our_call(chunks=3), helpers.routed_moe(config, mesh), *helpers.layer_inputs(config))
