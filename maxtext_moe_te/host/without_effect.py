"""MaxText keys that only its own MoE layer reads: under the plugin they do nothing, and who set one is told so."""

from maxtext.configs import types

from maxtext_moe_te.host import rules_from_config

# How MaxText's layer moves, sorts, chunks, tiles and quantizes rows. Not those that the plugin switches itself.
KEYS = (
  "use_tokamax_gmm", "use_gmm_v2", "use_gmm_v2_heuristic_tiling", "use_custom_sort_vjp", "use_ragged_sort",
  "ragged_sort_use_single_sparsecore",
  "ragged_gather_fallback", "ragged_gather_reduce_fallback", "ragged_gather_cost_estimate_bytes_accessed",
  "ragged_gather_cost_estimate_flops", "ragged_gather_reduce_cost_estimate_bytes_accessed", "ragged_gather_reduce_cost_estimate_flops",
  "use_ring_of_experts", "num_moe_token_chunks", "num_moe_emb_chunks", "moe_chunk_barrier", "moe_dispatch_no_expert_sharding",
  "moe_ep_all_gather_sparse_core_id", "moe_fsdp_all_gather_sparse_core_id", "moe_fsdp_use_two_stage_all_gather",
  "moe_pin_sparse_core_all_gathers", "moe_pin_sparse_core_ep_all_gathers", "moe_pin_sparse_core_fsdp_all_gathers",
  "moe_pin_sparse_core_fsdp_all_gathers_fwd_only", "moe_quantize_combine_bwd_method", "moe_quantize_token_all_gather",
  "moe_topk_before_ep_all_gather", "moe_use_direct_token_gather", "shard_embed_moe_on_fsdp", "return_routed_experts",
  "eval_ragged_buffer_factor", "log_required_ragged_buffer_factor", "moe_log_max_load_ratio",
  *(f"{product}_tile_{way}_{dim}" for product in ("wi", "wo") for way in ("fwd", "dlhs", "drhs")
    for dim in ("batch_seq", "embed_dim", "mlp_dim")),
)  # fmt: skip


def line(config) -> str:
  """Names what a configuration sets in vain, for the log; empty if there is nothing, or MaxText's own layer runs."""
  if not rules_from_config.is_replaced(config):
    return ""
  fields = types.MaxTextConfig.model_fields
  named = [key for key in KEYS if key in fields and getattr(config, key, None) != fields[key].default]
  settings = ", ".join(f"{key}={getattr(config, key)}" for key in named)
  return f"without effect under the plugin, because only MaxText's own MoE layer reads them: {settings}" if settings else ""
