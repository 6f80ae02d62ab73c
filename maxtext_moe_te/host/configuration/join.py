"""What is added to a call of MaxText's `initialize`, decided from what it asks for alone: no file, no environment, no MaxText run.

Owns precedence (base chain < model YAML < overlay < the user's own command line, keyword arguments and `M_` variables) and the two
switches away from MaxText's dropping and Transformer Engine MoE paths.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import omegaconf
from maxtext.configs import pyconfig

from maxtext_moe_te.errors import OptionError, RefusedError
from maxtext_moe_te.host import remat, rules_from_config
from maxtext_moe_te.host.configuration.inputs import NOT_UPSTREAM_TE, Inputs, differ, shown
from maxtext_moe_te.settings.config import MoeTeOptions

# What is switched when a YAML asks for a MoE path that the plugin replaces. Some keys decide on the path,
# the others belong to it and would fail MaxText's validators without it.
_TO_DROPLESS = {"sparse_matmul": True, "capacity_factor": -1.0, "megablox": False}
_DECISIVE = ("num_experts", *_TO_DROPLESS, *NOT_UPSTREAM_TE)


@dataclass(frozen=True, kw_only=True)
class Plan:
  """What is added to one configuration, and why.

  Args:
    injected: keyword arguments for MaxText beside the user's own.
    lost: keys of the overlay that are not used, with what wins.
    replaced: keys of the model YAML that `injected` replaces, with the value there.
    lines: the same, and the switches, for the log.
  """

  injected: Mapping[str, Any]
  lost: Mapping[str, str]
  replaced: Mapping[str, Any]
  lines: tuple[str, ...]


def plan(inputs: Inputs, options: MoeTeOptions, own: bool = True) -> Plan:
  """Decides what is added.

  Args:
    inputs: what the call asks for.
    options: ours.
    own: whether it is the run's own configuration, see `scope`; another is not given permission to differ from its model YAML.

  Raises:
    OptionError: MaxText would not take the user's own words.
    RefusedError: the user insists on a MoE path that the plugin replaces.
  """
  injected, lost, lines = {}, {}, []
  for key, value in inputs.overlay.maxtext.items():
    if key not in inputs.user:
      injected[key] = value
    elif differ(value, inputs.user[key]):
      lost[key] = inputs.by_user(key)
      lines.append(f"{shown(key, value)} of {inputs.by_overlay(key)} not used: {lost[key]} wins")
  attention = inputs.resolved(injected).get("attention")
  if attention in rules_from_config.SAMPLERS:
    lines.append(f"attention={attention}: a sampler of vLLM, which stays on MaxText's own MoE layer")
  elif options.enabled:
    switched, why = _switches(inputs, injected)
    if not own:
      switched = {key: value for key, value in switched.items() if inputs.model.get(key, value) == value}
    injected |= switched
    lines += why
  if own:
    injected |= remat.injected(options, inputs.user, inputs.resolved(injected), inputs.by_user)
  # MaxText's own comparison, not `differ`.
  replaced = {key: inputs.model[key] for key in injected if key in inputs.model and injected[key] != inputs.model[key]}
  lines += [f"{shown(key, value)} of {inputs.model_path} replaced: {shown(key, injected[key])}" for key, value in replaced.items()]
  if replaced:
    injected |= _permission(inputs, replaced)
    if "logical_axis_rules" in replaced and not injected.get("override_logical_axis_rules"):
      # MaxText merges rules by name, but drops the model's altogether once overriding is allowed.
      rules = (replaced["logical_axis_rules"], injected["logical_axis_rules"])
      injected["logical_axis_rules"] = pyconfig._merge_logical_axis_rules(*rules)
  return Plan(injected=injected, lost=lost, replaced=replaced, lines=tuple(lines))


def drops(values: Mapping[str, Any]) -> bool:
  """Whether a run with these values drops tokens."""
  return _number(values.get("num_experts")) > 1 and not _true(values.get("sparse_matmul")) and _number(values.get("capacity_factor")) > 0


def _switches(inputs, injected):
  """The keys that lead a run from MaxText's dropping or Transformer Engine MoE path to the one the plugin replaces; lines for the log."""
  defaults = {key: inputs.fields[key].default for key in _DECISIVE if key in inputs.fields}
  stock = {**defaults, **inputs.resolved({})}
  switched, lines = {}, []
  if drops(stock):
    _refuse_words(inputs, stock, _TO_DROPLESS, ("sparse_matmul", "capacity_factor"), "drops tokens")
    switched |= _changed(inputs, stock, injected, _TO_DROPLESS)
    was = ", ".join(shown(key, stock[key]) for key in ("sparse_matmul", "capacity_factor"))
    becomes = ", ".join(shown(key, value) for key, value in {**injected, **switched}.items() if key in _TO_DROPLESS)
    lines.append(f"the run dropped tokens ({was}) and no longer does: {becomes}")
  if _true(stock.get("te_moe_block")):
    _refuse_words(inputs, stock, NOT_UPSTREAM_TE, tuple(NOT_UPSTREAM_TE), "selects MaxText's own Transformer Engine MoE block")
    switched |= _changed(inputs, stock, injected, NOT_UPSTREAM_TE)
    was = ", ".join(shown(key, stock[key]) for key in switched if key in NOT_UPSTREAM_TE and key != "te_moe_block")
    lines.append(f"MaxText's te_moe_block replaced by the plugin{f' (not used: {was})' if was else ''}")
  final = {**defaults, **inputs.resolved({**injected, **switched})}
  for wrong, table in ((drops(final), _TO_DROPLESS), (_true(final.get("te_moe_block")), NOT_UPSTREAM_TE)):
    if wrong:
      keys = [key for key in table if key in injected and differ(injected[key], table[key])]
      raise RefusedError(
        found=f"{inputs.by_overlay(keys[0])} sets {', '.join(shown(key, injected[key]) for key in keys)}",
        needed="a dropless run on the plugin's MoE layer",
        fix=f"remove {', '.join(keys)} from the overlay, or write moe_te.enabled=false",
      )
  return switched, lines


