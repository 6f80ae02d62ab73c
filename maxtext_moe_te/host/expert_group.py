"""The NCCL EP group of a process: what it must hold, when it can serve, and when in a run of MaxText it is made."""

import functools
import logging

import jax
import jax.numpy as jnp

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.host import agreement, engine, receive, rules_from_config
from maxtext_moe_te.moe import te_api, te_runtime
from maxtext_moe_te.moe.capacity import tokens_per_rank
from maxtext_moe_te.moe.transport import nccl_ep
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
EXPERT_AXIS = "expert"


def bootstrapping(options: MoeTeOptions):
  """The factory of the seam on `max_utils.maybe_bootstrap_te_moe`, which MaxText calls once before it traces the model."""

  def replace(original):
    @functools.wraps(original)
    def maybe_bootstrap_te_moe(config, mesh, shaped_batch):
      if not rules_from_config.is_replaced(config):
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


def bootstrapping_models(options: MoeTeOptions):
  """The same on `model_creation_utils.from_pretrained`: how everything else than pre-training gets its models."""

  from maxtext.utils import maxtext_utils  # imports the models; who only asks about a group needs none

  def replace(original):
    @functools.wraps(original)
    def from_pretrained(config, mesh=None, devices=None, model_mode="train", *args, **kwargs):
      of = mesh if mesh is not None else maxtext_utils.get_mesh_from_config(config, devices)
      bootstrap(options, config, of, largest_call(config, model_mode), decodes=model_mode != "train")
      return original(config, mesh, devices, model_mode, *args, **kwargs)

    return from_pretrained

  return replace


def bootstrap(options: MoeTeOptions, config, mesh, call: tuple[int, int] | None = None, *, decodes: bool = False) -> None:
  """Decides what of Transformer Engine the run uses, and makes the NCCL EP group if it will use one: all processes, or none.

  Args:
    options: the plugin's.
    config: MaxText's configuration.
    mesh: the run's mesh.
    call: see `ep_group`.
    decodes: whether the model is for decoding.

  Raises:
    MoeTeError: a part was asked for by name, and a process cannot use it; in every process the same.
  """
  ranks = mesh.shape.get(EXPERT_AXIS, 1)
  explicit = options.transport == "nccl_ep"
  on_cpu = _platform(mesh) == "cpu"
  replaced = rules_from_config.is_replaced(config)
  options = receive.settled(options, config, dict(mesh.shape), finite=call is None, call=call)
  if replaced and not on_cpu:
    engine.decide(options, mesh.devices.flat[0])
  if options.transport not in ("auto", "nccl_ep") or ranks == 1 or not replaced:
    return
  if explicit and (on_cpu or decodes):
    raise RefusedError(
      found=f"moe_te.transport=nccl_ep {'on CPUs' if on_cpu else 'for decoding, whose prefill has a batch of 1 that no axis splits'}",
      needed="a trainer, on NVIDIA GPUs",
      fix="set moe_te.transport=auto",
    )
  if on_cpu:
    return
  group = ep_group(options, config, dict(mesh.shape), call)
  # A process that took XLA's collectives alone would leave the others waiting for it in the bootstrap.
  error = agreement.together(lambda: _check_nccl_ep(options, config, group, mesh), "NCCL EP")
  if error is not None:
    if explicit:
      raise error
    log.info("NCCL EP not used: %s", error.found)
    return
  log.info("NCCL EP group: %s, receive capacity %d rows per rank", group, group.capacity)
  nccl_ep.bootstrap(group, mesh, EXPERT_AXIS)


def _platform(mesh) -> str:
  return mesh.devices.flat[0].platform


def ep_group(options: MoeTeOptions, config, axis_sizes: dict[str, int], call: tuple[int, int] | None = None) -> nccl_ep.Bootstrap:
  """What the NCCL EP group must hold: the largest batch that any call of the model gets, split over the mesh.

  Args:
    options: the plugin's, settled.
    config: MaxText's configuration.
    axis_sizes: of the mesh.
    call: sequences and their length in that batch; None for those of pre-training, whose step splits what it is given.
  """
  if call is None:
    batch = config.micro_batch_size_to_train_on
    if config.eval_interval > 0:
      batch = max(batch, config.micro_batch_size_to_eval_on)
    call = batch, config.max_target_length
  return nccl_ep.Bootstrap(
    num_experts=config.num_experts,
    experts_per_token=config.num_experts_per_tok,
    ranks=axis_sizes.get(EXPERT_AXIS, 1),
    max_tokens_per_rank=-(-tokens_per_rank(*call, axis_sizes) // options.chunks),
    width=config.moe_expert_input_dim if config.moe_expert_input_dim > 0 else config.emb_dim,
    capacity_factor=options.capacity_factor,
  )


def largest_call(config, model_mode: str) -> tuple[int, int]:
  """Sequences and their length in the largest call of a model that is not for pre-training.

  Args:
    config: MaxText's configuration, of any trainer.
    model_mode: "train"; otherwise the model decodes, one token of each sequence at a time.
  """
  if model_mode != "train":
    return config.micro_batch_size_to_train_on, 1
  if hasattr(config, "rl"):  # prompts; each is answered several times, and the answers are scored together
    return config.micro_batch_size_to_train_on * config.rl.num_generations, config.max_target_length
  # Tunix calls the model with batches as the pipeline makes them.
  sequences = config.global_batch_size_to_load
  if config.use_tunix_gradient_accumulation:
    sequences //= config.gradient_accumulation_steps
  if config.eval_interval > 0:
    sequences = max(sequences, config.global_batch_size_to_load_eval)
  return sequences * (2 if config.use_dpo else 1), config.max_target_length  # the chosen and the rejected answer together


def check_ep_group(options: MoeTeOptions, config, group: nccl_ep.Bootstrap) -> None:
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
  if options.padding == "skip":
    raise RefusedError(
      found="moe_te.padding=skip with NCCL EP, which is not shown to serve tokens that select no expert",
      needed="XLA's collectives, or padding that is routed",
      fix="set moe_te.transport=xla",
    )
  if config.mlp_bias:
    raise RefusedError(
      found="expert biases with NCCL EP, whose padding rows are not shown to stay out of their gradients",
      needed="experts without biases",
      fix="set moe_te.transport=xla",
    )
  group.check()


def _check_nccl_ep(options, config, group, mesh):
  check_ep_group(options, config, group)
  if set(mesh.devices.flat) < set(jax.devices()):
    raise RefusedError(
      found=f"NCCL EP on {mesh.devices.size} of {jax.device_count()} devices",
      needed="a mesh of all devices of the run",
      fix="set moe_te.transport=xla",
    )
  nccl_ep.check_none_but(group)
  te_api.installed().require("nccl_ep")
  nccl_ep.check_local_devices()
  te_runtime.prepare_nccl_ep()
