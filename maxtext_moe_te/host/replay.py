"""`moe_te.on_overflow=exact`: a step that needs more rows than a finite capacity holds runs again, in parts that hold whatever the routing.

Two programs. The first has the finite capacity; a step of it that overflows leaves the state as it was and marks itself in a flag on the
device, and a step that is given that flag does nothing either. The host reads a step's flag after it has issued the next one, so that no
step waits for it. Where one is set, the second program runs that batch, and the first the batch after it: the same batches in the same
order. Whoever looks at the state in between (a checkpoint, evaluation, the end) has the last step settled first.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import spmd
from jax.sharding import NamedSharding, PartitionSpec
from maxtext.utils import maxtext_utils

from maxtext_moe_te.errors import CapacityError
from maxtext_moe_te.host import overflow, receive, rules_from_config
from maxtext_moe_te.settings.config import MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
REPLAYED = "moe_te/replayed"
MOST_IN_A_ROW = 8  # replays, after which steps run through the second program at once: a router that collapsed overflows in each
DIRECT_STEPS = 64  # before the first program is tried again
_programs: "weakref.WeakSet[_Programs]" = weakref.WeakSet()


def replaying(options: MoeTeOptions):
  """The factory of the seam on `train_utils.jit_train_step`: a train step of two programs."""

  def replace(original):
    @functools.wraps(original)
    def jit_train_step(config, *args, **kwargs):
      given = inspect.signature(original).bind(config, *args, **kwargs).arguments
      mesh = jax.tree.leaves(given["data_sharding"])[0].mesh
      now = receive.settled(options, config, dict(mesh.shape))
      if not rules_from_config.is_moe(config) or not now.capacity_factor:
        return original(config, *args, **kwargs)
      names = ("train_step", "data_sharding", "state_mesh_shardings", "model", "config", "params_shardings")
      step, inside, outside, static, donated = maxtext_utils.get_functional_train_with_signature(*(given[name] for name in names))
      made = _Programs(step, inside, outside, static, donated, NamedSharding(mesh, PartitionSpec()), now)
      _programs.add(made)
      return made

    return jit_train_step

  return replace


@dataclasses.dataclass
class _Pending:
  """A step whose flag was not read yet.

  Attributes:
    state: what it returned, the state before it if the flag is set.
    batch, metrics: its own.
    flag: bool scalar on the devices.
  """

  state: Any
  batch: Any
  metrics: dict
  flag: jax.Array


class _Programs:
  """A train step, (state, batch) -> (state, metrics), that runs again where it overflowed."""

  def __init__(self, step: Callable, inside, outside, static, donated, replicated: NamedSharding, options: MoeTeOptions):
    def attempt(state, batch, stuck):
      old = jax.tree.leaves(state)  # before the step, which updates a state of NNX in place
      new, metrics = step(state, batch)  # as it was, if the step overflowed
      kept = overflow.selected(stuck, old, new, metrics)
      return kept, metrics, (metrics["scalar"].get(overflow.OVERFLOW, jnp.int32(0)) > 0) | stuck

    def again(state, batch):
      with overflow.holding_all():
        return step(state, batch)

    # Named as MaxText's own, by which its profiles and dumps are found.
    attempt.__name__ = again.__name__ = "train_step"
    self._first = jax.jit(
      attempt, in_shardings=(*inside, replicated), out_shardings=(*outside, replicated), static_argnums=static, donate_argnums=donated
    )
    self._second = jax.jit(again, in_shardings=inside, out_shardings=outside, static_argnums=static, donate_argnums=donated)
    self._replicated = replicated
    self._options = options
    self._pending: _Pending | None = None
    self._running = False  # a step was given the state that the one before returned
    self._in_a_row = self._direct = self.replayed = 0

  def __getattr__(self, name):
    return getattr(self._first, name)

  def lower(self, state, batch):
    """Both programs, to be compiled together: never at the first overflow."""
    flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=self._replicated)
    return _Lowered(self._first.lower(state, batch, flag), self._second.lower(state, batch))

  def __call__(self, state, batch):
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):  # traced for its text, as dump_jaxpr does
      return self._first(state, batch, jnp.bool_(False))[:2]
    self._mesh, self._rules = jax.sharding.get_mesh(), spmd.get_logical_axis_rules()
    before = self._expected(state)
    if self._direct:
      self.settle()
      self._direct -= 1
      state, metrics = self._second(state, batch)
      metrics["scalar"][REPLAYED] = 1
      metrics["scalar"].pop(overflow.NEEDED, None)  # of parts
      return state, metrics
    self._running |= before is not None
    now = _Pending(*self._attempt(state, batch, before.flag if before else self._not_stuck))
    if before and bool(before.flag):  # reads a step that has ended, or ends while this one is in the queue
      self._pending = dataclasses.replace(before, state=now.state)
      settled = self._replay(self._pending)
      now = _Pending(*self._attempt(settled, batch, self._not_stuck))
    elif before:
      self._in_a_row = 0
    self._pending = now
    return now.state, now.metrics

  def settle(self) -> None:
    """Reads the last step's flag and, where it is set, runs the step again; the state that it returned then holds the result."""
    last, self._pending = self._pending, None
    self._running |= last is not None
    if last is None or not bool(last.flag):
      return
    # As the steps are called: outside, JAX would trace and compile the program anew.
    with contextlib.nullcontext() if self._mesh.empty else jax.set_mesh(self._mesh), spmd.logical_axis_rules(self._rules):
      settled = self._replay(last)
    for key in list(last.state):
      last.state[key] = settled[key]

  def _attempt(self, state, batch, stuck):
    state, metrics, flag = self._first(state, batch, stuck)
    metrics["scalar"].setdefault(REPLAYED, 0)
    return state, batch, metrics, flag

  def _replay(self, step: _Pending):
    """The state after a step that overflowed. Its metrics are replaced where they are: MaxText writes them one step later."""
    scalars = step.metrics["scalar"]
    self._say(scalars)
    state, metrics = self._second(step.state, step.batch)
    of_attempt = {name: scalars[name] for name in (overflow.DEMAND, overflow.CAPACITY, overflow.NEEDED) if name in scalars}
    scalars.update(metrics["scalar"])
    step.metrics.update({name: value for name, value in metrics.items() if value is not metrics["scalar"]})
    scalars |= {REPLAYED: 1, **of_attempt}
    self.replayed += 1
    self._in_a_row += 1
    if self._in_a_row >= MOST_IN_A_ROW:
      self._in_a_row, self._direct = 0, DIRECT_STEPS
      log.warning("%d steps in a row overflowed: the next %d run in parts at once", MOST_IN_A_ROW, DIRECT_STEPS)
    return state

  def _say(self, scalars):
    if self.replayed & (self.replayed + 1):  # the first, the third, the seventh …: a line each time would be many
      return
    held, most = float(scalars[overflow.CAPACITY]), float(scalars[overflow.DEMAND])
    log.warning(
      "a rank was sent %.0f rows in a step and holds %.0f (moe_te.capacity_factor=%g): the step runs again in parts; %d so far",
      most, held, self._options.capacity_factor, self.replayed + 1,
    )  # fmt: skip

  def _expected(self, state) -> _Pending | None:
    """The step before, if it returned the state that this one is given."""
    before = self._pending
    if before is None or before.state is state:
      return before
    # Before the run, steps with states of their own are warm-ups, whose results nobody takes. In it, that would lose an update.
    if self._running and bool(before.flag):
      raise CapacityError(
        found="a step overflowed, and the next one was given another state than the one it returned",
        needed="MaxText's own train loop, which hands the state from step to step",
        fix="set moe_te.on_overflow=stop or moe_te.capacity_factor=0",
      )
    self._pending = None
    return None

  @functools.cached_property
  def _not_stuck(self):
    return jax.jit(lambda: jnp.zeros((), jnp.bool_), out_shardings=self._replicated)()


