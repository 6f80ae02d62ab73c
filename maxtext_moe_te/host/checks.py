"""What is asked of a resolved configuration before anything is built. Imports none of MaxText's layers, so that it is cheap to ask."""

import jax

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import overflow, padding, parts, rules_from_config
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.settings.config import MoeTeOptions


def check_config(config, options: MoeTeOptions = MoeTeOptions()) -> None:
  """Refuses, before anything is built or written, a run that would not be exact.

  Raises:
    RefusedError: with the one change that makes it run.
    VersionError: Transformer Engine's mesh resources are not what MaxText and the plugin set.
  """
  refused = rules_from_config.refusal(config)
  if refused:
    raise refused
  if rules_from_config.is_replaced(config):
    sizes = axis_sizes(config)
    rules_from_config.check_mesh(config, sizes)
    parts.check_transport(options, sizes.get("expert", 1))
    logits_dtype = "float32" if config.float32_gate_logits else config.dtype
    parts.check_router(options, rules_from_config.router_rule(config), logits_dtype)
    overflow.check(options, config)
    padding.check(options, config)
    _check_cast(options, config)
  engine = te_api.find() if config.hardware.startswith("gpu") else None
  if engine is not None and not engine.incomplete:
    engine.require("context")  # which MaxText enters around the run


def _check_cast(options, config):
  if options.cast_weights == "step" and config.parameter_memory_host_offload:
    raise RefusedError(
      found="moe_te.cast_weights=step with parameter_memory_host_offload=true, under which MaxText moves weights itself",
      needed="the cast in the layer",
      fix="set moe_te.cast_weights=layer",
    )


def axis_sizes(config) -> dict[str, int]:
  """Size of every mesh axis; one left open (-1) gets the devices the others leave."""
  sizes = {}
  every = config.num_target_devices or jax.device_count()  # reinforcement learning's class leaves it open
  for parallelism, devices in (
    (config.ici_parallelism, every // max(config.num_slices, 1)),
    (config.dcn_parallelism, max(config.num_slices, 1)),
  ):
    known = 1
    for size in parallelism:
      known *= size if size > 0 else 1
    for axis, size in zip(config.mesh_axes, parallelism):
      sizes[axis] = sizes.get(axis, 1) * (size if size > 0 else max(devices // known, 1))
  return sizes
