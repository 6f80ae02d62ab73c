"""Router biases that MaxText leaves behind when it makes a model from a checkpoint.

A DeepSeek model's router bias is no parameter. Pre-training saves it beside the parameters, `from_pretrained` looks for it among them, does
not find it, and hands over a model whose bias was freed to make room.
"""

import functools
import logging

import jax
import orbax.checkpoint as ocp
from flax import nnx

from maxtext_moe_te.errors import RefusedError

log = logging.getLogger("maxtext_moe_te")
BESIDE = ("nnx_aux", "model")  # where MaxText saves what is no parameter


def completing(original):
  """`from_pretrained`, whose model has every value that the checkpoint has for it."""

  @functools.wraps(original)
  def from_pretrained(config, mesh=None, *args, **kwargs):
    made = original(config, mesh, *args, **kwargs)
    if config.load_parameters_path:
      complete(made[0] if isinstance(made, tuple) else made, str(config.load_parameters_path))
    return made

  return from_pretrained


def complete(model: nnx.Module, path: str) -> None:
  """Restores, in place, the variables that were freed and not restored.

  Args:
    model: made by `from_pretrained`.
    path: of the checkpoint's items.

  Raises:
    RefusedError: the checkpoint has no value for one of them, or one of another shape.
  """
  lost = {place: variable for place, variable in nnx.to_flat_state(nnx.state(model)) if _freed(variable)}
  if not lost:
    return
  checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  tree = checkpointer.metadata(path).item_metadata.tree
  stored = nnx.traversals.flatten_mapping(functools.reduce(lambda node, name: node.get(name, {}), BESIDE, tree))
  wanted, places = {}, {}
  for place, variable in lost.items():
    array = variable.get_value()
    name = "/".join(map(str, place))
    # A model in an adapter has one more name in front.
    beside = next((key for key in stored if place[-len(key) :] == key), None)
    if beside is None or tuple(stored[beside].shape) != array.shape:
      has = "no value" if beside is None else f"one of shape {tuple(stored[beside].shape)}"
      raise RefusedError(
        found=f"the checkpoint {path} has {has} for {name} {array.shape}",
        needed="a checkpoint of this model, its router biases included",
        fix="load one that has them, or set routed_bias=false if it was trained without",
      )
    wanted[BESIDE + beside] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
    places[BESIDE + beside] = place
  item = nnx.traversals.unflatten_mapping(wanted)
  restored = checkpointer.restore(path, item=item, transforms={}, restore_args=ocp.checkpoint_utils.construct_restore_args(item))
  values = nnx.traversals.flatten_mapping(restored)
  nnx.update(model, nnx.from_flat_state({places[key]: lost[places[key]].replace(values[key]) for key in wanted}))
  log.info("%d router biases restored from beside the parameters of %s", len(lost), path)


def _freed(variable):
  array = variable.get_value() if isinstance(variable, nnx.Variable) else variable
  return isinstance(array, jax.Array) and array.is_deleted()
