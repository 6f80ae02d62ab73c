"""From a MaxText configuration to our rules: which router and experts it means, and what we refuse.

Everything here reads configuration values; nothing is traced and nothing is changed.
"""

import math

import jax
import jax.numpy as jnp

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import features, source
from maxtext_moe_te.moe.block import LayerSpec
from maxtext_moe_te.moe.routing import BalanceLoss
from maxtext_moe_te.moe.rules import ExpertRule, RouterRule, Selection, Weighting

# MaxText tests the model's name, not a setting, to decide whether the router bias enters the weights and whether expert groups
# are used (`RoutedMoE.get_topk`, `GateLogit.__call__`).
BIAS_FREE_WEIGHTS = ("deepseek3", "deepseek4", "kimi-k2")

DECODER_BLOCKS = (
  "deepseek",
  "deepseek4",
  "envy",
  "gemma4",
  "gpt_oss",
  "llama4",
  "mixtral",
  "qwen3_5",
  "qwen3_custom_moe",
  "qwen3_moe",
  "qwen3_next",
)


SAMPLERS = ("vllm_rpa", "vllm_batched_rpa")  # `attention` of a model that vLLM runs


def router_rule(config, *, hash_routing: bool = False) -> RouterRule:
  """The rule that MaxText's `get_topk` follows under this configuration.

  Args:
    config: the MaxText configuration.
    hash_routing: whether the layer looks its experts up by token id (the first layers of DeepSeek-V4).
  """
  block, score = block_name(config), config.routed_score_func
  bias_free = config.model_name.startswith(BIAS_FREE_WEIGHTS)
  selection = Selection.TABLE if hash_routing else Selection.RANDOM if config.use_random_routing else Selection.TOP
  common = dict(
    experts_per_token=config.num_experts_per_tok,
    selection=selection,
    score_function=score,
    bias=config.routed_bias and not hash_routing,
    weights_ignore_bias=bias_free,
    groups=max(config.n_routing_groups, 0) if bias_free else 0,
    groups_kept=config.topk_routing_group if bias_free and config.n_routing_groups > 0 else 0,
  )
  if block in ("deepseek", "deepseek4"):
    return RouterRule(
      **common,
      weighting=Weighting.SCORES,
      renormalize=score in ("sigmoid", "sqrtsoftplus"),
      renormalize_epsilon=1e-20,
      scale=config.routed_scaling_factor,
    )
  if block == "llama4":
    return RouterRule(**common, weighting=Weighting.SIGMOID, weight_on_input=True)
  if block == "gemma4":
    fused = config.model_call_mode == "inference" and config.fuse_expert_scales  # MaxText has put it into wo
    return RouterRule(**common, weighting=Weighting.SOFTMAX_OF_ALL, renormalize=config.norm_topk_prob, expert_scale=not fused)
  return RouterRule(**common, weighting=Weighting.SOFTMAX, renormalize=config.norm_topk_prob)


def expert_rule(config) -> ExpertRule:
  """The rule that MaxText's `apply_ffn_activation` follows under this configuration."""
  block, limit = block_name(config), config.mlp_activations_limit
  common = dict(activation=config.mlp_activations[0], activation_in_float32=config.activations_in_float32)
  if block == "gpt_oss":
    return ExpertRule(**common, clamp=limit, gate_scale=1.702, self_gated=True, up_offset=1.0)
  clamps = block in ("deepseek", "deepseek4") and limit > 0.0
  return ExpertRule(**common, clamp=limit if clamps else None)


def layer_spec(config, *, hash_routing: bool = False) -> LayerSpec:
  """Everything the layer computes, from the configuration; see `router_rule` for `hash_routing`."""
  megatron = getattr(config, "moe_use_megatron_seq_aux_loss", False) and config.routed_score_func == "sigmoid"
  coefficient = config.load_balance_loss_weight
  if not features.of_host().balance_loss_divides_by_k:
    coefficient *= config.num_experts_per_tok
  return LayerSpec(
    num_experts=config.num_experts,
    router=router_rule(config, hash_routing=hash_routing),
    expert=expert_rule(config),
    dtype=jnp.dtype(config.dtype),
    sum_dtype=jnp.dtype(jnp.float32 if config.float32_weight_sum else config.dtype),
    load_balance_coefficient=0.0 if hash_routing else coefficient,
    balance_loss=BalanceLoss.MEGATRON_SEQUENCE if megatron else BalanceLoss.SWITCH_SEQUENCE,
  )


def block_name(config) -> str:
  """The decoder block's name as written in a YAML."""
  return getattr(config.decoder_block, "value", config.decoder_block)


def is_moe(config) -> bool:
  """Whether this configuration builds any MoE layer."""
  return config.num_experts > 1


def is_replaced(config) -> bool:
  """Whether the plugin's layer takes the place of MaxText's under this configuration."""
  return is_moe(config) and not is_sampler(config)


def is_sampler(config) -> bool:
  """Whether this configuration is that of a model inside vLLM, whose MoE layer is vLLM's: it stays on MaxText's own."""
  return config.attention in SAMPLERS


def refusal(config) -> RefusedError | None:
  """Why this configuration would not be exact under the plugin, or None."""
  if not is_replaced(config):
    return None
  for wrong, found, needed, fix in (*_rules_of_refusal(config), *_rules_of_this_source(config)):
    if wrong:
      return RefusedError(found=found, needed=needed, fix=fix)
  return None