class _Lowered:
  """Two lowered programs that are compiled together; all else is the first one's."""

  def __init__(self, first, second):
    self.programs = first, second

  def __getattr__(self, name):
    return getattr(self.programs[0], name)

  def compile(self, *args, **kwargs):
    """The first, compiled; JAX's cache has the second too."""
    return [program.compile(*args, **kwargs) for program in reversed(self.programs)][-1]


def settle() -> None:
  """Has every step of this process settled: before anybody looks at the state or the metrics of the last one."""
  for programs in list(_programs):
    programs.settle()


def settling(original):
  """A function before whose call the last step is settled."""

  @functools.wraps(original)
  def settled(*args, **kwargs):
    if sys.exc_info()[0] is None:  # not on the way out of a failed run
      settle()
    return original(*args, **kwargs)

  return settled


def settling_last(original):
  """`maybe_save_checkpoint`, which asks the state for its step where it is given none: at the end of a run."""

  @functools.wraps(original)
  def maybe_save_checkpoint(checkpoint_manager, state, config, data_iterator, step=None):
    if step is None:
      settle()
    return original(checkpoint_manager, state, config, data_iterator, step)

  return maybe_save_checkpoint


def settling_where_written_at_once(original):
  """`MetricLogger.buffer_and_write_metrics`, which writes a step's metrics one step later, and with enable_mllog at once."""

  @functools.wraps(original)
  def buffer_and_write_metrics(self, metrics, step, step_time_delta=None, is_training=True):
    if is_training and getattr(self.config, "enable_mllog", False):
      settle()
    return original(self, metrics, step, step_time_delta, is_training)

  return buffer_and_write_metrics


def evaluating(original):
  """`jit_eval_step`: evaluation in parts that hold whatever the routing, of a settled state."""

  @functools.wraps(original)
  def jit_eval_step(config, model, state_mesh_shardings, data_sharding, eval_step):
    @functools.wraps(eval_step)
    def step(*args, **kwargs):
      with overflow.holding_all():
        return eval_step(*args, **kwargs)

    compiled = original(config, model, state_mesh_shardings, data_sharding, step)
    return compiled if compiled is None else _Evaluation(compiled)

  return jit_eval_step


class _Evaluation:
  """A compiled evaluation step, of a settled state; all else is the step's own."""

  def __init__(self, step):
    self._step = step

  def __getattr__(self, name):
    return getattr(self._step, name)

  def __call__(self, state, *args, **kwargs):
    settle()
    return self._step(state, *args, **kwargs)
