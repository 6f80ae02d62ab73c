"""What one call of MaxText's `initialize` asks for, read by MaxText's own functions and in its order.

Owns the refusal of what cannot be read and of keys that do not exist, each with the place where it stands.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import omegaconf
import yaml
from maxtext.configs import pyconfig, types

from maxtext_moe_te.errors import OptionError, nearest
from maxtext_moe_te.settings.overlay import Overlay
from maxtext_moe_te.settings.xla_flags import as_text

# What switches Transformer Engine's MoE path of MaxText 0.2.5 off.
NOT_UPSTREAM_TE = {"te_moe_block": False, "te_gmm_quantization": "", "ragged_buffer_factor": -1.0}


class MissingFileError(OptionError, FileNotFoundError):
  """A YAML file that does not exist; MaxText's own is a FileNotFoundError."""


class UnreadableError(OptionError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException):
  """A YAML file or a word that cannot be parsed; MaxText's own is one of these."""


class UnsettableError(OptionError, TypeError):
  """A variable in the place of a list or a map; MaxText's own is a TypeError."""


@dataclass(frozen=True, kw_only=True)
class Asked:
  """What one call gives, and the YAML files it names.

  Args:
    path: of the run's YAML.
    base: that and its base_config chain, joined.
    words: key=value on the command line.
    kwargs: keyword arguments.
  """

  path: str
  base: dict[str, Any]
  words: dict[str, Any]
  kwargs: dict[str, Any]

  def get(self, key: str, default: Any = None) -> Any:
    """What the call says about a key, before model YAML, overlay and variables."""
    return {**self.base, **self.words, **self.kwargs}.get(key, default)


@dataclass(frozen=True, kw_only=True)
class Inputs:
  """What one call asks for, before MaxText resolves it; the maps go from key to value.

  Args:
    fields: those of the configuration class, by key.
    base: the run's YAML and its base_config chain, joined.
    base_path: of the run's YAML.
    model: models/<model_name>.yml.
    model_path: empty if there is none.
    overlay: what the user named; without what this MaxText does not have and the overlay does not want.
    words: key=value on the command line.
    kwargs: keyword arguments.
    variables: M_ environment variables.
    texts: the same, as they stand in the environment.
  """

  fields: Mapping[str, Any]
  base: dict[str, Any]
  base_path: str
  model: dict[str, Any]
  model_path: str
  overlay: Overlay
  words: dict[str, Any]
  kwargs: dict[str, Any]
  variables: dict[str, Any]
  texts: dict[str, str]

  @property
  def user(self) -> dict[str, Any]:
    """What he set himself, wherever."""
    return {**self.words, **self.kwargs, **self.variables}

  def resolved(self, injected: Mapping[str, Any]) -> dict[str, Any]:
    """Every key that is set somewhere, the highest place winning."""
    return {**self.base, **self.model, **injected, **self.user}

  def by_user(self, key: str) -> str:
    """How the user set a key, as he would recognize it."""
    if key in self.variables:
      return f"the environment variable {pyconfig.yaml_key_to_env_key(key)}={self.texts[key]}"
    if key in self.kwargs:
      return f"the keyword argument {shown(key, self.kwargs[key])}"
    return f"{shown(key, self.words[key])} on the command line"

  def by_overlay(self, key: str) -> str:
    """The overlay file that sets a key."""
    return f"overlay {self.overlay.sources.get(f'maxtext.{key}', ','.join(self.overlay.names))}"


def ask(argv: Sequence[str] | None, kwargs: Mapping[str, Any]) -> Asked:
  """Reads the words and the run's YAML.

  Args:
    argv, kwargs: those of MaxText's `initialize`.

  Raises:
    OptionError: a file or a word that cannot be read.
  """
  _check_words(argv, kwargs)
  path, words = pyconfig._resolve_or_infer_config(argv, **kwargs)
  if not os.path.isfile(path):
    raise MissingFileError(
      found=f"the run's YAML {kwargs.get('base_config') or argv[1]} does not exist",
      needed="the path of a YAML file, as the first word",
      fix="correct the path, or leave the word out: MaxText then takes its own",
    )
  with _reading(path):
    return Asked(
      path=path, base=plain(pyconfig._load_config(path)), words=plain(omegaconf.OmegaConf.from_cli(list(words))), kwargs=dict(kwargs)
    )


def read(asked: Asked, config_class: type, overlay: Overlay) -> Inputs:
  """Reads what MaxText will read for a call.

  Args:
    asked: the call.
    config_class: the one that MaxText's `initialize` gets.
    overlay: keys to join.

  Raises:
    OptionError: a file that cannot be read, a variable that cannot be used, or a key that does not exist.
  """
  fields = config_class.model_fields
  absent = {key for key in NOT_UPSTREAM_TE if key not in fields}  # a MaxText, or a class, that has none of it
  kept = {key: value for key, value in overlay.maxtext.items() if not (key in absent and value == NOT_UPSTREAM_TE[key])}
  overlay = dataclasses.replace(overlay, maxtext=kept)
  name = {**asked.base, **overlay.maxtext, **asked.words, **asked.kwargs}.get("model_name", "default")
  model, model_path = {}, ""
  if name is None:
    raise OptionError(found="model_name is empty", needed="a model of MaxText", fix="name one, or remove the word")
  if name != "default":
    model_path = _model_path(asked.path, str(name).replace("-Instruct", ""))
    with _reading(model_path):
      model = plain(omegaconf.OmegaConf.load(model_path)) if os.path.isfile(model_path) else {}
  found = Inputs(
    fields=fields, base=asked.base, base_path=asked.path, model=model, model_path=model_path, overlay=overlay, words=asked.words,
    kwargs=asked.kwargs, variables={}, texts={},
  )  # fmt: skip
  texts = _variables(found)
  values = {key: _parsed(pyconfig.yaml_key_to_env_key(key), text, found.resolved({})[key]) for key, text in texts.items()}
  found = dataclasses.replace(found, variables=values, texts=texts)
  _check_keys(found)
  return found


