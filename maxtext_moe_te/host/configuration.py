"""The configuration seam: puts an overlay and our options into every configuration that MaxText resolves.

Owns precedence (base chain < model YAML < overlay < the user's own command line, keyword arguments and `M_` variables), the
messages for keys that do not exist, and the two switches away from MaxText's dropping and Transformer Engine MoE paths. It
does not judge models: the checks it is given do, on the resolved configuration.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import omegaconf
import pydantic
import yaml
from maxtext.configs import pyconfig, types

from maxtext_moe_te.errors import OptionError, RefusedError, nearest
from maxtext_moe_te.host import remat
from maxtext_moe_te.host.patching import Seam
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from maxtext_moe_te.settings.xla_flags import as_text

log = logging.getLogger("maxtext_moe_te")

_PYCONFIG = "maxtext.configs.pyconfig"
_FUNCTIONS = ("initialize", "initialize_pydantic")

# What is switched when a YAML asks for a MoE path that the plugin replaces. Some keys decide on the path,
# the others belong to it and would fail MaxText's validators without it.
_TO_DROPLESS = {"sparse_matmul": True, "capacity_factor": -1.0, "megablox": False}
_FROM_UPSTREAM_TE = {"te_moe_block": False, "te_gmm_quantization": "", "ragged_buffer_factor": -1.0}
_DECISIVE = ("num_experts", *_TO_DROPLESS, *_FROM_UPSTREAM_TE)


def config_seams(overlay: Overlay | None, options: MoeTeOptions, checks: Sequence[Callable[[Any], None]] = ()) -> list[Seam]:
  """The seams on MaxText's two ways to a configuration.

  Args:
    overlay: what to inject, or None.
    options: shown in the configuration as `moe_te`; with `enabled` false MaxText's MoE keys are left alone.
    checks: called in order with each resolved configuration; they raise what refuses it.
  """

  def replace(original):
    @functools.wraps(original)
    def resolve_with_overlay(argv=None, config_class=types.MaxTextConfig, **kwargs):
      injected = _injected(argv, config_class, kwargs, overlay or Overlay(()), options)
      with _in_one_line():
        config = original(argv, config_class=relaxed(config_class, options), **kwargs, **injected)
      if options.enabled:
        _check_dropless(config)
      for check in checks:
        check(config)
      return config

    return resolve_with_overlay

  return [
    Seam(
      target=f"{_PYCONFIG}:{name}",
      replace=replace,
      passes=("argv", "config_class"),
      reason="every MaxText entry point resolves its configuration here",
    )
    for name in _FUNCTIONS
  ]


@contextlib.contextmanager
def _in_one_line():
  """What MaxText's validators say about a value, or about several that do not go together, without the traceback around it."""
  try:
    yield
  except pydantic.ValidationError as error:
    first = error.errors(include_url=False, include_context=False)[0]
    key = first["loc"][0] if first["loc"] else ""  # further parts name types that were tried
    raise OptionError(
      found=f"{key}={first['input']}, which MaxText refuses" if key else "a combination of values that MaxText refuses",
      needed=" ".join(first["msg"].removeprefix("Value error, ").split()).rstrip("."),
      fix=f"change {key}" if key else "change one of the keys named there",
    ) from None


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


