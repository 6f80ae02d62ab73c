"""MaxText's post-training on Tunix under the plugin: how parameters move and what is in a checkpoint are as without it."""

import pytest

from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers, tolerances
from tests.tunix import post_training

pytestmark = [pytest.mark.host, pytest.mark.tunix]

WORDS = ["model_name=qwen3-30b-a3b", "base_num_decoder_layers=1", "ici_fsdp_parallelism=1", "ici_data_parallelism=8"]


def assert_equal(ours, plain):
  assert ours.keys() == plain.keys()
  assert all(abs(moved).max() > 0 for name, moved in plain.items() if "gate" in name or "wo" in name)
  helpers.assert_close(ours, plain, forward=0, gradient=tolerances.FLOAT32_GRADIENT)


def test_sft(tmp_path):
  trainer, ours = post_training.sft(tmp_path / "ours", WORDS, MoeTeOptions())
  assert trainer.train_steps == 3
  assert_equal(ours, post_training.sft(tmp_path / "plain", WORDS)[1])


def test_dpo_and_its_checkpoints(tmp_path):
  """With Tunix's cache of the model's graph, as train_dpo has it: plain MaxText trains no MoE model with it."""
  words = [*WORDS, "enable_checkpointing=true", "async_checkpointing=false", "checkpoint_period=1"]
  trainer, ours = post_training.dpo(tmp_path / "ours", words, MoeTeOptions())
  assert trainer.train_steps == 3
  files = [path for path in (tmp_path / "ours").rglob("checkpoints/**/*") if path.is_file()]
  assert any(b"decoder_norm" in path.read_bytes() for path in files), "checkpoints name what they hold"
  assert not [path for path in files if b"moe_te" in path.read_bytes()]
  assert_equal(ours, post_training.dpo(tmp_path / "plain", WORDS, cached=False)[1])
  resumed, _ = post_training.dpo(tmp_path / "ours", [*words, "steps=4"], MoeTeOptions())
  assert resumed.train_steps == 4


def test_distillation(tmp_path):
  trainer, ours = post_training.distilled(tmp_path / "ours", WORDS, MoeTeOptions())
  assert trainer.train_steps == 3
  assert_equal(ours, post_training.distilled(tmp_path / "plain", WORDS, cached=False)[1])


def test_reinforcement_learning(tmp_path):
  trainer, ours = post_training.rl(tmp_path / "ours", WORDS, MoeTeOptions())
  assert trainer.train_steps == 3
  assert_equal(ours, post_training.rl(tmp_path / "plain", WORDS, cached=False)[1])


def test_the_training_engine(tmp_path):
  ours = post_training.engine(tmp_path, WORDS, MoeTeOptions())
  assert_equal(ours, post_training.engine(tmp_path, WORDS))
  assert any(moved.any() for moved in post_training.engine(tmp_path, WORDS, MoeTeOptions(), own_loss=False).values())
