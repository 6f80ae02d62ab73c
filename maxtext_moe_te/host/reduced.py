"""Every model of MaxText made small: what must be cut so that a layer, or a model of two layers, computes on a CPU in seconds.

Routing and expert settings stay as they are. Values are text, as on a command line.
"""

from typing import Any

# Widths, float32 and one place for everything.
COMMON = dict(
  override_model_config="true", hardware="cpu", skip_jax_distributed_system="true", log_config="false", enable_checkpointing="false",
  dtype="float32", weight_dtype="float32", grad_dtype="float32", matmul_precision="highest", quantization="''", attention="dot_product",
  base_emb_dim="64", base_mlp_dim="48", base_moe_mlp_dim="48", vocab_size="256", max_target_length="32", max_prefill_predict_length="16",
  pure_nnx="true", enable_nnx="true", pure_nnx_decoder="true",
  sparse_matmul="true", megablox="false", capacity_factor="-1", shard_mode="auto",
)  # fmt: skip
# Besides, for a whole model.
MODEL = dict(
  remat_policy="full", base_num_query_heads="4", base_num_kv_heads="4", head_dim="16",
  dataset_type="synthetic", steps="1", learning_rate="0.1", opt_type="sgd", enable_tensorboard="false", eval_interval="-1",
  decoder_layer_input="device",
)  # fmt: skip
_MLA = dict(
  q_lora_rank="32", kv_lora_rank="16", qk_nope_head_dim="16", qk_rope_head_dim="16", v_head_dim="16", max_position_embeddings="32",
  original_max_position_embeddings="32",
)  # fmt: skip
_GATED_DELTA = dict(
  gdn_key_head_dim="8", gdn_value_head_dim="8", gdn_num_key_heads="4", gdn_num_value_heads="4", gdn_chunk_size="16",
)  # fmt: skip
# By decoder block, for a whole model.
_BLOCKS: dict[str, dict[str, str]] = {
  "deepseek": dict(_MLA, first_num_dense_layers="1"),
  "deepseek4": dict(
    first_num_hash_layers="1", base_num_kv_heads="1", head_dim="32", sinkhorn_iterations="2",
    tokenizer_path="unused", indexer_sparse_training="true", sharding_tolerance="1.0",
  ),
  "envy": {},
  "gemma4": dict(global_head_dim="16"),
  "gpt_oss": {},
  "llama4": {},
  "mixtral": {},
  "qwen3_5": dict(_GATED_DELTA, mrope_section="[1,1,0]"),
  "qwen3_custom_moe": dict(moe_expert_input_dim="32", attention_output_dim="32"),
  "qwen3_moe": {},
  "qwen3_next": _GATED_DELTA,
}  # fmt: skip
# Scanned, one period of a block's pattern over layers; two layers where it has none.
_PERIODS = {"deepseek4": 3, "gemma4": 6, "llama4": 4, "qwen3_5": 4, "qwen3_next": 4}
# What a clamp is worth at this width: few values reach a model's own.
CLAMP = "0.5"


def of_layer(config: Any, fields: frozenset[str]) -> dict[str, str]:
  """Words that make the MoE layer of a run small.

  Args:
    config: the run's MaxText configuration.
    fields: the keys of MaxText's configuration; others are left out.
  """
  words = dict(COMMON, tokenizer_path="unused", tokenizer_type="sentencepiece")
  if getattr(config, "moe_expert_input_dim", 0) > 0:
    words |= dict(moe_expert_input_dim="64", attention_output_dim="64")
  if getattr(config, "engram_layers", None):
    words |= dict(engram_layers="[]")  # needs a tokenizer from a hub; touches no MoE layer
  if getattr(config, "mlp_activations_limit", 0.0) > 0:
    words |= dict(mlp_activations_limit=CLAMP)
  return {key: value for key, value in words.items() if key in fields}


def of_model(config: Any, fields: frozenset[str]) -> dict[str, str]:
  """Words that make a run's model one of two layers, or of one period of them where they are scanned; see `of_layer`."""
  block = getattr(config.decoder_block, "value", config.decoder_block)
  layers = _PERIODS.get(block, 2) if config.scan_layers else 2
  words = of_layer(config, fields) | MODEL | _BLOCKS.get(block, {})
  words |= dict(base_num_decoder_layers=str(layers), scan_layers=str(config.scan_layers).lower())
  if block == "deepseek4":
    words |= dict(compress_ratios=str([0, 4, 128][:layers]))
  if getattr(config, "mtp_num_layers", 0) > 0:
    words |= dict(mtp_num_layers="1")
  return {key: value for key, value in words.items() if key in fields}
