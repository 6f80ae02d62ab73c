"""`RoutedMoE.__call__` under the plugin: MaxText's parameters and sharding rules in, our layer, MaxText's results out."""

import functools

import jax
import jax.numpy as jnp
from maxtext.layers import linears, moe

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import features, metrics, padding, parts, receive, rules_from_config
from maxtext_moe_te.moe import block, routing
from maxtext_moe_te.moe.experts.base import ExpertWeights
from maxtext_moe_te.moe.rules import RouterRule, Selection
from maxtext_moe_te.settings.config import MoeTeOptions


def replacing(options: MoeTeOptions):
  """The factory of the seam: `RoutedMoE.__call__` with this process's options."""

  def replace(original):
    @functools.wraps(original)
    def __call__(self, inputs, input_ids=None, gate_inputs=None, out_sharding=None, forced_routed_experts=None):
      if rules_from_config.is_sampler(self.config):
        given = {"input_ids": input_ids, "gate_inputs": gate_inputs, "out_sharding": out_sharding}
        forced = {} if forced_routed_experts is None else {"forced_routed_experts": forced_routed_experts}  # 0.2.4 has none
        return original(self, inputs, **given, **forced)
      del out_sharding  # as in MaxText's sparse path: the layer's own output sharding holds
      return _routed_moe(self, options, inputs, input_ids, gate_inputs, forced_routed_experts)

    return __call__

  return replace


def _routed_moe(module, options, inputs, input_ids, gate_inputs, forced_routed_experts):
  """(y [B,S,D], load-balance loss or None, bias update float32 [E], or int32 counts under gradient accumulation, or None)."""
  config = module.config
  if module.wi_0_sparsity_module is not None:
    raise RefusedError(found="weight sparsity in the expert products", needed="dense expert weights", fix="remove the sparsity rule")
  spec = rules_from_config.layer_spec(config, hash_routing=getattr(module, "is_hash_routing", False))
  inputs = inputs.astype(spec.dtype)
  layout = layout_of(module, inputs)
  gate_dtype = jnp.float32 if config.float32_gate_logits else config.dtype
  logits = gate_logits(module.gate, inputs if gate_inputs is None else gate_inputs.astype(gate_dtype))
  weights = expert_weights(module, layout)
  options = receive.settled(options, config, dict(layout.mesh.shape))
  out = block.moe_block(
    inputs,
    logits,
    router_inputs(module, spec.router, input_ids, forced_routed_experts),
    weights,
    spec=spec,
    layout=layout,
    parts=parts.choose(options, layout, spec, inputs.shape, weights.down.shape[1], logits.dtype),
    real=padding.real_tokens(inputs.shape) if options.padding == "skip" else None,
  )
  metrics.sow(module, out)
  return out.y, out.load_balance_loss, _bias_update(module, out.rows_per_expert)


def router_inputs(module: moe.RoutedMoE, rule: RouterRule, input_ids, forced_routed_experts) -> routing.RouterInputs:
  """What the rule needs from the module besides the logits.

  Raises:
    RefusedError: the model routes by token id and the caller gave none, or experts chosen elsewhere cannot be followed exactly.
  """
  if forced_routed_experts is not None and rule.weight_on_input:
    # MaxText sends an unused place through some expert, with half the token and weight 1.
    raise RefusedError(
      found="forced_routed_experts with decoder_block=llama4",
      needed="a model whose unused places add nothing",
      fix="set moe_te.enabled=false to replay this model on MaxText's own layer",
    )
  table_experts = key = None
  if rule.selection is Selection.TABLE:
    if input_ids is None:
      raise RefusedError(
        found="a hash-routed layer called without token ids",
        needed="a decoder that passes input_ids to its MoE layers",
        fix="set moe_te.enabled=false to run this model on MaxText's own layer",
      )
    table_experts = module.tid2eid.value.astype(jnp.int32)[input_ids.astype(jnp.int32)]
  if rule.selection is Selection.RANDOM:
    key = module.rngs.params()
  return routing.RouterInputs(
    bias=None if module.gate.bias is None else jnp.asarray(module.gate.bias[...], module.gate.dtype),
    expert_scale=module.per_expert_scale[...] if rule.expert_scale else None,
    table_experts=table_experts,
    key=key,
    replayed_experts=forced_routed_experts,
  )


