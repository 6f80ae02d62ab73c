"""The seam on MaxText's two ways to a configuration: has MaxText resolve it with what the plan adds, and checks what comes out.

It does not judge models: the checks it is given do, on the resolved configuration.
"""

import contextlib
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pydantic
from maxtext.configs import pyconfig, types

from maxtext_moe_te.errors import OptionError, RefusedError, wanted_in_one_line
from maxtext_moe_te.host import rules_from_config, source
from maxtext_moe_te.host.configuration import inputs, join, scope
from maxtext_moe_te.host.configuration.inputs import shown
from maxtext_moe_te.host.patching import Seam
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from maxtext_moe_te.settings.xla_flags import as_text

log = logging.getLogger("maxtext_moe_te")

MOST_TEXT = 300  # characters of what MaxText says: some of its messages name everything that it knows

_PYCONFIG = "maxtext.configs.pyconfig"
# What MaxText's configuration raises for what the user wrote. Anything else is not about that, and MaxText ends the process for it.
_REFUSALS = (ValueError, NotImplementedError)


def config_seams(
  overlay: Overlay | None,
  options: MoeTeOptions,
  checks: Sequence[Callable[[Any], None]] = (),
  own_checks: Sequence[Callable[[Any], None]] = (),
) -> list[Seam]:
  """The seams on MaxText's two ways to a configuration.

  Args:
    overlay: what to inject into the run's own configuration, see `scope`; or None.
    options: shown in every configuration as `moe_te`; with `enabled` false MaxText's MoE keys are left alone.
    checks: called in order with each resolved configuration; they raise what refuses it.
    own_checks: called before them with the run's own.
  """
  run, nothing = scope.Scope(), Overlay(())

  def replace(original):
    @functools.wraps(original)
    def resolve_with_overlay(argv=None, config_class=types.MaxTextConfig, **kwargs):
      asked = inputs.ask(argv, kwargs)
      beside = run.beside(asked)
      own = not beside
      plan = join.plan(inputs.read(asked, config_class, (overlay if own else None) or nothing), options, own)
      if withheld := [] if own else [*(overlay or nothing).names, *(["moe_te.offload"] if options.offload else [])]:
        log.info("a configuration beside the run's own (%s): %s not used for it", beside, ", ".join(withheld))
      for line in plan.lines:
        log.info(line)
      config = resolved(original, argv, config_class, options, {**kwargs, **plan.injected})
      check_arrived(config, plan.injected, options)
      for check in [*(own_checks if own else ()), *checks]:
        check(config)
      if own:
        run.remember(asked, config)
      return config

    return resolve_with_overlay

  return [
    Seam(
      target=f"{_PYCONFIG}:{name}",
      replace=replace,
      passes=("argv",),
      reason="every MaxText entry point resolves its configuration here",
    )
    for name in ("initialize", "initialize_pydantic")
  ]


def resolved(original: Callable, argv, config_class: type, options: MoeTeOptions, kwargs: Mapping[str, Any]):
  """MaxText's configuration, with our options in it.

  Args:
    original: MaxText's own `initialize` or `initialize_pydantic`.
    argv, config_class, kwargs: what it gets, the plan's keys among the last.
    options: ours.

  Raises:
    OptionError: MaxText refuses a value, or several that do not go together, and who asks wants it in one line; else what MaxText raises.
    RefusedError: the model would drop tokens, or run on MaxText's own Transformer Engine path.
  """
  one_line = _refusals_in_one_line() if wanted_in_one_line() else contextlib.nullcontext()
  with one_line, _of_class(original, relaxed(config_class, options)) as more:
    config = original(argv, **more, **kwargs)
  if options.enabled and not rules_from_config.is_sampler(config):
    _check_dropless(config)
  return config


def check_arrived(config: Any, injected: Mapping[str, Any], options: MoeTeOptions) -> None:
  """The proof that MaxText's way to a configuration, whatever its text, took what the plan adds.

  Args:
    config: what MaxText resolved.
    injected: the plan's keys.
    options: ours.

  Raises:
    RefusedError: a key has another value there, or our options are not there.
  """
  if getattr(config, "moe_te", None) != options.as_dict():
    raise RefusedError(
      found=f"the configuration that MaxText {source.version()} in {source.root()} resolved does not carry the plugin's options",
      needed="a pyconfig.initialize that makes its configuration of the class it is given",
      fix="undo what was changed there, or set moe_te.enabled=false and use no overlay",
    )
  lost = [key for key, value in injected.items() if not _is_there(value, getattr(config, key, None))]
  if lost:
    became = ", ".join(f"{shown(key, injected[key])} became {as_text(_plain(getattr(config, key, None)))}" for key in lost)
    raise RefusedError(
      found=f"MaxText {source.version()} in {source.root()} did not take what the plugin adds to its configuration: {became}",
      needed="these values",
      fix=f"remove {', '.join(lost)} from the overlay",
    )