def _rules_of_refusal(config):
  """(condition, found, needed, fix), most fundamental first."""
  off = "or run this model without the plugin's layer (moe_te.enabled=false)"
  block = block_name(config)
  yield (
    block not in DECODER_BLOCKS,
    f"decoder_block={block} (model_name={config.model_name})",
    f"one of {', '.join(DECODER_BLOCKS)}, whose layers are held to MaxText's by a test",
    "set moe_te.enabled=false to run this model on MaxText's own layer",
  )
  for key in ("use_batch_split_schedule", "use_lineage"):
    yield (
      getattr(config, key, False),
      f"{key}=true, a schedule that never calls the MoE layer the plugin replaces",
      f"{key}=false",
      f"set {key}=false, {off}",
    )
  quantization = str(getattr(config.quantization, "value", config.quantization) or "")
  yield (
    bool(quantization) and not quantization.startswith("te_"),
    f"quantization={quantization}, which MaxText applies to expert products too",
    "quantization='' or one of Transformer Engine's recipes (te_…)",
    f"set quantization='', {off}",
  )
  weight_dtype = str(getattr(config.weight_dtype, "name", config.weight_dtype))
  yield (
    "float8" in weight_dtype,
    f"weight_dtype={weight_dtype}, weights with scales",
    "weight_dtype=float32 or bfloat16",
    f"set weight_dtype=bfloat16 and convert the checkpoint, {off}",
  )
  yield (
    str(getattr(config.shard_mode, "value", config.shard_mode)) != "auto",
    f"shard_mode={getattr(config.shard_mode, 'value', config.shard_mode)}",
    "shard_mode=auto",
    f"set shard_mode=auto, {off}",
  )
  yield (
    config.num_experts_per_tok > config.num_experts or config.num_experts_per_tok < 1,
    f"num_experts_per_tok={config.num_experts_per_tok} with num_experts={config.num_experts}",
    "at least one expert per token and no more than there are",
    "set num_experts_per_tok",
  )
  score = config.routed_score_func
  yield (
    not hasattr(jax.nn, score or "softmax") and score != "sqrtsoftplus",
    f"routed_score_func={score}",
    "a function of jax.nn such as softmax or sigmoid, or sqrtsoftplus",
    "set routed_score_func=softmax or sigmoid, as the model's authors do",
  )
  yield (
    block == "llama4" and (config.num_experts_per_tok > 1 or config.norm_topk_prob),
    f"decoder_block=llama4 with num_experts_per_tok={config.num_experts_per_tok}, norm_topk_prob={config.norm_topk_prob}",
    "one expert per token and no normalization: the weight multiplies the token itself",
    "set num_experts_per_tok=1 norm_topk_prob=false",
  )
  yield (
    config.using_pipeline_parallelism,
    "pipeline parallelism (a stage axis larger than 1)",
    "a mesh whose stage axis has size 1",
    f"set ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1, {off}",
  )
  yield (
    getattr(config, "moe_dropless_fallback", None) is not None,
    f"moe_dropless_fallback={getattr(config, 'moe_dropless_fallback', None)}, which replays what dropped tokens",
    "no fallback: under the plugin nothing drops any",
    "remove moe_dropless_fallback (and retry_dropless_first_steps)",
  )


def _rules_of_this_source(config):
  """As `_rules_of_refusal`: what the imported MaxText computes otherwise than the model means, and the plugin does not follow."""
  has = features.of_host()
  here, newer = f"this MaxText ({source.version()})", "the source of MaxText 0.2.5 or newer"
  linen = [key for key in ("pure_nnx", "enable_nnx", "pure_nnx_decoder") if not getattr(config, key, True)]
  yield (
    bool(linen),
    f"{' and '.join(f'{key}=false' for key in linen)}, the model built with Linen",
    "a model built with NNX",
    f"set {' '.join(f'{key}=true' for key in linen)}",
  )
  tiles = getattr(config, "num_vocab_tiling", 1)
  yield (
    tiles > 1 and not has.scales_tiled_gradients,
    f"num_vocab_tiling={tiles} on {here}, whose backward pass leaves a factor out of the gradients",
    "num_vocab_tiling=1",
    "set num_vocab_tiling=1",
  )
  bias_free = config.model_name.startswith(BIAS_FREE_WEIGHTS)
  yield (
    bias_free and config.routed_bias and not config.model_name.startswith(has.bias_free_weights),
    f"model_name={config.model_name} on {here}, which leaves the router bias in the weights",
    newer,
    "pip install maxtext==0.2.5",
  )
  yield (
    has.balance_loss_has_bias and config.load_balance_loss_weight > 0 and config.routed_bias and bias_free,
    f"load_balance_loss_weight={config.load_balance_loss_weight:g} on {here}, whose balance loss adds the router bias",
    f"{newer}, or load_balance_loss_weight=0",
    "pip install maxtext==0.2.5, or set load_balance_loss_weight=0",
  )


def check_mesh(config, axis_sizes: dict[str, int]):
  """Refuses a mesh that the experts or the batch cannot be split over.

  Args:
    config: the MaxText configuration.
    axis_sizes: size of every mesh axis.

  Raises:
    RefusedError: naming the sizes and the nearest that would do.
  """
  if not is_moe(config):
    return
  if axis_sizes.get("tensor_sequence", 1) > 1:
    raise RefusedError(
      found=f"a tensor_sequence axis of {axis_sizes['tensor_sequence']}, which splits both the tokens and the experts' width",
      needed="an axis for each: MaxText's own layer adds up different tokens on such a mesh",
      fix="set ici_tensor_sequence_parallelism=1 and use ici_tensor_parallelism or ici_context_parallelism",
    )
  ranks = axis_sizes.get("expert", 1)
  if config.num_experts % ranks:
    raise RefusedError(
      found=f"num_experts={config.num_experts} on an expert axis of {ranks}",
      needed="as many experts on every rank",
      # A divisor of both, so that it divides the devices too.
      fix=f"set ici_expert_parallelism={math.gcd(config.num_experts, ranks)} (or another divisor of {config.num_experts})",
    )
