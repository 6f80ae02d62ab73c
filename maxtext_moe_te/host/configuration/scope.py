"""Whose configuration a call resolves: the run's own, which an overlay is for, or one beside it, such as a teacher's.

The run's own is the first that is resolved under an activation, if this process's command line has MaxText words the first in which
one of them stands, and each later one of the same run: the same YAML, model and weights, whatever else differs (compilations of
several batch sizes, a run that starts again, a notebook's next attempt). Beside it are, in this order:

- one whose keyword arguments are the `teacher_overrides` of the run's own; with its `student_overrides` it is the run's own
  whatever model they name, for that one is trained;
- one that MaxText makes for the sampler's share of the devices (reinforcement learning on several slices);
- one of another YAML, model or weights: a teacher, a converter, an evaluation, vLLM's settings.

Such a configuration gets the checks and the field `moe_te`; not the overlay's keys, nor tensors to offload, and never permission to
differ from its model YAML. Who wants the overlay for a second model in one process undoes the activation and makes another.
"""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import omegaconf
from maxtext.configs import types

from maxtext_moe_te.host.configuration.inputs import Asked, differ, plain, shown

# What makes it another run.
_IDENTITY = ("model_name", "load_parameters_path", "load_full_state_path")
_DEFAULTS = {"model_name": "default"}
# What MaxText's `setup_configs_and_devices` adds for the trainer's and for the sampler's share; only the latter's has an open tensor axis.
_SHARE = ("num_slices", "ici_fsdp_parallelism", "ici_tensor_parallelism", "dcn_data_parallelism")


class Scope:
  """What one activation remembers of the run's own configuration."""

  def __init__(self):
    self._asked: Asked | None = None
    self._config: Any = None

  def beside(self, asked: Asked) -> str:
    """What makes this a configuration beside the run's own; empty if it is the run's own."""
    if self._asked is None:
      given, words = {**asked.words, **asked.kwargs}, _words_of_this_process()
      found = not words or any(key in given and not differ(given[key], value) for key, value in words.items())
      return "" if found else "no word of the command line is in it"
    if asked.kwargs and asked.kwargs == self._overrides("student_overrides"):
      return ""
    if asked.kwargs and asked.kwargs == self._overrides("teacher_overrides"):
      return "it is the teacher's"
    if self._is_samplers_share(asked.kwargs):
      return "it is the sampler's"
    if os.path.realpath(asked.path) != os.path.realpath(self._asked.path):
      return f"its YAML is {asked.path}"
    for key in _IDENTITY:
      value, own = (one.get(key, _DEFAULTS.get(key, "")) or "" for one in (asked, self._asked))
      if differ(value, own):
        return shown(key, value)
    return ""

  def remember(self, asked: Asked, config: Any) -> None:
    """Has the first configuration of the run stand for it."""
    if self._asked is None:
      self._asked, self._config = asked, config

  def _overrides(self, name) -> Mapping[str, Any]:
    return getattr(self._config, name, None) or {}

  def _is_samplers_share(self, kwargs):
    slices, tensor = (getattr(self._config, key, None) for key in ("num_samplers_slices", "ici_tensor_parallelism"))
    share = [kwargs.get(key) for key in _SHARE]
    return (slices or 0) > 0 and None not in share and share[0] == share[3] == slices and share[2] == -1 != tensor


def _words_of_this_process():
  """Those that this process was started with and that set a key of MaxText's, as MaxText reads them."""
  words = [word for word in sys.argv[1:] if re.match(r"[A-Za-z_]\w*=", word)]
  return {key: value for key, value in plain(omegaconf.OmegaConf.from_cli(words)).items() if key in types.MaxTextConfig.model_fields}
