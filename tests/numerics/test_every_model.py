"""Every MoE model file of MaxText: its routing and expert settings at reduced width, ours against MaxText's own layer.

The list is read from MaxText's folder, so that a model added there fails here until somebody decides about it.
"""

import pathlib

import jax
import jax.numpy as jnp
import pytest
import yaml
from tests import helpers, tolerances

from maxtext_moe_te.errors import MoeTeError

pytestmark = pytest.mark.host

# Refused: what the message must say.
REFUSED = {
    "deepseek3-671b-batchsplit": "use_batch_split_schedule",
    "qwen3.5-35b-a3b-fp8": "float8",
    "qwen3.5-397b-a17b-fp8": "float8",
}
# A second layer of the same model that computes something else.
HASHED = {"deepseek4-284b", "deepseek4-tiny"}


def model_files() -> list[str]:
  """Names of MaxText's model files with more than one expert."""
  import importlib.util

  spec = importlib.util.find_spec("maxtext")
  if spec is None:
    return ["maxtext-missing"]
  folder = pathlib.Path(spec.submodule_search_locations[0]) / "configs" / "models"
  settings = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yml"))}
  return [name for name, values in settings.items() if int(values.get("num_experts", 1)) > 1]


MODELS = model_files()


def reduced(model: str, dtype="float32", **more):
  """The model file's routing settings at the width of a test: 16 experts, at most 4 per token, groups kept in proportion."""
  import importlib.util

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


def both(model, *, dtype="float32", layer=None, **more):
  """(ours, MaxText's, the same inputs) for one layer of the model."""
  from maxtext.layers import moe

  config = reduced(model, dtype, **more)
  mesh = helpers.mesh_of(config, 1)
  module = helpers.routed_moe(config, mesh, **(layer or {}))
  x, cotangent = helpers.layer_inputs(config, batch=4)
  inputs = {}
  if config.decoder_block.value == "gemma4":
    inputs["gate_inputs"] = jax.random.normal(jax.random.key(7), x.shape)
  if layer:
    inputs["input_ids"] = jax.random.randint(jax.random.key(8), x.shape[:2], 0, config.vocab_size)
    table = jax.random.randint(jax.random.key(9), module.tid2eid.value.shape, 0, config.num_experts)
    module.tid2eid.value = table.astype(jnp.float32)
  run = lambda call: helpers.run_layer(config, mesh, call, module, x, cotangent, **inputs)
  return run(helpers.our_call(experts="ragged_dot")), run(moe.RoutedMoE.__call__)


@pytest.mark.parametrize("model", [m for m in MODELS if m not in REFUSED])
def test_float32_equals_maxtext(model):
  ours, theirs = both(model)
  helpers.assert_close(ours, theirs, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
  assert any(name.startswith("d_wi") for name in theirs)
  assert "d_gate.kernel" in theirs


@pytest.mark.parametrize("model", [m for m in MODELS if m in HASHED])
def test_hash_routed_layer_equals_maxtext(model):
  ours, theirs = both(model, layer=dict(is_hash_routing=True))
  helpers.assert_close(ours, theirs, forward=tolerances.FLOAT32_FORWARD, gradient=tolerances.FLOAT32_GRADIENT)
  assert "load_balance_loss" not in ours


@pytest.mark.parametrize("model", sorted(set(MODELS) & set(REFUSED)))
def test_refused_with_reason(model):
  from maxtext_moe_te.host import seams

  with pytest.raises(MoeTeError, match=REFUSED[model]):
    seams.check_config(reduced(model) if "fp8" not in model else reduced(model, weight_dtype="float8_e4m3fn"))


def test_every_refused_model_exists():
  assert set(MODELS) >= set(REFUSED)
