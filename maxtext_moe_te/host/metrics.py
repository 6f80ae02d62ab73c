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

from maxtext_moe_te.host import overflow, receive
from maxtext_moe_te.moe import block
from maxtext_moe_te.settings.config import MoeTeOptions

PREFIX = "moe_te"
LOAD_PER_EXPERT_LIMIT = 64  # more experts than this are not written one by one


LOAD = f"{PREFIX}_load"  # beside the scalars of a step's metrics: rows of each layer and expert
MEASURED = ("rows", "received", "overflowed", "demand", "receive_capacity")
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)

_collected = contextvars.ContextVar("a step that collects what layers sow is being traced", default=False)


def sow(module: nnx.Module, output) -> None:
  """Leaves the layer's numbers on `module`, if the step that is being traced collects them.

  All of them add up over microbatches, because MaxText sums intermediates; what is the largest is read from a histogram for that.
  """
  if not _collected.get():
    return
  for name in MEASURED:
    module.sow(nnx.Intermediate, f"{PREFIX}_{name}", getattr(output, name))


def _of_layers(intermediates, name: str, ndim: int) -> jax.Array | None:
  """[layers, …] of what the layers left under a name, where each left `ndim` dims; None if there is nothing."""
  name = f"{PREFIX}_{name}"
  leaves = jax.tree_util.tree_leaves_with_path(intermediates)
  found = [leaf for path, leaf in leaves if [key.key for key in path if hasattr(key, "key")][-1:] == [name]]
  if not found:
    return None
  return jnp.concatenate([leaf.reshape(-1, *leaf.shape[leaf.ndim - ndim :]) for leaf in found])  # stacked layers lead


def record(metrics: dict, intermediates, config) -> None:
  """Adds this step's MoE scalars, and `LOAD`.

  Args:
    metrics: of the step, changed in place.
    intermediates: what the model left, possibly stacked over layers and summed over microbatches.
    config: the MaxText configuration.
  """
  rows = _of_layers(intermediates, "rows", 2)
  if rows is None:
    return
  scalars, microbatches = metrics["scalar"], config.gradient_accumulation_steps
  # One sum over devices for all layers: in the layers, three would wait for every device beside the dispatch and the combine of each.
  rows = rows.sum(1).astype(jnp.float32) / microbatches
  demand = _of_layers(intermediates, "demand", 2).sum((0, 1))
  capacity = _of_layers(intermediates, "receive_capacity", 0).max() / microbatches
  mean = rows.mean(-1)
  for layer in range(rows.shape[0]):
    scalars[f"{PREFIX}/rows_per_expert_max/layer_{layer:03d}"] = rows[layer].max()
    scalars[f"{PREFIX}/rows_per_expert_mean/layer_{layer:03d}"] = mean[layer]
  load = rows / jnp.maximum(mean, 1)[:, None]  # over that of balanced routing
  scalars[f"{PREFIX}/load_max_over_mean"] = load.max()
  for quantile in QUANTILES:
    scalars[f"{PREFIX}/load_p{100 * quantile:02.0f}"] = jnp.quantile(load, quantile)
  scalars[f"{PREFIX}/experts_unused"] = (rows == 0).sum()
  received = _of_layers(intermediates, "received", 1).max() / microbatches  # of several microbatches, a mean
  scalars[f"{PREFIX}/receive_rows_max"] = received
  scalars[f"{PREFIX}/receive_capacity"] = capacity
  scalars[overflow.NEEDED] = block.largest_demand(demand)
  scalars[f"{PREFIX}/overflow"] = _of_layers(intermediates, "overflowed", 1).sum()
  if config.num_experts <= LOAD_PER_EXPERT_LIMIT:
    share = rows.sum(0) / jnp.maximum(rows.sum(), 1)
    for expert in range(config.num_experts):
      scalars[f"{PREFIX}/load/expert_{expert:03d}"] = share[expert]
  # MaxText prints these two in its own progress line when they are there.
  scalars["learning/moe_max_load_ratio"] = load.max()
  scalars["learning/moe_max_load_ratio_mean"] = load.max(-1).mean()
  metrics[LOAD] = load


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
    record(output_metrics, intermediate_outputs, config)

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
