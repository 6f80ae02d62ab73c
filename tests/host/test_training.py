"""MaxText's real train loop, reduced models: with the plugin, without it, and with it switched off again."""

import sys

import jax
import pytest
from flax.linen import partitioning

from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

DEEPSEEK3 = [
  "model_name=deepseek3-tiny",
  "first_num_dense_layers=1",
  "q_lora_rank=32",
  "kv_lora_rank=16",
  "qk_nope_head_dim=16",
  "qk_rope_head_dim=16",
  "v_head_dim=16",
  "num_experts_per_tok=2",
  "max_position_embeddings=32",
  "original_max_position_embeddings=32",
  "routed_bias_update_rate=0.001",
]
MIXTRAL = ["model_name=mixtral-8x7b"]
QWEN3 = ["model_name=qwen3-30b-a3b"]
DATA8 = ["ici_fsdp_parallelism=1", "ici_data_parallelism=8"]
EXPERT2 = ["ici_expert_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"]
UNSCANNED = ["scan_layers=false"]
ACCUMULATED = ["gradient_accumulation_steps=2", "per_device_batch_size=2"]
# MaxText's sparse path needs a collective that CPUs lack once there is an expert axis; its dense path computes the same.
DENSE = ["sparse_matmul=false", "capacity_factor=-1"]
BALANCED = ["load_balance_loss_weight=0.01"]

CASES = {
  "deepseek3": (DEEPSEEK3 + DATA8, []),
  "deepseek3-unscanned-adam": (DEEPSEEK3 + DATA8 + UNSCANNED + helpers.ADAM, []),
  "deepseek3-expert2-accumulated": (DEEPSEEK3 + EXPERT2 + ACCUMULATED, DENSE),
  "mixtral-expert2-full-remat": (MIXTRAL + BALANCED + EXPERT2 + ["remat_policy=full"], DENSE),
  "mixtral-unscanned": (MIXTRAL + DATA8 + UNSCANNED, []),
  "qwen3-prefused-named-remat": (
    QWEN3 + DATA8 + ["remat_policy=custom", "moe_mlpwi_0=device", "moe_x_sorted=device", "prefuse_moe_weights=true"],
    [],
  ),
}


def losses(metrics):
  return [step["learning/loss"] for step in metrics]


def test_training_with_tokens_in_parts(tmp_path):
  words = [*DEEPSEEK3, *EXPERT2, *ACCUMULATED, *BALANCED, "remat_policy=full", "steps=3"]
  whole = helpers.train_keeping_gradients(tmp_path, words, options=MoeTeOptions())
  parts = helpers.train_keeping_gradients(tmp_path, words, options=MoeTeOptions(chunks=4))
  helpers.assert_same_training(parts, whole)
  of_whole, of_part = (metrics[-1]["moe_te/receive_capacity"] for metrics, _ in (whole, parts))
  assert of_part == of_whole / 4


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_maxtext(tmp_path, case):
  words, only_plain = CASES[case]
  plain = helpers.train_keeping_gradients(tmp_path, ["steps=10", *words, *only_plain])
  ours = helpers.train_keeping_gradients(tmp_path, ["steps=10", *words], options=MoeTeOptions())
  helpers.assert_same_training(ours, plain, moved=0.05)


def test_the_train_state_is_maxtexts(tmp_path):
  """Its tree, shapes, dtypes and places, Adam's moments among them."""
  from maxtext_moe_te.host import step

  words = helpers.tiny_run(tmp_path, [*DEEPSEEK3, *EXPERT2, *helpers.ADAM, "mu_dtype=bfloat16", "dtype=bfloat16"])
  ours, plain = (step.build(words, options=MoeTeOptions(enabled=enabled)).state for enabled in (True, False))
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  described = lambda state: [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(state)]
  assert described(ours) == described(plain)
  assert {"float32", "bfloat16"} <= {str(dtype) for _, dtype, _ in described(ours)}


@pytest.mark.parametrize("words", [DEEPSEEK3 + DATA8, QWEN3 + EXPERT2], ids=["deepseek3", "qwen3-expert2"])
def test_metrics_from_every_block(tmp_path, words):
  last = helpers.train(tmp_path, words, options=MoeTeOptions())[-1]
  layers = 2 if words[0] == DEEPSEEK3[0] else 3
  tokens, k, experts = 8 * 32, 2, 8
  for layer in range(layers):
    assert last[f"moe_te/rows_per_expert_mean/layer_{layer:03d}"] == tokens * k / experts
    assert last[f"moe_te/rows_per_expert_max/layer_{layer:03d}"] >= tokens * k / experts
  assert f"moe_te/rows_per_expert_mean/layer_{layers:03d}" not in last
  assert last["moe_te/overflow"] == 0
  assert 0 < last["moe_te/receive_rows_max"] <= last["moe_te/receive_capacity"]
  assert sum(last[f"moe_te/load/expert_{e:03d}"] for e in range(experts)) == pytest.approx(1)


def test_what_nobody_collects_is_not_left_in_the_model():
  """Tunix's trainers keep whatever a layer sows: in the model, and so in checkpoints."""
  from flax import nnx

  from maxtext_moe_te.host import metrics

  config = helpers.maxtext_config("mixtral-8x7b", ici_fsdp_parallelism=1)
  mesh = helpers.mesh_of(config, 1)
  module = helpers.routed_moe(config, mesh)
  x, _ = helpers.layer_inputs(config)

  def call():
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
      helpers.our_call()(module, x)

  call()
  assert not nnx.state(module, nnx.Intermediate)
  metrics.collecting(call)()
  assert set(nnx.state(module, nnx.Intermediate)) == {f"moe_te_{name}" for name in metrics.MEASURED}


def test_off_is_identical(tmp_path):
  words = ["steps=5", *DEEPSEEK3, *DATA8]
  plain = losses(helpers.train(tmp_path, words))
  on = losses(helpers.train(tmp_path, words, options=MoeTeOptions(experts="reference")))
  undone = losses(helpers.train(tmp_path, words))
  disabled = losses(helpers.train(tmp_path, words, options=MoeTeOptions(enabled=False)))
  assert undone == plain
  assert disabled == plain
  assert len(on) == 5


def test_undo_reaches_a_trainer_imported_while_active(monkeypatch):
  from maxtext.common import metric_logger
  from maxtext.trainers.pre_train import train

  import maxtext_moe_te

  stock = metric_logger.record_activation_metrics
  monkeypatch.delitem(sys.modules, train.__name__)  # not imported yet …
  with maxtext_moe_te.activate():
    monkeypatch.setitem(sys.modules, train.__name__, train)  # … and now it is, and binds the recorder's name
    monkeypatch.setattr(train, "record_activation_metrics", metric_logger.record_activation_metrics)
  assert train.record_activation_metrics is stock
  with maxtext_moe_te.activate():
    pass
  assert train.record_activation_metrics is stock
