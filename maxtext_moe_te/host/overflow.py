"""A step that needs more receive capacity than a finite `capacity_factor` gives: its update is not applied. What then comes is
`moe_te.on_overflow`: it runs again (`replay`), is left out, or ends the run.

With the default, capacity_factor=0, nothing can overflow and nothing here is in the compiled step. A layer that can overflow is
traced only where somebody watches for it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.utils import max_utils

from maxtext_moe_te.errors import CapacityError, RefusedError
from maxtext_moe_te.host import rules_from_config
from maxtext_moe_te.settings.config import AUTO, MoeTeOptions

log = logging.getLogger("maxtext_moe_te")
PARAM_NORM = "learning/param_norm"
OVERFLOW, DEMAND, CAPACITY = "moe_te/overflow", "moe_te/receive_rows_max", "moe_te/receive_capacity"
NEEDED = "moe_te/demand_over_balanced"
HOST_OFFLOAD = ("optimizer_memory_host_offload", "parameter_memory_host_offload")


def check(options: MoeTeOptions, config) -> None:
  """Refuses a finite factor where an overflow would go unseen.

  Raises:
    RefusedError: with the setting that is in the way.
  """
  if options.capacity_factor in (0, AUTO):  # which looks at the same
    return
  exact = options.on_overflow == "exact"
  for wrong, setting, why in (
    (config.enable_diloco, "enable_diloco=true", "whose steps are not checked for overflow"),
    (config.eval_interval > 0 and not exact, f"eval_interval={config.eval_interval}", "whose steps are not checked for overflow"),
    (
      exact and config.compiled_trainstep_file,
      f"compiled_trainstep_file={config.compiled_trainstep_file}",
      "which holds one program of two",
    ),
    *(
      (getattr(config, key, False), f"{key}=true", "whose state is not shown to stay on the host where a step keeps it")
      for key in HOST_OFFLOAD
    ),
  ):
    if wrong:
      raise RefusedError(
        found=f"moe_te.capacity_factor={options.capacity_factor:g} moe_te.on_overflow={options.on_overflow} with {setting}, {why}",
        needed="a capacity that nothing exceeds",
        fix="set moe_te.capacity_factor=0",
      )


# Part of what JAX keeps traced functions by: a layer that was traced for the first program is not taken for the second.
_holding_all = jax.make_user_context(False)


def holding_all():
  """Within, layers are traced with a capacity that holds whatever the routing, in as many parts as that takes."""
  return _holding_all(True)


def holds_all() -> bool:
  """Whether the layer that is being traced must hold whatever the routing."""
  return _holding_all.value


@dataclasses.dataclass
class _Watch:
  """Who sees to overflows. Attributes: needed: whether a layer that can overflow was traced."""

  needed: bool = False


_watch = contextvars.ContextVar("who watches for overflow in what is being traced", default=None)


@contextlib.contextmanager
def watched():
  """Within, layers that can overflow may be traced: whoever enters sees to it that no step that overflowed counts."""
  token = _watch.set(_Watch())
  try:
    yield _watch.get()
  finally:
    _watch.reset(token)


def check_watched(options: MoeTeOptions, ranks: int) -> None:
  """Refuses to trace a layer whose rows would be dropped unseen.

  Args:
    options: with the capacity factor; from `ranks` on it holds whatever the routing.
    ranks: size of the expert axis.

  Raises:
    RefusedError: an overflow would go unseen.
  """
  if not 0 < options.capacity_factor < ranks:
    return
  if _watch.get() is None:
    raise _unseen(options, "where nothing checks a step for overflow")
  _watch.get().needed = True


def _unseen(options, where):
  return RefusedError(
    found=f"moe_te.capacity_factor={options.capacity_factor:g} {where}",
    needed="the train step of MaxText's pre-training (train_sft_native has it too), or a capacity that nothing exceeds",
    fix="set moe_te.capacity_factor=0",
  )


def keeping_state(train_step, options: MoeTeOptions):
  """`train_step` that returns the state it was given if the step overflowed, optimizer and step counter included."""
  if not options.capacity_factor:
    return train_step

  @functools.wraps(train_step)
  def step(model, config, state_mesh_shardings, params_shardings, state, data, *rest):
    old = jax.tree.leaves(state)  # before the step, which updates a state of NNX in place
    with watched() as watch:
      new_state, metrics = train_step(model, config, state_mesh_shardings, params_shardings, state, data, *rest)
    if OVERFLOW not in metrics["scalar"]:
      if watch.needed:
        raise _unseen(options, "with a train step that does not report what its layers record")
      return new_state, metrics  # a dense model
    return selected(metrics["scalar"][OVERFLOW] > 0, old, new_state, metrics), metrics

  return step


def selected(condition: jax.Array, old: list[jax.Array], new_state, metrics: dict):
  """The state with these leaves where a condition holds, else `new_state`. Never a product: what is thrown away may not be finite.

  The norm of the parameters among the metrics becomes the selected ones': XLA would otherwise write the new parameters for it, and read
  them again to select, which costs 7 % of a step of Qwen3 on an H200.
  """
  kept = [jnp.where(condition, before, after) for before, after in zip(old, jax.tree.leaves(new_state), strict=True)]
  state = jax.tree.unflatten(jax.tree.structure(new_state), kept)
  if PARAM_NORM in metrics["scalar"]:
    metrics["scalar"][PARAM_NORM] = max_utils.l2norm_pytree(nnx.filter_state(state["model"], nnx.Param))
  return state


def stopping(options: MoeTeOptions):
  """The factory of the seam on `train_utils.jit_train_and_eval_step`: the compiled train step, checked after every call."""

  def replace(original):
    @functools.wraps(original)
    def jit_train_and_eval_step(config, *args, **kwargs):
      train, *others = original(config, *args, **kwargs)
      if not rules_from_config.is_moe(config):
        return train, *others
      if options.on_overflow == "skip":
        return _Skipping(train, options.capacity_factor), *others
      return _Checked(train, options.capacity_factor, config.gradient_accumulation_steps), *others

    return jit_train_and_eval_step

  return replace


class _Skipping:
  """A compiled step that says how many steps were left out because they overflowed; everything else is the step's own."""

  def __init__(self, step, capacity_factor):
    self._step, self._capacity_factor, self._last, self._skipped = step, capacity_factor, None, 0

  def __getattr__(self, name):
    return getattr(self._step, name)

  def __call__(self, *args, **kwargs):
    state, metrics = self._step(*args, **kwargs)
    last, self._last = self._last, metrics["scalar"]
    if last is not None and int(last[OVERFLOW]) > 0:  # of the step before, so that this one is issued without waiting
      self._skipped += 1
      if not self._skipped & (self._skipped - 1):  # the first, the second, the fourth …
        log.warning(
          "a rank was sent %.0f rows in a step and holds %.0f (moe_te.capacity_factor=%g): the step's update is not applied; %d so far",
          float(last[DEMAND]), float(last[CAPACITY]), self._capacity_factor, self._skipped,
        )  # fmt: skip
    return state, metrics


