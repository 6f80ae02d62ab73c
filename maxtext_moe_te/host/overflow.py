"""A step that needs more receive capacity than a finite `capacity_factor` gives: its update is not applied and the run stops there.

With the default, capacity_factor=0, nothing can overflow and nothing here is in the compiled step.
"""

import functools
import math

import jax
import jax.numpy as jnp

from maxtext_moe_te.errors import CapacityError
from maxtext_moe_te.settings.config import MoeTeOptions

OVERFLOW, DEMAND, CAPACITY = "moe_te/overflow", "moe_te/receive_rows_max", "moe_te/receive_capacity"


def keeping_state(train_step, options: MoeTeOptions):
  """`train_step` that returns the state it was given if the step overflowed, optimizer and step counter included."""
  if not options.capacity_factor:
    return train_step

  @functools.wraps(train_step)
  def step(model, config, state_mesh_shardings, params_shardings, state, data, *rest):
    new_state, metrics = train_step(model, config, state_mesh_shardings, params_shardings, state, data, *rest)
    overflowed = metrics["scalar"][OVERFLOW] > 0
    old, new = jax.tree.leaves(state), jax.tree.leaves(new_state)
    kept = [jnp.where(overflowed, o, n) for o, n in zip(old, new, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(new_state), kept), metrics

  return step


def stopping(options: MoeTeOptions):
  """The factory of the seam on `train_utils.jit_train_and_eval_step`: the compiled train step, checked after every call."""

  def replace(original):
    @functools.wraps(original)
    def jit_train_and_eval_step(*args, **kwargs):
      train, *others = original(*args, **kwargs)
      return _Checked(train, options.capacity_factor), *others

    return jit_train_and_eval_step

  return replace


class _Checked:
  """A compiled step that raises when it overflowed; everything else is the step's own."""

  def __init__(self, step, capacity_factor):
    self._step, self._capacity_factor = step, capacity_factor

  def __getattr__(self, name):
    return getattr(self._step, name)

  def __call__(self, *args, **kwargs):
    state, metrics = self._step(*args, **kwargs)
    scalars = metrics["scalar"]
    if OVERFLOW in scalars and int(scalars[OVERFLOW]) > 0:  # waits for the step: the price of a finite factor
      demand, capacity = float(scalars[DEMAND]), float(scalars[CAPACITY])
      held = math.ceil(100 * self._capacity_factor * demand / capacity) / 100
      raise CapacityError(
          found=f"a rank was sent {demand:.0f} rows in this step and holds {capacity:.0f} "
          f"(moe_te.capacity_factor={self._capacity_factor:g}); the step's update was not applied",
          needed=f"moe_te.capacity_factor of at least {held:g} for this step, or 0, which holds whatever the routing",
          fix=f"set moe_te.capacity_factor=0 or {math.ceil(held * 1.25 * 10) / 10:g} and start again from the last checkpoint",
      )
    return state, metrics