def explain(argv: Sequence[str], overlay: Overlay | None, options: MoeTeOptions) -> dict[str, Value]:
  """The configuration a run with these words would have, key by key, and where each value comes from.

  Connects to no other process. What MaxText derives from its devices it derives from those of this one.

  Raises:
    MoeTeError: what a run would be refused for before its model is looked at.
  """
  overlay = overlay or Overlay(())
  run = _read(argv, {}, overlay)
  injected = _injected(argv, types.MaxTextConfig, {}, overlay, options)
  quiet = {"skip_jax_distributed_system": True, "log_config": False}  # keywords beat words
  resolve = inspect.unwrap(pyconfig.initialize)  # ours, if the plugin is active, would take `injected` for the user's
  with _in_one_line():
    config = resolve(argv, config_class=relaxed(types.MaxTextConfig, options), **{**injected, **quiet})
  if options.enabled:
    _check_dropless(config)
  raw, chain = run.resolved(injected), list(_chain(run.base_path))
  values = {}
  for key, value in _tuples_out(config.get_keys()).items():
    if key == "moe_te":
      continue
    if key in quiet and key in raw:
      value = raw[key]
    if key in pyconfig.KEYS_NO_LOGGING:
      value = "(not shown)" if value else value
    source = _origin(key, run, injected, overlay, chain)
    if source is None:
      field = types.MaxTextConfig.model_fields.get(key)
      source = "MaxText's default" if field is not None and not _differ(value, field.default) else "MaxText derives it"
    elif _differ(value, raw[key]) and str(value) != str(raw[key]):
      values[key] = Value(value=value, source=source, asked=raw[key])
      continue
    values[key] = Value(value=value, source=source)
  return values


def known_keys() -> frozenset[str]:
  """The keys of MaxText's configuration."""
  return frozenset(_names(types.MaxTextConfig.model_fields))


def _origin(key, run, injected, overlay, chain):
  """Where a key was set, the highest place first; None if nowhere."""
  if key in run.variables:
    return pyconfig.yaml_key_to_env_key(key)
  if key in run.words:
    return "the command line"
  if key in injected:
    return _source(overlay, key) if key in overlay.maxtext else "maxtext-moe-te"
  if key in run.model:
    return f"models/{os.path.basename(run.model_path)}"
  return next((os.path.basename(path) for path, keys in chain if key in keys), None)


def _chain(path):
  """The run's YAML and those it is based on, itself first, each with the keys it sets; MaxText merges them into one."""
  while path:
    keys = _plain(omegaconf.OmegaConf.load(path))
    yield path, keys
    base = keys.get("base_config")
    near = base and os.path.join(os.path.dirname(path), base)
    path = near if not base or os.path.isfile(near) else os.path.join(pyconfig.MAXTEXT_CONFIGS_DIR, base)


def _tuples_out(values):
  """Plain values, as YAML and JSON can hold them."""
  if isinstance(values, dict):
    return {key: _tuples_out(value) for key, value in values.items()}
  if isinstance(values, list | tuple):
    return [_tuples_out(value) for value in values]
  value = getattr(values, "value", values)  # an enum member
  return value if isinstance(value, str | int | float | bool | None) else str(value)


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


@dataclass(frozen=True)
class _Run:
  """What one call asks for, before MaxText resolves it; each a map from key to value."""

  base: dict[str, Any]  # the run's YAML and its base_config chain
  base_path: str
  model: dict[str, Any]  # models/<model_name>.yml
  model_path: str
  words: dict[str, Any]  # key=value on the command line
  kwargs: dict[str, Any]
  variables: dict[str, Any]  # M_ environment variables

  @property
  def user(self):
    return {**self.words, **self.kwargs, **self.variables}

  def resolved(self, injected):
    return {**self.base, **self.model, **injected, **self.user}

  def by_user(self, key):
    """How the user set a key, as he would recognize it."""
    if key in self.variables:
      return f"the environment variable {pyconfig.yaml_key_to_env_key(key)}={os.environ[pyconfig.yaml_key_to_env_key(key)]}"
    if key in self.kwargs:
      return f"the keyword argument {_shown(key, self.kwargs[key])}"
    return f"{_shown(key, self.words[key])} on the command line"


