"""A job's configuration, resolved by MaxText in a process of its own: `python -m maxtext_moe_te.tools.doctor.resolve`, JSON in and out.

Imports MaxText's configuration and none of its layers: some 8 s instead of 15.
"""

import json
import sys

from maxtext_moe_te.errors import MoeTeError, in_one_line

# What the checks ask for.
KEYS = (
  "model_name", "hardware", "dtype", "weight_dtype", "attention", "attention_type", "packing", "max_segments_per_seq", "quantization",
  "num_experts", "num_experts_per_tok", "emb_dim", "moe_mlp_dim", "mlp_dim", "num_decoder_layers", "first_num_dense_layers",
  "num_query_heads", "num_kv_heads", "head_dim", "kv_lora_rank", "q_lora_rank", "max_target_length", "micro_batch_size_to_train_on",
  "scan_layers", "tensors_to_offload", "moe_expert_input_dim", "num_slices", "compile_xla_flags", "qk_nope_head_dim", "qk_rope_head_dim",
  "v_head_dim", "mu_dtype", "opt_type", "shard_optimizer_over_data", "optimizer_memory_host_offload", "parameter_memory_host_offload",
  "remat_policy", "moe_x_sorted", "moe_mlpwi_0", "moe_mlpwo", "enable_checkpointing", "enable_autocheckpoint", "checkpoint_period", "steps",
  "enable_continuous_checkpointing",
)  # fmt: skip


def main() -> int:
  """Reads {words, overlay, options, domains, per_domain, pool} from standard input; writes {config, refused, selfcheck} after ANSWER."""
  request = json.load(sys.stdin)
  from maxtext.configs import pyconfig

  from maxtext_moe_te.host import checks, expert_group, parts, patching, receive, remat, rules_from_config, selfcheck
  from maxtext_moe_te.host.configuration.seam import config_seams
  from maxtext_moe_te.settings import overlay as overlays
  from maxtext_moe_te.settings.config import MoeTeOptions

  answer = {"config": {}, "refused": None}
  try:
    overlay = overlays.load(request["overlay"]) if request["overlay"] else None
    options = MoeTeOptions(**request["options"])
    gpus = request["domains"] * request["per_domain"]
    described = ["compile_topology=described", "internal_compile=true", f"internal_compile_num_devices={gpus}"]
    words = [*request["words"], *described, f"compile_topology_num_slices={request['domains']}", "log_config=false"]
    seams = config_seams(overlay, options)
    with patching.apply_all(seams):
      config = pyconfig.initialize(["maxtext-moe-te", *words])
    answer["config"] = {key: plain(getattr(config, key)) for key in KEYS if hasattr(config, key)}
    sizes = answer["config"]["axis_sizes"] = checks.axis_sizes(config)
    answer["config"]["decoder_block"] = plain(config.decoder_block)
    answer["config"]["lora_axes"] = {name: split(config.logical_axis_rules, name, sizes) for name in ("kv_lora", "q_lora")}
    if options.enabled:
      checks.check_config(config, options)
    remat.check(options, config)
    if options.enabled and rules_from_config.is_moe(config):
      receive.assume_memory(request["pool"])
      settled = receive.settled(options, config, sizes, finite=True)
      answer["config"]["nccl_ep_refused"] = refusal(
        lambda: expert_group.check_ep_group(settled, config, expert_group.ep_group(settled, config, sizes))
      )
    try:
      answer["selfcheck"] = selfcheck.settle(config, options)
    except MoeTeError as error:
      answer["selfcheck"] = error.found
      raise
    if options.enabled:
      parts.check_recipe(options)  # not Transformer Engine: the checks judge that of the machine where the job is to run
  except MoeTeError as error:
    answer["refused"] = error.fields
  except Exception as error:  # MaxText's own refusal: shown as it is
    text = " ".join(str(error).split())
    answer["refused"] = {"found": f"MaxText refuses the configuration: {text[:600]}", "needed": "another", "fix": "change what it names"}
  print("ANSWER", json.dumps(answer))
  return 0


def refusal(call) -> dict[str, str] | None:
  """What a check that raises says, or None."""
  try:
    call()
  except MoeTeError as error:
    return error.fields
  return None


def split(rules, name: str, sizes: dict[str, int]) -> dict[str, int]:
  """The mesh axes larger than 1 over which the first of MaxText's logical axis rules for `name` splits a dim, and their sizes."""
  axes = next((axes for logical, axes in rules if logical == name), ()) or ()
  return {axis: sizes[axis] for axis in ([axes] if isinstance(axes, str) else axes) if sizes.get(axis, 1) > 1}


def plain(value):
  """A value of MaxText's configuration as JSON has it."""
  value = getattr(value, "value", value)
  return value if isinstance(value, bool | int | float | str | list | None) else str(value)


if __name__ == "__main__":
  with in_one_line():
    sys.exit(main())
