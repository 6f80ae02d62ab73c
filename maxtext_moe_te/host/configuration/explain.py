"""Where each value of a run's configuration comes from, for `config show`."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxtext.configs import pyconfig, types

from maxtext_moe_te.host.configuration import inputs as reading
from maxtext_moe_te.host.configuration import join, seam
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay


@dataclass(frozen=True, kw_only=True)
class Value:
  """One effective value of a configuration.

  Args:
    value: what MaxText resolved.
    source: where it comes from: the command line, a variable, an overlay, a YAML file, the plugin, or MaxText.
    asked: what stands there, where MaxText made something else of it; otherwise None.
  """

  value: Any
  source: str
  asked: Any = None


def explain(argv: Sequence[str], overlay: Overlay | None, options: MoeTeOptions) -> tuple[dict[str, Value], join.Plan]:
  """The configuration a run with these words would have, key by key, and the plan that the seam would apply.

  Connects to no other process. What MaxText derives from its devices it derives from those of this one.

  Raises:
    MoeTeError: what a run would be refused for before its model is looked at.
  """
  inputs = reading.read(reading.ask(argv, {}), types.MaxTextConfig, overlay or Overlay(()))
  plan = join.plan(inputs, options)
  quiet = {"skip_jax_distributed_system": True, "log_config": False}  # keywords beat words
  resolve = inspect.unwrap(pyconfig.initialize)  # ours, if the plugin is active, would take the plan's keys for the user's
  config = seam.resolved(resolve, argv, types.MaxTextConfig, options, {**plan.injected, **quiet})
  raw, chain = inputs.resolved(plan.injected), list(reading.chain(inputs.base_path))
  values = {}
  for key, value in _tuples_out(config.get_keys()).items():
    if key == "moe_te":
      continue
    if key in quiet and key in raw:
      value = raw[key]
    if key in pyconfig.KEYS_NO_LOGGING:
      value = "(not shown)" if value else value
    source = _origin(key, inputs, plan, chain)
    if source is None:
      field = types.MaxTextConfig.model_fields.get(key)
      source = "MaxText's default" if field is not None and not reading.differ(value, field.default) else "MaxText derives it"
    elif reading.differ(value, raw[key]) and str(value) != str(raw[key]):
      values[key] = Value(value=value, source=source, asked=raw[key])
      continue
    values[key] = Value(value=value, source=source)
  return values, plan


def known_keys() -> frozenset[str]:
  """The keys of MaxText's configuration."""
  return frozenset(reading.names(types.MaxTextConfig.model_fields))


def _origin(key, inputs, plan, chain):
  """Where a key was set, the highest place first; None if nowhere."""
  if key in inputs.variables:
    return pyconfig.yaml_key_to_env_key(key)
  if key in inputs.words:
    return "the command line"
  if key in plan.injected:
    return inputs.by_overlay(key) if key in inputs.overlay.maxtext else "maxtext-moe-te"
  if key in inputs.model:
    return f"models/{os.path.basename(inputs.model_path)}"
  return next((os.path.basename(path) for path, keys in chain if key in keys), None)


def _tuples_out(values):
  """Plain values, as YAML and JSON can hold them."""
  if isinstance(values, dict):
    return {key: _tuples_out(value) for key, value in values.items()}
  if isinstance(values, list | tuple):
    return [_tuples_out(value) for value in values]
  value = getattr(values, "value", values)  # an enum member
  return value if isinstance(value, str | int | float | bool | None) else str(value)
