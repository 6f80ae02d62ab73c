"""Offload of named tensors to host memory, through MaxText's own `remat_policy=custom`.

Owns what `moe_te.offload` adds to a configuration, and its refusal where it would be wrong or would do nothing. Whether the
compiler really moved the bytes is measured by `tools.offload`.
"""

from maxtext_moe_te.errors import OptionError, RefusedError, VersionError
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.versions import installed, offloads_wrongly

# What compiles: jaxlib for the CPU, the plugin for GPUs.
COMPILERS = ("jaxlib", "jax-cuda13-pjrt", "jax-cuda12-pjrt")

_SWITCHABLE = ("full", "custom")  # policies that keep nothing which remat_policy=custom would forget


def injected(options: MoeTeOptions, user: dict, resolved: dict, by_user) -> dict:
  """The MaxText keys that the option stands for.

  Args:
    options: the plugin's options.
    user: what the user wrote himself, by key.
    resolved: all keys so far, his included.
    by_user: names how he wrote a key.

  Raises:
    OptionError: his own words say something else.
  """
  if not options.offload:
    return {}
  for name in options.offload:
    if user.get(name, "offload") != "offload":
      raise OptionError(
        found=f"{by_user(name)} and moe_te.offload with {name}", needed="one place for each tensor", fix="remove one of the two"
      )
  policy = resolved.get("remat_policy", "full")
  if policy not in _SWITCHABLE:
    written = by_user("remat_policy") if "remat_policy" in user else f"remat_policy={policy}"
    raise OptionError(
      found=f"moe_te.offload={','.join(options.offload)} with {written}, which says itself what is kept",
      needed="remat_policy=full or custom",
      fix="set remat_policy=custom, and NAME=device for each tensor to be kept on the device",
    )
  if user.get("remat_policy") == "full":
    raise OptionError(
      found=f"moe_te.offload={','.join(options.offload)} with {by_user('remat_policy')}, under which nothing is kept",
      needed="remat_policy=custom",
      fix="remove remat_policy=full: every tensor that is not named is recomputed anyway",
    )
  return {"remat_policy": "custom", **dict.fromkeys(options.offload, "offload")}


def check(options: MoeTeOptions, config) -> None:
  """Refuses offload that would be wrong or would do nothing.

  Args:
    options: the plugin's options.
    config: the resolved MaxText configuration, the option's keys in it.

  Raises:
    VersionError: the compiler gives wrong gradients.
    RefusedError: this model has no such tensor, or MaxText keeps it on the device.
  """
  if not options.offload:
    return
  check_compiler(scan=config.scan_layers, versions={name: installed(name) for name in COMPILERS})
  produced = produced_names(config)
  for name in options.offload:
    if name not in produced:
      raise RefusedError(
        found=f"moe_te.offload with {name}, a tensor that this model does not have ({_why(config, name)})",
        needed=f"names among {', '.join(sorted(produced))}",
        fix=f"remove {name}",
      )
  if config.scan_layers and not any(length > 1 for length in scan_lengths(config)):
    raise RefusedError(
      found="moe_te.offload with scanned layers of which no scan is longer than 1: XLA then keeps the tensors on the device",
      needed="a scan of at least 2 layers",
      fix="set scan_layers=false, or base_num_decoder_layers to more",
    )


def check_compiler(*, scan: bool, versions: dict[str, str | None]) -> None:
  """Whether the compiler reads offloaded tensors back in the right order.

  Raises:
    VersionError: it does not.
  """
  for package, version in versions.items():
    if scan and version and offloads_wrongly(version):
      raise VersionError(
        found=f"moe_te.offload with {package} {version} and scanned layers: its gradients are wrong, without an error",
        needed="0.11.1 or newer (https://github.com/openxla/xla/pull/46308)",
        fix="pip install 'jax[cuda13]>=0.12', or set scan_layers=false",
      )


def produced_names(config) -> set[str]:
  """The tensors that some scanned or unrolled layer of this model names, and that MaxText would move to the host.

  A test holds this table to what tracing the models finds.
  """
  block = getattr(config.decoder_block, "value", config.decoder_block)
  attention = str(getattr(config.attention_type, "value", config.attention_type))
  names = set()
  if block in ("qwen3_next", "qwen3_5"):
    pass  # full attention is a scan of length 1, whose tensors MaxText keeps on the device; the linear layers name none
  elif block == "deepseek4":
    names |= {"query_proj", "kv_proj", "attention_out", "out_proj"}
  elif attention == "mla":
    names |= {"query_proj", "key_proj", "value_proj", "kv_wa_proj", "mla_kv", "attention_out", "out_proj"}
    names |= {"query_wa_proj", "mla_q"} if config.q_lora_rank > 0 else set()
  else:
    names |= {"query_proj", "key_proj", "value_proj", "attention_out", "out_proj"}
    names |= {"qkv_proj"} if config.fused_qkv else set()
  if names and config.attention in ("cudnn_flash_te", "cudnn_flash_jax"):
    names.add("context")
  if block not in ("qwen3_next", "qwen3_5"):
    names.add("decoder_layer_input")
  dense_or_shared = {"mlpwi_0", "mlpwi_1", "mlpwo"} if not config.fused_mlp else {"mlpwi", "mlpwo"}
  if config.num_experts > 1:
    names |= {"moe_x_sorted", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "mlpwi_0", "mlpwo"}
    if block in ("deepseek", "deepseek4", "envy", "llama4", "gemma4", "qwen3_next", "qwen3_5"):
      names |= dense_or_shared
  else:
    names |= dense_or_shared
  return names


def _why(config, name):
  if name == "context":
    return f"attention={config.attention} names none"
  if name.startswith("moe_") and config.num_experts <= 1:
    return "it has no experts"
  kind = getattr(config.attention_type, "value", config.attention_type)
  fused = ", fused_qkv=true" if config.fused_qkv else ""
  return f"decoder_block={getattr(config.decoder_block, 'value', config.decoder_block)}, attention_type={kind}{fused}"


def scan_lengths(config) -> list[int]:
  """Lengths of the scans over decoder layers."""
  block = getattr(config.decoder_block, "value", config.decoder_block)
  if block == "deepseek":
    return [config.first_num_dense_layers, config.num_decoder_layers - config.first_num_dense_layers]
  return [config.num_decoder_layers // max(getattr(config, "inhomogeneous_layer_cycle_interval", 1) or 1, 1)]
