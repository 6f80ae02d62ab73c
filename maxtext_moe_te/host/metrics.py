"""MoE metrics from every decoder block: sown by the layer, summed up per step, written by MaxText's own metric logger.

MaxText reports router load for one model family only. The layer leaves its numbers as intermediates; `train_step` hands all
intermediates to `record_activation_metrics`, which is where they become scalars. Trainers without that step (Tunix's) would keep
them in the model, so nothing is sown for them.
"""

import contextvars
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import maxtext_utils

from maxtext_moe_te.host import overflow, receive
from maxtext_moe_te.settings.config import MoeTeOptions

PREFIX = "moe_te"
LOAD_PER_EXPERT_LIMIT = 64  # more experts than this are not written one by one


_collected = contextvars.ContextVar("a step that collects what layers sow is being traced", default=False)


def sow(module: nnx.Module, output) -> None:
  """Leaves the layer's numbers on `module`, if the step that is being traced collects them.

  All of them add up over microbatches, because MaxText sums intermediates.
  """
  if not _collected.get():
    return
  for name in ("rows_per_expert", "receive_rows_max", "receive_capacity", "overflow"):
    module.sow(nnx.Intermediate, f"{PREFIX}_{name}", getattr(output, name))


def record(scalars: dict, intermediates, config) -> None:
  """Adds this step's MoE scalars.

  Args:
    scalars: the step's scalar metrics, changed in place.
    intermediates: what the model left, possibly stacked over layers and summed over microbatches.
    config: the MaxText configuration.
  """
  collected = maxtext_utils.collect_intermediates_by_suffix(intermediates, f"{PREFIX}_rows_per_expert")
  if not collected:
    return
  microbatches = config.gradient_accumulation_steps

  def values(name):
    return jnp.concatenate(maxtext_utils.collect_intermediates_by_suffix(intermediates, f"{PREFIX}_{name}"))

  # Stacked layers are the leading dim of the flattened leaf, so that each E consecutive values are one layer.
  rows = jnp.concatenate(collected).reshape(-1, config.num_experts).astype(jnp.float32) / microbatches
  mean = rows.mean(-1)
  for layer in range(rows.shape[0]):
    scalars[f"{PREFIX}/rows_per_expert_max/layer_{layer:03d}"] = rows[layer].max()
    scalars[f"{PREFIX}/rows_per_expert_mean/layer_{layer:03d}"] = mean[layer]
  ratio = rows.max(-1) / jnp.maximum(mean, 1)
  scalars[f"{PREFIX}/load_max_over_mean"] = ratio.max()
  scalars[f"{PREFIX}/receive_rows_max"] = values("receive_rows_max").max() / microbatches
  scalars[f"{PREFIX}/receive_capacity"] = values("receive_capacity").max() / microbatches
  scalars[f"{PREFIX}/overflow"] = values("overflow").sum()
  if config.num_experts <= LOAD_PER_EXPERT_LIMIT:
    share = rows.sum(0) / jnp.maximum(rows.sum(), 1)
    for expert in range(config.num_experts):
      scalars[f"{PREFIX}/load/expert_{expert:03d}"] = share[expert]
  # MaxText prints these two in its own progress line when they are there.
  scalars["learning/moe_max_load_ratio"] = ratio.max()
  scalars["learning/moe_max_load_ratio_mean"] = ratio.mean()


def collecting(train_step):
  """`train_step`, which hands its intermediates to `record_activation_metrics`; while it is traced the layers sow."""

  @functools.wraps(train_step)
  def step(*args, **kwargs):
    token = _collected.set(True)
    try:
      return train_step(*args, **kwargs)
    finally:
      _collected.reset(token)

  return step


def recording(original):
  """`metric_logger.record_activation_metrics`, with ours added."""

  def record_activation_metrics(output_metrics, intermediate_outputs, config):
    original(output_metrics, intermediate_outputs, config)  # adds nothing if the model recorded nothing
    record(output_metrics["scalar"], intermediate_outputs, config)

  return record_activation_metrics


def always_recording(options: MoeTeOptions):
  """The factory of the seam on `maxtext_utils.get_functional_train_with_signature`: the train step hands over its intermediates.

  `train_step` does so only under record_internal_nn_metrics. It gets a configuration that says so; the model keeps its own, so
  that the decoder blocks record no more than the user asked for.
  """

  def replace(original):
    @functools.wraps(original)
    def get_functional_train_with_signature(train_step, data_sharding, state_mesh_shardings, model, config, params_shardings=None):
      mesh = jax.tree.leaves(data_sharding)[0].mesh
      now = receive.settled(options, config, dict(mesh.shape))
      if not options.metrics and not now.capacity_factor:
        return original(train_step, data_sharding, state_mesh_shardings, model, config, params_shardings)
      train_step = overflow.keeping_state(collecting(train_step), now)
      return original(train_step, data_sharding, state_mesh_shardings, model, _recording(config), params_shardings)

    return get_functional_train_with_signature

  return replace


def _recording(config):
  copy = pyconfig.HyperParameters.__new__(pyconfig.HyperParameters)
  object.__setattr__(copy, "_pydantic_config", config._pydantic_config)
  object.__setattr__(copy, "_flat_config", {**config._flat_config, "record_internal_nn_metrics": True})
  return copy
