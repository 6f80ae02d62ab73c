"""The NCCL EP group of a process: what it must hold, when it can serve, and when in a run of MaxText it is made."""

import functools
import logging

import jax.numpy as jnp

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import agreement, engine, rules_from_config
from maxtext_moe_te.moe import te_api, te_runtime
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
EXPERT_AXIS = "expert"


def bootstrapping(options: MoeTeOptions):
  """The factory of the seam on `max_utils.maybe_bootstrap_te_moe`, which MaxText calls once before it traces the model."""

  def replace(original):
    @functools.wraps(original)
    def maybe_bootstrap_te_moe(config, mesh, shaped_batch):
      if not rules_from_config.is_moe(config):
        return original(config, mesh, shaped_batch)
      bootstrap(options, config, mesh)
      return None

    return maybe_bootstrap_te_moe

  return replace


def bootstrapping_before_state(options: MoeTeOptions):
  """The same on `maxtext_utils.setup_training_state`: in MaxText 0.2.4 the first call that gets the mesh and traces the model."""

  def replace(original):
    @functools.wraps(original)
    def setup_training_state(data_iterator, config, mesh, *args, **kwargs):
      bootstrap(options, config, mesh)
      return original(data_iterator, config, mesh, *args, **kwargs)

    return setup_training_state

  return replace


def bootstrap(options: MoeTeOptions, config, mesh) -> None:
  """Decides what of Transformer Engine the run uses, and makes the NCCL EP group if it will use one: all processes, or none.

  Raises:
    MoeTeError: a part was asked for by name, and a process cannot use it; in every process the same.
  """
  device = mesh.devices.flat[0]
  if device.platform == "cpu" or not rules_from_config.is_moe(config):
    return
  engine.decide(options, device)
  if options.transport not in ("auto", "nccl_ep") or mesh.shape.get("expert", 1) == 1:
    return
  group = ep_group(options, config, dict(mesh.shape))
  # A process that took XLA's collectives alone would leave the others waiting for it in the bootstrap.
  error = agreement.together(lambda: _check_nccl_ep(config, group), "NCCL EP")
  if error is not None:
    if options.transport == "nccl_ep":
      raise error
    log.info("NCCL EP not used: %s", error.found)
    return
  log.info("NCCL EP group: %s, receive capacity %d rows per rank", group, group.capacity)
  nccl_ep.bootstrap(group, mesh, EXPERT_AXIS)


def ep_group(options: MoeTeOptions, config, axis_sizes: dict[str, int]) -> nccl_ep.Bootstrap:
  """What the NCCL EP group must hold: the largest batch that any call of the model gets, split over the mesh."""
  batch = config.micro_batch_size_to_train_on
  if config.eval_interval > 0:
    batch = max(batch, config.micro_batch_size_to_eval_on)
  split = 1
  for axis in ("data", "fsdp", "fsdp_transpose", "expert", "context", "context_usp_ulysses", "tensor_sequence"):
    split *= axis_sizes.get(axis, 1)
  return nccl_ep.Bootstrap(
    num_experts=config.num_experts,
    experts_per_token=config.num_experts_per_tok,
    ranks=axis_sizes.get("expert", 1),
    max_tokens_per_rank=-(-batch * config.max_target_length // split),
    width=config.moe_expert_input_dim if config.moe_expert_input_dim > 0 else config.emb_dim,
    capacity_factor=options.capacity_factor,
  )


def check_ep_group(config, group: nccl_ep.Bootstrap) -> None:
  """Refuses a model or a shape that NCCL EP cannot serve, whatever the machine.

  Raises:
    RefusedError: with the change that makes it possible.
  """
  if jnp.dtype(config.dtype) != jnp.bfloat16:
    raise RefusedError(found=f"dtype={config.dtype} with NCCL EP", needed="dtype=bfloat16", fix="set moe_te.transport=xla")
  if config.use_random_routing or config.decoder_block.value == "deepseek4":
    raise RefusedError(
      found="a router that may name an expert twice, with NCCL EP",
      needed="a top-k selection in every layer",
      fix="set moe_te.transport=xla",
    )
  if config.mlp_bias:
    raise RefusedError(
      found="expert biases with NCCL EP, whose padding rows are not shown to stay out of their gradients",
      needed="experts without biases",
      fix="set moe_te.transport=xla",
    )
  group.check()


def _check_nccl_ep(config, group):
  check_ep_group(config, group)
  te_api.installed().require("nccl_ep")
  nccl_ep.check_local_devices()
  te_runtime.prepare_nccl_ep()
