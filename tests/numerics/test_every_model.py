"""Every MoE model file of MaxText: its routing and expert settings at reduced width, ours against MaxText's own layer.

The list is read from MaxText's folder, so that a model added there fails here until somebody decides about it. The errors are
recorded (`--record-parity`) for `maxtext-moe-te models`, and may not grow tenfold unnoticed.
"""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from maxtext_moe_te.errors import MoeTeError
from maxtext_moe_te.moe.rules import Selection
from maxtext_moe_te.tools import models
from tests import helpers, tolerances

pytestmark = pytest.mark.host

# Refused: what the message must say.
REFUSED = {
  "deepseek3-671b-batchsplit": "use_batch_split_schedule",
  "qwen3.5-35b-a3b-fp8": "float8",
  "qwen3.5-397b-a17b-fp8": "float8",
}
# A second layer of the same model that computes something else.
HASHED = {"deepseek4-284b", "deepseek4-tiny"}


MODELS = models.model_files() if importlib.util.find_spec("maxtext") else ["maxtext-missing"]
EXACT = [model for model in MODELS if model not in REFUSED]


def reduced(model: str, dtype="float32", **more):
  """The model file's routing settings at the width of a test: 16 experts, at most 4 per token, groups kept in proportion."""
  folder = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0]) / "configs" / "models"
  values = yaml.safe_load((folder / f"{model}.yml").read_text())
  changes = dict(
    attention="dot_product",
    num_experts=16,
    num_experts_per_tok=min(int(values.get("num_experts_per_tok", 1)), 4),
    dtype=dtype,
    sparse_matmul=True,
    capacity_factor=-1.0,
    ici_fsdp_parallelism=1,
    tokenizer_path="unused",
    tokenizer_type="sentencepiece",
    load_balance_loss_weight=0.01,
  )
  if "engram_layers" in values:
    changes |= dict(engram_layers=[])  # needs a tokenizer from a hub; touches no MoE layer
  if "moe_expert_input_dim" in values:
    changes |= dict(moe_expert_input_dim=64, attention_output_dim=64)
  if values.get("n_routing_groups", -1) > 0:
    changes |= dict(n_routing_groups=4, topk_routing_group=2)
  if values.get("decoder_block") == "gpt_oss":
    changes |= dict(mlp_activations_limit=0.5)  # so that the clamp is met at test scale
  elif values.get("mlp_activations_limit", 0) and values["mlp_activations_limit"] > 0:
    changes |= dict(mlp_activations_limit=0.5)
  return helpers.maxtext_config(model, **{**changes, **more})


def layer_and_inputs(model, *, dtype="float32", batch=4, layer=None, rounded=False, **more):
  """(config, mesh, module, arguments of the call) for one layer of the model.

  Args:
    model: name of the model file.
    dtype: of the layer.
    batch: B.
    layer: further arguments of `RoutedMoE`.
    rounded: weights and inputs have bfloat16 values.
    **more: MaxText keys.
  """
  config = reduced(model, dtype, **more)
  mesh = helpers.mesh_of(config, 1)
  module = helpers.routed_moe(config, mesh, **(layer or {}))
  x, cotangent = helpers.layer_inputs(config, batch=batch)
  inputs = {}
  if config.decoder_block.value == "gemma4":
    inputs["gate_inputs"] = jax.random.normal(jax.random.key(7), x.shape)
  if layer:
    inputs["input_ids"] = jax.random.randint(jax.random.key(8), x.shape[:2], 0, config.vocab_size)
    table = jax.random.randint(jax.random.key(9), module.tid2eid.value.shape, 0, config.num_experts)
    module.tid2eid.value = table.astype(jnp.float32)
  if rounded:
    narrow = lambda array: array.astype(jnp.bfloat16).astype(array.dtype)
    for _, variable in helpers.parameters(module):
      variable[...] = narrow(variable[...])
    x, cotangent = narrow(x), narrow(cotangent)
    inputs = {name: narrow(array) if jnp.issubdtype(array.dtype, jnp.floating) else array for name, array in inputs.items()}
  return config, mesh, module, (x, cotangent), inputs


def both(model, *, experts="ragged_dot", given=lambda config: {}, **more):
  """(ours, MaxText's, the same inputs) for one layer of the model.

  Args:
    model: name of the model file.
    experts: our implementation of the experts.
    given: from the configuration to further arguments of the call.
    **more: see `layer_and_inputs`.
  """
  from maxtext.layers import moe

  config, mesh, module, arrays, inputs = layer_and_inputs(model, **more)
  run = lambda call: helpers.run_layer(config, mesh, call, module, *arrays, **inputs, **given(config))
  return run(helpers.our_call(experts=experts)), run(moe.RoutedMoE.__call__)