@contextlib.contextmanager
def _reading(path):
  try:
    yield
  except (OSError, UnicodeDecodeError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
    kind = MissingFileError if isinstance(error, OSError) else UnreadableError
    raise kind(
      found=f"MaxText's configuration cannot be read: {error}",
      needed="YAML files that exist, and key=value words",
      fix=f"correct {getattr(error, 'filename', None) or path} or the words",
    ) from error


def chain(path: str):
  """The run's YAML and those it is based on, itself first, each with the keys it sets; MaxText merges them into one."""
  while path:
    keys = plain(omegaconf.OmegaConf.load(path))
    yield path, keys
    base = keys.get("base_config")
    near = base and os.path.join(os.path.dirname(path), base)
    path = near if not base or os.path.isfile(near) else os.path.join(pyconfig.MAXTEXT_CONFIGS_DIR, base)


def names(fields: Mapping[str, Any]) -> list[str]:
  """The keys of a configuration class, those of the classes inside it among them."""
  nested = [info.annotation.model_fields for info in fields.values() if hasattr(info.annotation, "model_fields")]
  return [*fields, *(name for inner in nested for name in names(inner))]


def differ(left: Any, right: Any) -> bool:
  """Whether two values are different to MaxText; one of them may be text from the command line."""
  if isinstance(left, bool) != isinstance(right, bool):
    return str(left).lower() != str(right).lower()
  return pyconfig._tuples_to_lists(left) != pyconfig._tuples_to_lists(right)


def shown(key: str, value: Any) -> str:
  """key=value, unless the value is nobody's business."""
  return f"{key}={'(not shown)' if key in pyconfig.KEYS_NO_LOGGING else as_text(value)}"


def plain(config) -> dict[str, Any]:
  return omegaconf.OmegaConf.to_container(config, resolve=False)


def _model_path(base_path, name):
  folder = os.path.dirname(base_path)
  for candidate in (folder, os.path.dirname(folder)):
    path = os.path.join(candidate, "models", f"{name}.yml")
    if os.path.isfile(path):
      return path
  return os.path.join(os.path.dirname(os.path.realpath(pyconfig.__file__)), "models", f"{name}.yml")


def _variables(found):
  """The text of each M_ variable that MaxText reads; refused is one that it would not read, and one beside another value."""
  texts, overridable = {}, found.resolved({})
  for key in {**overridable, **found.overlay.maxtext}:
    variable = pyconfig.yaml_key_to_env_key(key)
    if variable not in os.environ:
      continue
    if key not in overridable:
      raise OptionError(
        found=f"{variable} is set, and MaxText does not read it because {key} is in no YAML of this run",
        needed=f"one value for {key}, which {found.by_overlay(key)} sets too",
        fix=f"unset {variable} and write {key}={os.environ[variable]} on the command line",
      )
    if key in found.words or key in found.kwargs:
      raise OptionError(found=f"{key} is set by {found.by_user(key)} and by {variable}", needed="one of the two", fix=f"unset {variable}")
    texts[key] = os.environ[variable]
  return texts


def _parsed(variable, text, original):
  """The value of a variable, read as MaxText reads it: as the type of what it replaces."""
  if not isinstance(original, bool | str | int | float):
    raise UnsettableError(
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


def _is_key(key, fields):
  """Whether MaxText knows a key, at the top or inside another."""
  check = getattr(pyconfig, "_check_for_invalid_keys", None)  # older ones know no keys inside others
  return check(key, fields) if check else key in fields


def _check_keys(found):
  ignored = (
    () if found.resolved(found.overlay.maxtext).get("use_multimodal") else getattr(getattr(types, "Multimodal", None), "model_fields", ())
  )
  sources = [
    (found.words, lambda key: "on the command line"),
    (found.kwargs, lambda key: "among the keyword arguments"),
    (found.overlay.maxtext, lambda key: f"in {found.by_overlay(key)}"),
    (found.model, lambda key: f"in {found.model_path}"),
    (found.base, lambda key: f"in {found.base_path} or its base_config"),
  ]
  for values, where in sources:
    for key in values:
      if key in ("moe_te", "overlay"):
        raise OptionError(
          found=f"{key} {where(key)} reached MaxText, which does not know it",
          needed="overlay= and moe_te. words given to maxtext-moe-te, or a call of maxtext_moe_te.activate",
          fix="start the run with maxtext-moe-te train or run",
        )
      if key not in ignored and not _is_key(key, found.fields):
        near = nearest(key, names(found.fields))
        raise OptionError(
          found=f"unknown MaxText key {key!r} {where(key)}",
          needed="a key of MaxText's configuration",
          fix=f"write {near}" if near else "remove it",
        )