def gate_logits(self: moe.GateLogit, inputs: jax.Array) -> jax.Array:
  """[B,S,E] in the gate's dtype: what `GateLogit` computes before score function and bias, quantized if it is.

  A method of the gate in all but place. qwix, which adds LoRA adapters and quantization, takes a product for that of the module that
  the nearest frame calls `self`.
  """
  axis = linears.normalize_axes(self.axis, inputs.ndim)
  return linears._compute_dot_general_nnx(
    jnp.asarray(inputs, self.dtype),
    jnp.asarray(self.kernel[...], self.dtype),
    axis,
    tuple(range(len(axis))),
    self.matmul_precision,
    self.quant_dot_general,
    False,
  )


def expert_weights(module: moe.RoutedMoE, layout: block.Layout) -> ExpertWeights:
  """The module's parameters, prefused or not. A prefused kernel split over F is taken apart: its halves are split, not it."""
  biases = {}
  if module.config.mlp_bias:
    biases = {
      "gate_bias": module.wi_0_bias[...],
      "up_bias": module.wi_1_bias[...],
      "down_bias": module.wo_bias[...],
    }
  if not module.config.prefuse_moe_weights:
    return ExpertWeights(down=module.wo[...], gate=module.wi_0[...], up=module.wi_1[...], **biases)
  if layout.size(layout.width) == 1:
    return ExpertWeights(down=module.wo[...], fused=module.wi[...], **biases)
  gate, up = jnp.split(module.wi[...], 2, axis=-1)
  return ExpertWeights(down=module.wo[...], gate=gate, up=up, **biases)


def layout_of(module: moe.RoutedMoE, inputs: jax.Array) -> block.Layout:
  """Which mesh axes split which dims, from MaxText's logical axis rules.

  Raises:
    RefusedError: experts or batch cannot be split over their axes.
  """
  mesh = module.mesh
  config = module.config
  rules_from_config.check_mesh(config, dict(mesh.shape))
  batch, sequence, _ = mesh_axes(module, ("activation_batch", "activation_norm_length", None))
  expert, _, width = mesh_axes(module, ("exp", None, "mlp_no_fsdp"))
  layout = block.Layout(mesh=mesh, batch=batch, sequence=sequence, expert=expert, width=width)
  if not expert or inputs.shape[0] == 1:
    # MaxText replicates a batch that its axes do not divide if there is no expert axis, and always a batch of 1 (prefill); so do we.
    while layout.batch and inputs.shape[0] % layout.size(layout.batch):
      layout = block.Layout(mesh=mesh, batch=layout.batch[:-1], sequence=sequence, expert=expert, width=width)
  shared = set(layout.tokens) & set(layout.width)
  if shared:
    raise RefusedError(
      found=f"mesh axes {', '.join(sorted(shared))} split both the tokens and the experts' width",
      needed="an axis for each",
      fix="change logical_axis_rules so that activation_batch, activation_norm_length and mlp_no_fsdp share no axis larger than 1",
    )
  ranks = layout.size(layout.expert)
  if config.num_experts % ranks:
    raise RefusedError(
      found=f"num_experts={config.num_experts} over mesh axes {', '.join(f'{a}={mesh.shape[a]}' for a in layout.expert)}",
      needed="as many experts on every rank",
      fix=f"change those axes so that their product divides {config.num_experts}",
    )
  for dim, size, axes in (("batch", inputs.shape[0], layout.batch), ("sequence", inputs.shape[1], layout.sequence)):
    if size % layout.size(axes):
      raise RefusedError(
        found=f"a {dim} of {size} over mesh axes {', '.join(f'{a}={mesh.shape[a]}' for a in axes)}",
        needed=f"a multiple of {layout.size(axes)}",
        fix="change per_device_batch_size or the parallelism of those axes"
        if dim == "batch"
        else "change max_target_length or the parallelism of those axes",
      )
  return layout


def mesh_axes(module: moe.RoutedMoE, logical_names) -> list[tuple[str, ...]]:
  """The mesh axes of each dim, as tuples; axes of size 1 are left out by MaxText."""
  spec = module._logical_to_mesh_axes(logical_names)
  dims = [*spec, *([None] * (len(logical_names) - len(spec)))]
  return [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims]


def _bias_update(module: moe.RoutedMoE, rows: jax.Array):
  """What MaxText's train step adds to the router bias; the raw counts if it sums them over microbatches first."""
  if not module.should_update_load_balance():
    return None
  if module.config.gradient_accumulation_steps > 1 and features.of_host().sums_counts:
    return rows
  return routing.bias_update(rows, module.config.routed_bias_update_rate)