def _injected(argv, config_class, kwargs, overlay, options):
  """The keyword arguments to add to the user's own."""
  _check_words(argv, kwargs)
  overlay = _without_absent(overlay, config_class)
  run = _read(argv, kwargs, overlay)
  _check_keys(run, config_class, overlay)
  injected = {}
  for key, value in overlay.maxtext.items():
    if key not in run.user:
      injected[key] = value
    elif _differ(value, run.user[key]):
      log.info("%s of %s not used: %s wins", _shown(key, value), _source(overlay, key), run.by_user(key))
  if options.enabled:
    injected |= _switches(run, config_class, injected, overlay)
  injected |= remat.injected(options, run.user, run.resolved(injected), run.by_user)
  replaced = [key for key in injected if key in run.model and injected[key] != run.model[key]]  # MaxText's own comparison
  for key in replaced:
    log.info("%s of %s replaced: %s", _shown(key, run.model[key]), run.model_path, _shown(key, injected[key]))
  if replaced:
    injected |= _permission(run, replaced)
    if "logical_axis_rules" in replaced and not injected.get("override_logical_axis_rules"):
      # MaxText merges rules by name, but drops the model's altogether once overriding is allowed.
      injected["logical_axis_rules"] = pyconfig._merge_logical_axis_rules(run.model["logical_axis_rules"], injected["logical_axis_rules"])
  return injected


def _without_absent(overlay, config_class):
  """The overlay without what switches off Transformer Engine's MoE path in a MaxText that has none (0.2.4)."""
  absent = {key for key in _FROM_UPSTREAM_TE if key not in config_class.model_fields}
  kept = {key: value for key, value in overlay.maxtext.items() if not (key in absent and value == _FROM_UPSTREAM_TE[key])}
  return dataclasses.replace(overlay, maxtext=kept)