class _Checked:
  """A compiled step that raises when it overflowed; everything else is the step's own."""

  def __init__(self, step, capacity_factor, microbatches):
    self._step, self._capacity_factor, self._microbatches = step, capacity_factor, microbatches

  def __getattr__(self, name):
    return getattr(self._step, name)

  def __call__(self, *args, **kwargs):
    state, metrics = self._step(*args, **kwargs)
    scalars = metrics["scalar"]
    if int(scalars[OVERFLOW]) > 0:  # waits for the step: the price of a finite factor
      raise self._error(float(scalars[DEMAND]), float(scalars[CAPACITY]), float(scalars[NEEDED]))
    return state, metrics

  def _error(self, demand, capacity, needed):
    given = f"(moe_te.capacity_factor={self._capacity_factor:g}); the step's update was not applied"
    if self._microbatches > 1:  # their demands are added up, and what is left of the largest is the bin that it fell in
      sent, held = f"more rows than the {capacity:.0f} it holds in one of {self._microbatches} microbatches", math.ceil(100 * needed) / 100
    else:
      sent = f"{demand:.0f} rows in this step and holds {capacity:.0f}"
      held = math.ceil(100 * self._capacity_factor * demand / capacity) / 100
    return CapacityError(
      found=f"a rank was sent {sent} {given}",
      needed=f"moe_te.capacity_factor of at least {held:g} for this step, or 0, which holds whatever the routing",
      fix=f"set moe_te.capacity_factor=0 or {math.ceil(held * 12.5) / 10:g} and start again from the last checkpoint",
    )