def assert_equal(ours, theirs):
  helpers.assert_close(ours, theirs, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)


@pytest.mark.parametrize("model", EXACT)
def test_float32_equals_maxtext(model, record):
  ours, theirs = both(model)
  assert_equal(ours, theirs)
  assert any(name.startswith("d_wi") for name in theirs)
  assert "d_gate.kernel" in theirs
  errors = {name: helpers.relative_error(ours[name], theirs[name]) for name in theirs}
  record(
    model,
    forward=max(error for name, error in errors.items() if not name.startswith("d_")),
    gradient=max(error for name, error in errors.items() if name.startswith("d_")),
  )


@pytest.mark.parametrize("model", [m for m in MODELS if m in HASHED])
def test_hash_routed_layer_equals_maxtext(model):
  ours, theirs = both(model, layer=dict(is_hash_routing=True))
  assert_equal(ours, theirs)
  assert "load_balance_loss" not in ours


@pytest.mark.parametrize("model", EXACT)
def test_bfloat16_is_as_good_as_maxtexts(model):
  """Both layers in bfloat16 against MaxText's in float32, from the same inputs and weights, which have bfloat16 values.

  All three compute the gate's logits in float32 from the same numbers (float32_gate_logits), so that they select the same experts:
  with another selection an error would say which scores lay close, not how well a layer computes.
  """
  from maxtext.layers import moe

  def run(dtype, call):
    config, mesh, module, arrays, inputs = layer_and_inputs(model, dtype=dtype, batch=16, rounded=True, float32_gate_logits=True)
    return helpers.run_layer(config, mesh, call, module, *arrays, **inputs)

  oracle = run("float32", moe.RoutedMoE.__call__)
  ours, theirs = run("bfloat16", helpers.our_call(experts="ragged_dot")), run("bfloat16", moe.RoutedMoE.__call__)
  assert ours.keys() == theirs.keys() == oracle.keys()
  worse = {}
  for name, wanted in oracle.items():
    our_error, their_error = (helpers.relative_error(result[name], wanted) for result in (ours, theirs))
    in_float32 = tolerances.FLOAT32_GRADIENT if name.startswith("d_") else tolerances.FLOAT32_FORWARD
    bound = max(tolerances.BFLOAT16_RATIO * their_error, in_float32)
    if not helpers.within(name, our_error - their_error, bound - their_error):
      worse[name] = f"{our_error:.2e} against {their_error:.2e}"
  assert not worse
  assert helpers.relative_error(theirs["y"], oracle["y"]) > 1e-3, "nothing was rounded, so the comparison shows nothing"


@pytest.mark.parametrize("model", sorted(set(MODELS) & set(REFUSED)))
def test_refused_with_reason(model, record):
  from maxtext_moe_te.host import seams

  with pytest.raises(MoeTeError, match=REFUSED[model]) as caught:
    seams.check_config(full(model))
  record(model, refused=caught.value.found)


def test_every_refused_model_exists():
  assert set(MODELS) >= set(REFUSED)


@functools.cache
def full(model):
  """The model file's own configuration, at full width."""
  from maxtext.configs import pyconfig

  return pyconfig.initialize(
    ["test", pyconfig.__file__.replace("pyconfig.py", "base.yml")],
    override_model_config=True,
    model_name=model,
    run_name="test",
    base_output_directory="unused",
    enable_checkpointing=False,
    hardware="cpu",
    skip_jax_distributed_system=True,
    log_config=False,
    attention="dot_product",
    sparse_matmul=True,
    capacity_factor=-1.0,
    engram_layers=[],
    tokenizer_path="unused",
    tokenizer_type="sentencepiece",
  )


@pytest.fixture
def record(request):
  """Records the result of a model, or holds it to the record."""
  from maxtext_moe_te.host import rules_from_config

  def call(model, **result):
    router = str(rules_from_config.router_rule(full(model)))
    if model in HASHED:
      router += f"; first layers by {Selection.TABLE.value}"
    result |= {"router": router, "experts": str(rules_from_config.expert_rule(full(model)))}
    records = json.loads(models.PARITY.read_text()) if models.PARITY.exists() else {}
    if request.config.getoption("--record-parity"):
      records[model] = {key: float(f"{value:.2g}") if isinstance(value, float) else value for key, value in result.items()}
      records = {name: records[name] for name in sorted(records) if name in MODELS}
      models.PARITY.write_text(json.dumps(records, indent=2) + "\n")
    assert model in records, "no record; run this file with --record-parity and commit what it writes"
    for key, value in result.items():
      if isinstance(value, float):
        # Less than one float32 rounding may come from another processor's order of summation.
        assert helpers.within(key, value, 10 * max(records[model][key], np.finfo(np.float32).eps)), f"{key} error has grown"
      else:
        assert value == records[model][key], key

  return call
