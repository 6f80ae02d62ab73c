"""`moe_te.cast_weights`: expert weights cast once per step. The same bits where no device sums gradients, and elsewhere sums in the dtype
that was asked for."""

import collections
import logging
import re

import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances
from tests.host.test_training import DATA8, DEEPSEEK3, EXPERT2, MIXTRAL, QWEN3, losses

pytestmark = pytest.mark.host

EXPERT8 = ["ici_expert_parallelism=8", "ici_fsdp_parallelism=1"]
SUMLESS = {
  "deepseek3-mtp": [*DEEPSEEK3, "mtp_num_layers=1"],
  "qwen3-prefused-leading-layers": [*QWEN3, "prefuse_moe_weights=true", "param_scan_axis=0", "remat_policy=minimal"],
  "qwen3-unscanned": [*QWEN3, "scan_layers=false"],
  "mixtral-accumulated": [*MIXTRAL, "gradient_accumulation_steps=2", "per_device_batch_size=2"],
}


def built(folder, words, choice, **more):
  from maxtext_moe_te.host import step

  words = helpers.tiny_run(folder, ["dtype=bfloat16", *words])
  return step.build(words, options=MoeTeOptions(cast_weights=choice), **more)


def gradients_of(built_step, options=None):
  from maxtext_moe_te.host import step

  state = built_step.initialize()
  # XLA would otherwise leave out roundings, and not the same ones.
  compiled = built_step.compile({"xla_allow_excess_precision": False, **(options or {})})
  with built_step.context():
    for seed in range(2):
      state, _ = compiled(state, built_step.random_batch(seed))
  return step.gradients(state)


@pytest.mark.parametrize("case", SUMLESS)
def test_the_same_bits_where_nothing_is_summed(tmp_path, case):
  words = [*SUMLESS[case], *EXPERT8]
  wanted, found = (gradients_of(built(tmp_path, words, choice, keep_gradients=True)) for choice in ("layer", "auto"))
  assert any("'wo'" in name for name in wanted)
  assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


def casts(step):
  """Shapes of what becomes bfloat16, and how often, in the traced step: a loop's body counts once."""
  cast = r"stablehlo.convert %\S+ : \(tensor<([\dx]+x)f32>\) -> tensor<[\dx]+xbf16>"
  return collections.Counter(re.findall(cast, step.lowered.as_text()))


def test_one_cast_of_all_layers(tmp_path):
  words = [*QWEN3, *EXPERT8, "param_scan_axis=0", "base_moe_mlp_dim=40"]
  once, layerwise = (casts(built(tmp_path, words, choice)) for choice in ("auto", "layer"))
  assert (once["3x8x64x40x"], once["3x8x40x64x"]) == (2, 1)
  assert (layerwise["3x8x64x40x"], layerwise["3x8x40x64x"]) == (0, 0)
  assert (once["1x64x40x"], once["1x40x64x"]) == (0, 0), "cast again in the layer"
  assert layerwise["1x64x40x"] >= 2 and layerwise["1x40x64x"] >= 1


def sums(step):
  """dtypes in which gradients of the down kernel [8,40,64] are summed."""
  text = step.lowered.as_text()
  return set(re.findall(r"all_reduce.*?\}\) : \(tensor<8x40x64x(\w+)>\)", text, re.DOTALL))


@pytest.mark.parametrize("choice,dtype", [("auto", "f32"), ("layer", "f32"), ("step", "bf16")])
def test_dtype_of_sums_over_devices(tmp_path, choice, dtype):
  assert sums(built(tmp_path, [*QWEN3, *DATA8, "base_moe_mlp_dim=40"], choice)) == {dtype}


@pytest.mark.parametrize(
  "mesh,devices",
  [
    (dict(ici_expert_parallelism=8), 1),
    (dict(ici_expert_parallelism=4, ici_tensor_parallelism=2), 1),
    (dict(ici_expert_parallelism=4, ici_fsdp_parallelism=2), 2),
    (dict(ici_fsdp_parallelism=2, ici_data_parallelism=2, ici_tensor_parallelism=2), 4),
    (dict(ici_expert_parallelism=2, ici_context_parallelism=4), 4),
  ],
)
def test_how_many_devices_sum(mesh, devices):
  from flax.linen import partitioning

  from maxtext_moe_te.host import cast

  config = helpers.maxtext_config("mixtral-8x7b", **{"ici_fsdp_parallelism": 1, **mesh})
  with partitioning.axis_rules(config.logical_axis_rules):
    assert cast.gradient_sums(helpers.routed_moe(config, helpers.mesh_of(config, 8))) == devices


def test_auto_says_why_not(tmp_path, caplog):
  from maxtext_moe_te.host import parts

  parts.log_once.cache_clear()
  with caplog.at_level(logging.INFO, "maxtext_moe_te"):
    assert built(tmp_path, [*QWEN3, *EXPERT2], "auto").lowered
  assert (
    "expert weights are cast to bfloat16 in every layer, so that 4 devices sum their gradients in float32; moe_te.cast_weights=step is "
    "faster and sums them in bfloat16"
  ) in caplog.text


def test_losses_with_sums_in_bfloat16(tmp_path):
  words = [*QWEN3, *EXPERT2, "dtype=bfloat16", "steps=6"]
  layerwise, once = (helpers.train(tmp_path, words, options=MoeTeOptions(cast_weights=c)) for c in ("layer", "step"))
  helpers.assert_same_losses(once, layerwise, moved=0.05, bound=tolerances.BFLOAT16_TRAINING_LOSS)
  assert losses(once) != losses(layerwise)


def test_weights_in_host_memory(tmp_path):
  words = [*QWEN3, *DATA8, "parameter_memory_host_offload=true"]
  with pytest.raises(RefusedError) as refused:
    built(tmp_path, words, "step")
  assert str(refused.value) == (
    "moe_te.cast_weights=step with parameter_memory_host_offload=true, under which MaxText moves weights itself; needed: the cast in the "
    "layer. Fix: set moe_te.cast_weights=layer."
  )


def test_parameters_are_float32_again_after_an_error():
  from flax import nnx

  from maxtext_moe_te.host import cast

  config = helpers.maxtext_config("mixtral-8x7b", dtype="bfloat16")
  module = helpers.routed_moe(config, helpers.mesh_of(config, 8))
  dtypes = lambda: {str(leaf.dtype) for _, leaf in helpers.parameters(module)}

  def fails(model):
    assert dtypes() == {"float32", "bfloat16"}
    raise ValueError("from the model")

  with pytest.raises(ValueError, match="from the model"):
    cast.casting(MoeTeOptions(cast_weights="step"))(fails)(nnx.List([module]))
  assert dtypes() == {"float32"}
