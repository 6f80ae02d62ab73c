"""One train step of MaxText under the plugin, built without being run: what it names, what it compiles to, and runs of it.

MaxText's own `train_compile` cannot serve: for GPUs it needs a GPU, it enters no Transformer Engine context, and it compiles
outside the mesh that Transformer Engine's partitioners look up.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from maxtext.common import train_state_nnx
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import max_utils, maxtext_utils, model_creation_utils, sharding, train_utils

from maxtext_moe_te.host import expert_group, features, overflow, seams
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay


@dataclasses.dataclass(frozen=True)
class Step:
  """A train step and the shapes it takes.

  Args:
    config: MaxText's configuration.
    mesh: the devices it is for.
    state, batch: what it takes, as shapes.
    initialize: makes a first state, from MaxText's own initializers and seed.
  """

  config: Any
  mesh: Mesh
  state: Any
  batch: Any
  initialize: Callable[[], Any]
  _active: Callable[[], contextlib.AbstractContextManager]
  _jitted: Any
  _loss: Callable

  @contextlib.contextmanager
  def context(self):
    """In which MaxText traces, compiles and calls a step."""
    with _context(self.config, self.mesh):
      yield

  @functools.cached_property
  def lowered(self):
    """The step, lowered for its devices."""
    with self._active(), self.context():
      return self._jitted.lower(self.state, self.batch)

  def compile(self, options: dict, again: bool = False):
    """Compiles the step. Transformer Engine's partitioners look the mesh up while XLA compiles.

    Args:
      options: XLA's options for this program.
      again: of a step of two programs, the one that runs a step again that overflowed.
    """
    lowered = getattr(self.lowered, "programs", (self.lowered,))[again]
    with self.context():
      return lowered.compile(compiler_options=options)

  def __call__(self, state, batch):
    """Runs the step: (state, metrics). The state that it was given is gone."""
    with self._active(), self.context():
      return self._jitted(state, batch)

  @property
  def has_second(self) -> bool:
    """Whether the step is two programs, see `moe_te.on_overflow`."""
    return hasattr(self.lowered, "programs")

  @functools.cached_property
  def _named(self):
    with self._active(), self.context():
      jaxpr = jax.make_jaxpr(self._loss)(self.state, self.batch).jaxpr
    return list(_named_tensors(jaxpr, 1, self.mesh.devices.size))

  @property
  def named_bytes(self) -> dict[str, int]:
    """Bytes of each named tensor of the forward pass, per device and over all layers."""
    totals = {}
    for names, size in self._named:
      totals[names[-1]] = totals.get(names[-1], 0) + size
    return totals

  def bytes_of(self, names) -> int:
    """Bytes of the tensors that have any of `names`, each counted once: the MoE layer's first product has two."""
    return sum(size for own, size in self._named if own[-1] in names and not set(own[:-1]) & set(names))

  def random_batch(self, seed: int):
    """A batch of uniformly random tokens without padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, self.config.vocab_size, self.batch["inputs"].shape)
    filled = {}
    for name, shape in self.batch.items():
      values = np.ones(shape.shape)
      if name in ("inputs", "targets"):
        values = tokens if name == "inputs" else np.roll(tokens, -1, axis=1)
      elif name.endswith("_position"):
        values = np.broadcast_to(np.arange(shape.shape[1]), shape.shape)
      filled[name] = jax.device_put(values.astype(shape.dtype), shape.sharding)
    return filled


@contextlib.contextmanager
def _context(config, mesh):
  with (
    seams.honest_context(max_utils.transformer_engine_context)() if config.hardware.startswith("gpu") else contextlib.nullcontext(),
    jax.set_mesh(mesh),
    logical_axis_rules(config.logical_axis_rules),
  ):
    yield


def build(
  words: list[str],
  *,
  overlay: Overlay | None = None,
  options: MoeTeOptions,
  devices=None,
  domains: int = 1,
  keep_gradients: bool = False,
) -> Step:
  """The step that a training run with these words would take.

  Args:
    words: MaxText's arguments, the run's YAML first.
    overlay: an overlay, or None.
    options: the plugin's options.
    devices: described devices; None for those of this machine.
    domains: into how many NVLink domains `devices` fall, for meshes with dcn_ axes.
    keep_gradients: the optimizer's state then holds the gradients of the step, see `gradients`.

  Raises:
    MoeTeError: what refuses the run.
  """
  if devices is not None:
    words = [
      *words, "compile_topology=described", "internal_compile=true", f"internal_compile_num_devices={len(devices)}",
      f"compile_topology_num_slices={domains}",
    ]  # fmt: skip
  active = functools.partial(seams.activate, overlay=overlay, options=options)
  with active():
    config = pyconfig.initialize(["maxtext-moe-te", *words])
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's trainers do
    per_domain = len(devices) // domains if devices is not None else 0
    with _domains_by_id(per_domain), max_utils.maybe_get_transformer_engine_context(config):
      axis_types = (AxisType.Auto,) * len(config.mesh_axes)
      mesh = Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes, axis_types=axis_types)
      if options.enabled:
        expert_group.bootstrap(options, config, mesh)
      make, state, shardings = _state(config, mesh, keep_gradients)
    graph = nnx.split(nnx.eval_shape(make))[0]
    data_sharding = sharding.get_input_data_sharding(config, mesh)
    batch = maxtext_utils.get_shaped_batch(config, batch_sharding=data_sharding)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    shardings = sharding.build_zero1_input_state_mesh_shardings(config, shardings, of_params)
    jitted = train_utils.jit_train_step(config, graph, state, shardings, data_sharding, train.train_step, of_params)

    def loss(state, batch):
      with overflow.watched():  # traced for the names of its tensors, never run
        return train.loss_fn(nnx.merge(graph, state).model, config, dict(batch), None, None)[0]

  def initialize():
    with active(), _context(config, mesh):
      return jax.jit(lambda: nnx.state(make()), out_shardings=shardings)()

  return Step(config, mesh, state, batch, initialize, active, jitted, loss)


def _state(config, mesh, keep_gradients):
  """(function that makes the train state, its shapes, its shardings), as MaxText's trainers have them."""
  make_model, model = model_creation_utils.create_nnx_abstract_model(config, mesh)
  of_mesh = {"mesh": mesh} if features.of_host().optimizer_takes_mesh else {}
  optimizer = optimizers.get_optimizer(config, maxtext_utils.create_learning_rate_schedule(config), model, **of_mesh)
  if keep_gradients:
    optimizer = keeping_gradients(optimizer)

  def make():
    model = make_model()
    return train_state_nnx.TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))

  state, _, shardings = maxtext_utils.get_abstract_state(config, mesh, make, True)
  return make, state, shardings