def _read(argv, kwargs, overlay):
  """Reads what MaxText will read, by its own functions and in its order."""
  path, words = pyconfig._resolve_or_infer_config(argv, **kwargs)
  if not os.path.isfile(path):
    raise OptionError(
      found=f"the run's YAML {kwargs.get('base_config') or argv[1]} does not exist",
      needed="the path of a YAML file, as the first word",
      fix="correct the path, or leave the word out: MaxText then takes its own",
    )
  try:
    base = _plain(pyconfig._load_config(path))
    words = _plain(omegaconf.OmegaConf.from_cli(list(words)))
    name = {**base, **overlay.maxtext, **words, **kwargs}.get("model_name", "default")
    model, model_path = {}, ""
    if name is None:
      raise OptionError(found="model_name is empty", needed="a model of MaxText", fix="name one, or remove the word")
    if name != "default":
      model_path = _model_path(path, str(name).replace("-Instruct", ""))
      model = _plain(omegaconf.OmegaConf.load(model_path)) if os.path.isfile(model_path) else {}
  except (OSError, UnicodeDecodeError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
    raise OptionError(
      found=f"MaxText's configuration cannot be read: {error}",
      needed="YAML files that exist, and key=value words",
      fix=f"correct {getattr(error, 'filename', None) or path} or the words",
    ) from error
  run = _Run(base, path, model, model_path, words, dict(kwargs), {})
  overridable = run.resolved({})
  for key in {**overridable, **overlay.maxtext}:
    variable = pyconfig.yaml_key_to_env_key(key)
    if variable not in os.environ:
      continue
    if key not in overridable:
      raise OptionError(
        found=f"{variable} is set, and MaxText does not read it because {key} is in no YAML of this run",
        needed=f"one value for {key}, which {_source(overlay, key)} sets too",
        fix=f"unset {variable} and write {key}={os.environ[variable]} on the command line",
      )
    if key in run.words or key in run.kwargs:
      raise OptionError(found=f"{key} is set by {run.by_user(key)} and by {variable}", needed="one of the two", fix=f"unset {variable}")
    run.variables[key] = _parsed(variable, overridable[key])
  return run


def _model_path(base_path, name):
  folder = os.path.dirname(base_path)
  for candidate in (folder, os.path.dirname(folder)):
    path = os.path.join(candidate, "models", f"{name}.yml")
    if os.path.isfile(path):
      return path
  return os.path.join(os.path.dirname(os.path.realpath(pyconfig.__file__)), "models", f"{name}.yml")


def _check_words(argv, kwargs):
  words = list(argv or ())[1:]
  if not kwargs.get("base_config") and words and words[0].endswith(".yml"):
    words = words[1:]
  for word in words:
    if "=" in word:
      continue
    yaml_file = word.endswith((".yml", ".yaml"))
    raise OptionError(
      found=f"the word {word!r} on the command line is not key=value",
      needed="key=value words" + (", and one YAML file, as the first word and ending in .yml" if yaml_file else ""),
      fix="make it the first word, with the ending .yml" if yaml_file else f"write {word or 'key'}=VALUE or remove it",
    )


def _check_keys(run, config_class, overlay):
  fields = config_class.model_fields
  ignored = () if run.resolved(overlay.maxtext).get("use_multimodal") else types.Multimodal.model_fields
  sources = [
    (run.words, lambda key: "on the command line"),
    (run.kwargs, lambda key: "among the keyword arguments"),
    (overlay.maxtext, lambda key: f"in {_source(overlay, key)}"),
    (run.model, lambda key: f"in {run.model_path}"),
    (run.base, lambda key: f"in {run.base_path} or its base_config"),
  ]
  for values, where in sources:
    for key in values:
      if key in ("moe_te", "overlay"):
        raise OptionError(
          found=f"{key} {where(key)} reached MaxText, which does not know it",
          needed="overlay= and moe_te. words given to maxtext-moe-te, or a call of maxtext_moe_te.activate",
          fix="start the run with maxtext-moe-te train or run",
        )
      if key not in ignored and not pyconfig._check_for_invalid_keys(key, fields):
        near = nearest(key, _names(fields))
        raise OptionError(
          found=f"unknown MaxText key {key!r} {where(key)}",
          needed="a key of MaxText's configuration",
          fix=f"write {near}" if near else "remove it",
        )


def _names(fields):
  nested = [info.annotation.model_fields for info in fields.values() if hasattr(info.annotation, "model_fields")]
  return [*fields, *(name for inner in nested for name in _names(inner))]


def _switches(run, config_class, injected, overlay):
  """The keys that lead a run from MaxText's dropping or Transformer Engine MoE path to the one the plugin replaces."""
  defaults = {key: config_class.model_fields[key].default for key in _DECISIVE if key in config_class.model_fields}
  stock = {**defaults, **run.resolved({})}
  switched = {}
  if _drops(stock):
    _refuse_words(run, stock, _TO_DROPLESS, ("sparse_matmul", "capacity_factor"), "drops tokens")
    switched |= _changed(run, stock, injected, _TO_DROPLESS)
    log.info(
      "the run dropped tokens (%s, %s) and no longer does: %s",
      *(_shown(key, stock[key]) for key in ("sparse_matmul", "capacity_factor")),
      ", ".join(_shown(key, value) for key, value in {**injected, **switched}.items() if key in _TO_DROPLESS),
    )
  if _true(stock.get("te_moe_block")):
    _refuse_words(run, stock, _FROM_UPSTREAM_TE, tuple(_FROM_UPSTREAM_TE), "selects MaxText's own Transformer Engine MoE block")
    switched |= _changed(run, stock, injected, _FROM_UPSTREAM_TE)
    was = ", ".join(_shown(key, stock[key]) for key in switched if key in _FROM_UPSTREAM_TE and key != "te_moe_block")
    log.info("MaxText's te_moe_block replaced by the plugin%s", f" (not used: {was})" if was else "")
  final = {**defaults, **run.resolved({**injected, **switched})}
  for wrong, table in ((_drops(final), _TO_DROPLESS), (_true(final.get("te_moe_block")), _FROM_UPSTREAM_TE)):
    if wrong:
      keys = [key for key in table if key in injected and _differ(injected[key], table[key])]
      raise RefusedError(
        found=f"{_source(overlay, keys[0])} sets {', '.join(_shown(key, injected[key]) for key in keys)}",
        needed="a dropless run on the plugin's MoE layer",
        fix=f"remove {', '.join(keys)} from the overlay, or write moe_te.enabled=false",
      )
  return switched


def _drops(values):
  return _number(values.get("num_experts")) > 1 and not _true(values.get("sparse_matmul")) and _number(values.get("capacity_factor")) > 0


def _refuse_words(run, stock, table, keys, what):
  insists = [run.by_user(key) for key in keys if key in run.user and _differ(stock[key], table[key])]
  if insists:
    raise RefusedError(
      found=f"{' and '.join(insists)} {what if len(insists) == 1 else 'together: the run ' + what}",
      needed="a dropless run on the plugin's MoE layer",
      fix="remove it, or write moe_te.enabled=false" if len(insists) == 1 else "remove them, or write moe_te.enabled=false",
    )


def _changed(run, stock, injected, table):
  return {
    key: value
    for key, value in table.items()
    if key not in run.user and key not in injected and key in stock and _differ(stock[key], value)
  }


def _permission(run, replaced):
  """MaxText's own permission to differ from the model YAML, without loosening what it asks of the user's own keys."""
  if _true({**run.base, **run.words, **run.kwargs}.get("override_model_config")):
    return {}
  if "override_model_config" in run.user:
    raise OptionError(
      found=f"{', '.join(replaced)} must differ from {run.model_path}, and {run.by_user('override_model_config')} does not allow it",
      needed="override_model_config=true on the command line",
      fix="write override_model_config=true, or remove the word: the overlay needs none",
    )
  try:
    pyconfig.validate_no_keys_overridden_twice(
      omegaconf.OmegaConf.create(run.model), omegaconf.OmegaConf.create({**run.words, **run.kwargs})
    )
    twice = []
  except ValueError:
    twice = [key for key in {**run.words, **run.kwargs} if key in run.model and _differ(run.user[key], run.model[key])]
  twice += [key for key in run.variables if key in run.model]  # refused by MaxText even if equal
  if twice:
    raise OptionError(
      found=f"{' and '.join(run.by_user(key) for key in twice)} differs from {run.model_path}",
      needed="override_model_config=true for keys that the model YAML sets",
      fix="write override_model_config=true, or remove it",
    )
  return {"override_model_config": True}


def _check_dropless(config):
  """The promise, held against what MaxText resolved; the messages before this one name the words to change."""
  values = {key: getattr(config, key, None) for key in ("num_experts", "te_moe_block", "sparse_matmul", "capacity_factor")}
  if values["te_moe_block"] or _drops(values):
    raise RefusedError(
      found=f"MaxText resolved {', '.join(_shown(key, value) for key, value in values.items())}",
      needed="a dropless run on the plugin's MoE layer",
      fix="write te_moe_block=false sparse_matmul=true capacity_factor=-1, or moe_te.enabled=false",
    )


def _source(overlay, key):
  return f"overlay {overlay.sources.get(f'maxtext.{key}', ','.join(overlay.names))}"


def _shown(key, value):
  return f"{key}={'(not shown)' if key in pyconfig.KEYS_NO_LOGGING else as_text(value)}"


def _plain(config):
  return omegaconf.OmegaConf.to_container(config, resolve=False)


def _differ(left, right):
  if isinstance(left, bool) != isinstance(right, bool):  # one of them may be text from the command line
    return str(left).lower() != str(right).lower()
  return pyconfig._tuples_to_lists(left) != pyconfig._tuples_to_lists(right)


def _parsed(variable, original):
  """The value of a variable, read as MaxText reads it: as the type of what it replaces."""
  text = os.environ[variable]
  if not isinstance(original, bool | str | int | float):
    raise OptionError(
      found=f"the environment variable {variable}, in place of {original}",
      needed="a variable only for text, a number, true or false",
      fix=f"unset {variable} and write the value on the command line",
    )
  try:
    return pyconfig.str2bool(text) if isinstance(original, bool) else type(original)(text)
  except (ValueError, KeyError) as error:
    raise OptionError(
      found=f"the environment variable {variable}={text}", needed=f"a value like {original}", fix=f"correct or unset {variable}"
    ) from error


def _true(value):
  return str(value).lower() in ("true", "1", "yes", "y", "t", "on")


def _number(value):
  try:
    return float(value)
  except (TypeError, ValueError):
    return 0.0  # not a number: MaxText will say so