def _refuse_words(inputs, stock, table, keys, what):
  insists = [inputs.by_user(key) for key in keys if key in inputs.user and differ(stock[key], table[key])]
  if insists:
    raise RefusedError(
      found=f"{' and '.join(insists)} {what if len(insists) == 1 else 'together: the run ' + what}",
      needed="a dropless run on the plugin's MoE layer",
      fix="remove it, or write moe_te.enabled=false" if len(insists) == 1 else "remove them, or write moe_te.enabled=false",
    )


def _changed(inputs, stock, injected, table):
  return {
    key: value
    for key, value in table.items()
    if key not in inputs.user and key not in injected and key in stock and differ(stock[key], value)
  }


def _permission(inputs, replaced):
  """MaxText's own permission to differ from the model YAML, without loosening what it asks of the user's own keys."""
  if _true({**inputs.base, **inputs.words, **inputs.kwargs}.get("override_model_config")):
    return {}
  if "override_model_config" in inputs.user:
    raise OptionError(
      found=f"{', '.join(replaced)} must differ from {inputs.model_path}, and {inputs.by_user('override_model_config')} does not allow it",
      needed="override_model_config=true on the command line",
      fix="write override_model_config=true, or remove the word: the overlay needs none",
    )
  given = {**inputs.words, **inputs.kwargs}
  try:
    pyconfig.validate_no_keys_overridden_twice(omegaconf.OmegaConf.create(inputs.model), omegaconf.OmegaConf.create(given))
    twice = []
  except ValueError:
    twice = [key for key in given if key in inputs.model and differ(inputs.user[key], inputs.model[key])]
  twice += [key for key in inputs.variables if key in inputs.model]  # refused by MaxText even if equal
  if twice:
    raise OptionError(
      found=f"{' and '.join(inputs.by_user(key) for key in twice)} differs from {inputs.model_path}",
      needed="override_model_config=true for keys that the model YAML sets",
      fix="write override_model_config=true, or remove it",
    )
  return {"override_model_config": True}


def _true(value):
  return str(value).lower() in ("true", "1", "yes", "y", "t", "on")


def _number(value):
  try:
    return float(value)
  except (TypeError, ValueError):
    return 0.0  # not a number: MaxText will say so