def keeping_gradients(optimizer):
  """The optimizer, its state holding the gradients it was given last, see `gradients`."""
  return optax.chain(optax.GradientTransformation(lambda params: _Gradients(params), _keep), optimizer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Gradients:
  """An optimizer state that is the last gradients."""

  kept_gradients: Any


def _keep(gradients, state, params=None):
  del state, params
  return gradients, _Gradients(gradients)


def gradients(state) -> dict[str, np.ndarray]:
  """The gradients in the state after a step that kept them, on the host."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if "kept_gradients" in jax.tree_util.keystr(path)}


def _named_tensors(jaxpr, trips, devices):
  """Yields what `checkpoint_name` names: (its names so far, the new one last; bytes per device).

  Inside a shard_map shapes are a device's own; elsewhere activations are taken to be split over all devices, as MaxText's rules
  mean them to be.
  """
  names_of = {}
  for equation in jaxpr.eqns:
    if equation.primitive.name == "name":
      (tensor,), (named,) = equation.invars, equation.outvars
      names_of[named] = (*names_of.get(tensor, ()), equation.params["name"])
      yield names_of[named], trips * math.prod(named.aval.shape) * named.aval.dtype.itemsize // devices
    inner_trips = trips * equation.params["length"] if equation.primitive.name == "scan" else trips
    inner_devices = 1 if equation.primitive.name == "shard_map" else devices
    for value in equation.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from _named_tensors(inner, inner_trips, inner_devices)


@contextlib.contextmanager
def _domains_by_id(per_domain: int):
  """Described devices all report slice 0: while a mesh is made of them, their NVLink domain is taken from their id."""
  if not per_domain:
    yield
    return
  original = mesh_utils.create_hybrid_device_mesh

  def by_id(inner, outer, devices, **kwargs):
    del kwargs
    groups = [[d for d in devices if d.id // per_domain == i] for i in range(len(devices) // per_domain)]
    meshes = [mesh_utils.create_device_mesh(inner, group) for group in groups]
    places = np.vectorize(lambda i: meshes[i], otypes=[object])(np.arange(len(meshes)).reshape(outer))
    return np.block(places.tolist())

  mesh_utils.create_hybrid_device_mesh = by_id
  try:
    yield
  finally:
    mesh_utils.create_hybrid_device_mesh = original
