"""How many rows a rank of this run can receive, and in how many parts its tokens go: `auto` made numbers, once, in all processes alike."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp

from maxtext_moe_te.host import agreement, overflow, rules_from_config
from maxtext_moe_te.moe import capacity
from maxtext_moe_te.settings.config import AUTO, MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
_settled: dict = {}
_assumed: list[int | None] = []  # of the device that a run is only compiled for


def assume_memory(size: int | None) -> None:
  """From here on XLA's pool has so many bytes, or nobody knows how many: for what is compiled for GPUs that are not here."""
  _assumed[:] = [size]
  _settled.clear()


def settled(options: MoeTeOptions, config, axis_sizes, *, finite: bool = False, call: tuple[int, int] | None = None) -> MoeTeOptions:
  """The options with `capacity_factor` and `chunks` as numbers. The first question about a model and mesh decides for the process.

  Args:
    options: the plugin's.
    config: MaxText's configuration.
    axis_sizes: of the mesh.
    finite: whether this run's steps can run again where they exceed a finite capacity.
    call: sequences and their length in the largest batch of a call; None for a train step's.
  """
  if AUTO not in (options.capacity_factor, options.chunks):
    return options
  key = options, tuple(as_mapping(config).items()), tuple(sorted(axis_sizes.items())), rules_from_config.is_replaced(config)
  if key not in _settled:
    choice = _choice(options, config, axis_sizes, finite, call)
    if choice.why:
      log.info("moe_te.capacity_factor=%g moe_te.chunks=%d: %s", choice.capacity_factor, choice.chunks, choice.why)
    _settled[key] = dataclasses.replace(options, capacity_factor=choice.capacity_factor, chunks=choice.chunks)
  return _settled[key]


def _choice(options, config, axis_sizes, finite, call):
  factor, chunks = (None if value == AUTO else value for value in (options.capacity_factor, options.chunks))
  asked = axis_sizes.get("expert", 1) > 1 and factor is None and rules_from_config.is_replaced(config)
  return capacity.decided(
    as_mapping(config),
    axis_sizes,
    capacity_factor=factor if asked or factor is not None else 0.0,
    chunks=chunks,
    memory=_memory(config) if asked else None,
    finite=finite and can_run_again(options, config),
    call=call,
  )


def can_run_again(options: MoeTeOptions, config) -> bool:
  """Whether MaxText's train step, under this configuration, runs again where it exceeds a finite capacity."""
  excluded = config.enable_diloco, config.compiled_trainstep_file, *(getattr(config, key, False) for key in overflow.HOST_OFFLOAD)
  return options.on_overflow == "exact" and not any(excluded)


KEYS = (
  "num_experts", "num_experts_per_tok", "emb_dim", "moe_mlp_dim", "mlp_dim", "num_decoder_layers", "first_num_dense_layers",
  "max_target_length", "micro_batch_size_to_train_on", "moe_expert_input_dim", "weight_dtype", "mu_dtype", "opt_type",
  "shard_optimizer_over_data", "optimizer_memory_host_offload", "parameter_memory_host_offload", "remat_policy", "moe_x_sorted",
  "moe_mlpwi_0", "moe_mlpwo",
)  # fmt: skip


def as_mapping(config) -> dict:
  """What `moe.capacity` reads of a configuration."""
  values = {key: getattr(value := getattr(config, key, None), "value", value) for key in (*KEYS, "decoder_block")}
  return values | {key: jnp.dtype(values[key]).name for key in ("weight_dtype", "mu_dtype") if values[key]}


def _memory(config) -> int | None:
  """Bytes of XLA's pool on the smallest GPU of the run, which all processes agree on."""
  if _assumed:
    return _assumed[0]
  device = jax.local_devices()[0]
  own = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" and config.hardware != "cpu" else None
  said = [json.loads(verdict.reason) for verdict in agreement.agree(json.dumps(own), "device memory")]
  return None if None in said else min(said)