def _is_there(wanted, found):
  """Whether a resolved value is the wanted one, which may be text, a number in another type, or part of a list that was merged."""
  wanted, found = _plain(wanted), _plain(found)
  if isinstance(wanted, list):
    return isinstance(found, list) and all(item in found for item in wanted)
  if isinstance(wanted, Mapping):
    return isinstance(found, Mapping) and all(_is_there(value, found.get(key)) for key, value in wanted.items())
  if isinstance(wanted, str) and wanted.lower() in ("", "none"):
    return found in ("", None) or str(found).lower() == wanted.lower()
  return not inputs.differ(wanted, found) or str(wanted) == str(found)


def _plain(value):
  value = getattr(value, "value", value)
  if isinstance(value, np.dtype):
    return value.name
  return pyconfig._tuples_to_lists(value) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _of_class(original, config_class):
  """The keywords by which MaxText's function takes a class; where it takes none, it looks the class up by name in each call."""
  if "config_class" in inspect.signature(inspect.unwrap(original)).parameters:
    yield {"config_class": config_class}
    return
  standing, types.MaxTextConfig = types.MaxTextConfig, config_class
  try:
    yield {}
  finally:
    types.MaxTextConfig = standing


@contextlib.contextmanager
def _refusals_in_one_line():
  """What MaxText says about a value, or about several that do not go together, without the traceback or the lines around it."""
  name = "_handle_config_exception"  # it prints, and ends the process unless a test runs it; older sources have none
  handle = vars(pyconfig).get(name)
  if handle is not None:
    setattr(pyconfig, name, lambda error: None)
  try:
    yield
  except _REFUSALS as error:
    raise _explained(error) from None
  except Exception as error:
    if handle is not None:
      handle(error)
    raise
  finally:
    if handle is not None:
      setattr(pyconfig, name, handle)


def _explained(error):
  if not isinstance(error, pydantic.ValidationError):
    text = _shortened(str(error))
    fix = "write override_model_config=true, or remove it" if "override_model_config" in str(error) else "change what it names"
    return OptionError(found=f"MaxText refuses the configuration: {text}", needed="one that it takes", fix=fix)
  first = error.errors(include_url=False, include_context=False)[0]
  key = first["loc"][0] if first["loc"] else ""  # further parts name types that were tried
  return OptionError(
    found=f"{key}={first['input']}, which MaxText refuses" if key else "a combination of values that MaxText refuses",
    needed=_shortened(first["msg"].removeprefix("Value error, ")),
    fix=f"change {key}" if key else "change one of the keys named there",
  )


def _shortened(text):
  return textwrap.shorten(text, MOST_TEXT, placeholder=" …").rstrip(".")


@functools.cache
def relaxed(config_class: type, options: MoeTeOptions) -> type:
  """A subclass of a MaxText configuration class that carries our options in the field `moe_te`.

  The place for validators that the plugin makes unnecessary: a method of the same name replaces MaxText's.
  """
  if "moe_te" in config_class.model_fields:
    return config_class

  made = pydantic.create_model(
    config_class.__name__,  # MaxText compares class names
    __base__=config_class,
    moe_te=(dict[str, Any], pydantic.Field(default_factory=options.as_dict, description="Options of maxtext-moe-te.")),
  )
  # Data loader workers receive the configuration pickled, and this class has no importable name.
  made.__reduce__ = lambda self: (_restored, (config_class, options, self.__getstate__()))
  return made


def _restored(config_class, options, state):
  config = object.__new__(relaxed(config_class, options))
  config.__setstate__(state)
  return config


def _check_dropless(config):
  """The promise, held against what MaxText resolved; the messages before this one name the words to change."""
  values = {key: getattr(config, key, None) for key in ("num_experts", "te_moe_block", "sparse_matmul", "capacity_factor")}
  if values["te_moe_block"] or join.drops(values):
    raise RefusedError(
      found=f"MaxText resolved {', '.join(shown(key, value) for key, value in values.items())}",
      needed="a dropless run on the plugin's MoE layer",
      fix="write te_moe_block=false sparse_matmul=true capacity_factor=-1, or moe_te.enabled=false",
    )
