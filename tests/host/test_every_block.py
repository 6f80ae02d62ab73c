"""Every decoder block that builds MoE layers, through MaxText's real train loop: with the plugin and without it, same losses and gradients.

Plain MaxText runs on a mesh without an expert axis, where its sparse path runs on a CPU; the global batch is the same, so losses and
gradients are too. With the plugin, each model runs without an expert axis and with one of 2, its layers scanned and unscanned.
"""

import pytest

from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host

MLA = [
  "q_lora_rank=32", "kv_lora_rank=16", "qk_nope_head_dim=16", "qk_rope_head_dim=16", "v_head_dim=16",
  "max_position_embeddings=32", "original_max_position_embeddings=32",
]  # fmt: skip
# Queries and keys are divided by their norms, which are tiny in narrow heads, and gradients then pass rounding on a thousandfold.
GATED_DELTA = [
  "gdn_key_head_dim=64", "gdn_value_head_dim=32", "gdn_num_key_heads=2", "gdn_num_value_heads=2", "gdn_chunk_size=16",
]  # fmt: skip
DEEPSEEK3 = ["model_name=deepseek3-tiny", "first_num_dense_layers=1", "base_num_decoder_layers=2", "routed_bias_update_rate=0.001", *MLA]
# As few layers as make one period of the block's pattern.
BLOCKS = {
  "deepseek": DEEPSEEK3,
  "deepseek4": [
    "model_name=deepseek4-tiny", "base_num_decoder_layers=3", "first_num_hash_layers=1", "compress_ratios=[0,4,128]",
    "base_num_kv_heads=1", "head_dim=32", "sinkhorn_iterations=2", "tokenizer_path=unused",
    "indexer_sparse_training=true",  # without it the language model's loss is left out
    "sharding_tolerance=1.0",
  ],
  "envy": ["model_name=envy-test", "base_num_decoder_layers=2", "num_experts_per_tok=1"],
  "gemma4": [
    "model_name=gemma4-26b", "base_num_decoder_layers=6", "global_head_dim=16",
    "learning_rate=0.01",  # its gradients are larger than the others' and change faster with the weights
  ],
  "gpt_oss": ["model_name=gpt-oss-20b", "base_num_decoder_layers=2"],
  "llama4": ["model_name=llama4-17b-16e", "base_num_decoder_layers=4", "num_experts_per_tok=1"],
  "mixtral": ["model_name=mixtral-8x7b", "base_num_decoder_layers=2"],
  "qwen3_5": ["model_name=qwen3.5-35b-a3b", "base_num_decoder_layers=4", "mrope_section=[1,1,0]", *GATED_DELTA],
  "qwen3_custom_moe": [
    "model_name=qwen3-custom-30b-a3b", "base_num_decoder_layers=2", "moe_expert_input_dim=32", "attention_output_dim=32",
  ],
  "qwen3_moe": ["model_name=qwen3-30b-a3b", "base_num_decoder_layers=2"],
  "qwen3_next": ["model_name=qwen3-next-80b-a3b", "base_num_decoder_layers=4", *GATED_DELTA],
}  # fmt: skip
# Unscanned, a layer costs compilation by itself, and the pattern over layers is what scanning is about.
TWO_LAYERS = ["base_num_decoder_layers=2"]
MTP = [*DEEPSEEK3, "mtp_num_layers=1", "mtp_loss_scaling_factor=0.3"]
DATA8 = ["ici_fsdp_parallelism=1", "ici_data_parallelism=8"]
EXPERT2 = ["ici_expert_parallelism=2", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"]


def hold(folder, words):
  """Trains 3 steps plain, and on each mesh 3 with the plugin, and compares; returns those of the last mesh."""
  plain = helpers.train_keeping_gradients(folder, [*words, *DATA8])
  for mesh in (DATA8, EXPERT2):
    ours = helpers.train_keeping_gradients(folder, [*words, *mesh], options=MoeTeOptions())
    helpers.assert_same_training(ours, plain)
    assert "moe_te/rows_per_expert_max/layer_000" in ours[0][-1]
  return ours[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_scanned(tmp_path, block):
  hold(tmp_path, [*BLOCKS[block], "scan_layers=true"])


@pytest.mark.parametrize("block", BLOCKS)
def test_unscanned(tmp_path, block):
  fewer = ["compress_ratios=[0,4]"] if block == "deepseek4" else []
  hold(tmp_path, [*BLOCKS[block], *TWO_LAYERS, *fewer, "scan_layers=false"])


def test_multi_token_prediction(tmp_path):
  steps = hold(tmp_path, MTP)
  assert steps[-1]["learning/mtp_loss"] > 0
  assert "moe_te/rows_per_expert_max/layer_001" in steps[-1], "the MoE layer of the MTP block reports too"


def test_no_block_is_missing():
  from maxtext_moe_te.host import rules_from_config

  assert set(BLOCKS) == set(rules_from_config.DECODER_BLOCKS)
