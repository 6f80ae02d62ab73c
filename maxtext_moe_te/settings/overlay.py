"""Overlays: YAML files that add MaxText keys, XLA flags, environment variables and our options to a run.

Owns reading, joining and what belongs to the environment. Whether a MaxText key exists, and what wins against the user's own
words, is decided in `host.configuration`, where MaxText can be asked.
"""

import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from maxtext_moe_te.errors import OverlayError, nearest
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions

_MAPS = ("xla_flags", "env", "moe_te")
# Keys that say how a run is put together: an overlay sits on top of a run, it does not choose one.
_NOT_IN_OVERLAYS = {
  "base_config": "name the base YAML in the run's own YAML",
  "override_model_config": "remove it, an overlay may replace keys of the model YAML without it",
}


@dataclass(frozen=True)
class Overlay:
  """One or several overlay files, joined.

  Args:
    names: as the user wrote them.
    maxtext: MaxText keys and values.
    moe_te: our options.
    xla_flags: flags without dashes, scalar values.
    env: environment variables, text values.
    sources: "maxtext.KEY", "moe_te.KEY", "xla_flags.KEY" or "env.KEY" to the file that set it.
  """

  names: tuple[str, ...]
  maxtext: dict[str, Any] = field(default_factory=dict)
  moe_te: dict[str, Any] = field(default_factory=dict)
  xla_flags: dict[str, Any] = field(default_factory=dict)
  env: dict[str, str] = field(default_factory=dict)
  sources: dict[str, str] = field(default_factory=dict)


def load(spec: str) -> Overlay:
  """Loads `NAME|PATH[,…]`.

  A NAME is looked up among the overlays that come with the package; a word with a path separator, or ending in .yml or
  .yaml, is a path. Keys may be set by several files as long as they agree.

  Raises:
    OverlayError: a file is missing or malformed, or two files contradict each other.
    OptionError: a file sets an option of ours that does not exist or has a wrong value.
  """
  names = tuple(name.strip() for name in spec.split(",") if name.strip())
  if not names:
    raise OverlayError(found=f"{spec!r} names no overlay", needed="a name or a path", fix="write overlay=NAME, or name none")
  overlay = Overlay(names)
  for path in map(_find, names):
    for section, values in _read(path).items():
      joined = getattr(overlay, section)
      for key, value in values.items():
        where = f"{section}.{key}"
        if key in joined and joined[key] != value:
          raise OverlayError(
            found=f"{overlay.sources[where]} sets {key}={joined[key]} and {path} sets {key}={value}",
            needed="overlays that do not contradict each other",
            fix=f"remove {key} from one of the two, or one of the two from overlay=",
          )
        joined.setdefault(key, value)
        overlay.sources.setdefault(where, str(path))
  return overlay


def apply_environment(overlay: Overlay, environ: MutableMapping[str, str], profiles: Sequence[str] = ()) -> list[str]:
  """Sets an overlay's environment variables and XLA flags, and those of profiles; what the user has set himself wins.

  Must run before jax is imported: both are read once.

  Args:
    overlay: the loaded overlay.
    environ: usually `os.environ`; changed in place.
    profiles: names of XLA flag profiles. The overlay's own flags win over them.

  Returns:
    list[str]: one report line for each thing the user's environment takes from the overlay or a profile, or that was mended in it.
  """
  report = []
  for key, value in overlay.env.items():
    other = {xla_flags.MEMORY_FRACTIONS[i]: xla_flags.MEMORY_FRACTIONS[1 - i] for i in (0, 1)}.get(key)
    if other and other in environ:  # two names of one setting; JAX refuses them together
      report.append(f"environment variable {key}={value} of the overlay not used: the environment sets {other}={environ[other]}")
    elif environ.setdefault(key, value) != value:
      report.append(f"environment variable {key}={value} of the overlay not used: the environment sets {environ[key]}")
  text, mended = xla_flags.repair(environ.get("XLA_FLAGS", ""))
  profiled = xla_flags.profile(profiles)
  label = f"the profile {','.join(profiles)}"
  report += mended + [
    f"xla flag {name}={xla_flags.as_text(value)} of {label} not used: the overlay sets {xla_flags.as_text(overlay.xla_flags[name])}"
    for name, value in profiled.items()
    if overlay.xla_flags.get(name, value) != value
  ]
  rest = {name: value for name, value in profiled.items() if name not in overlay.xla_flags}
  for flags, source in ((overlay.xla_flags, "the overlay"), (rest, label)):
    text, lost = xla_flags.merge(flags, text, source)
    report += lost
  if text:
    environ["XLA_FLAGS"] = text
  return report


def packaged() -> dict[str, Path]:
  """The overlays that come with the package: name to file."""
  inside = Path(__file__).parents[1] / "configs"
  folder = inside if inside.is_dir() else Path(__file__).parents[2] / "configs"  # in a checkout they lie at the top
  return {path.stem: path for path in sorted(folder.glob("*.yml"))}


def _find(name):
  if "/" in name or name.endswith((".yml", ".yaml")):
    try:
      path = Path(name).expanduser()
      found = path.is_file()
    except (OSError, RuntimeError):  # a name too long, or a home that does not exist
      found = False
    if not found:
      raise OverlayError(found=f"overlay {name} does not exist", needed="the path of a YAML file", fix="correct the path after overlay=")
    return path
  known = packaged()
  if name not in known:
    near = nearest(name, known)
    raise OverlayError(
      found=f"no overlay is called {name}",
      needed=f"a path, or one of {', '.join(known)}" if known else "a path",
      fix=f"write overlay={near}" if near else "give the path of a YAML file",
    )
  return known[name]


def _read(path):
  """One file as {"maxtext": …, "moe_te": …, "xla_flags": …, "env": …}."""
  try:
    return parse(path.read_text(encoding="utf-8"), str(path))
  except OSError as error:
    found = f"{path} cannot be read ({error.strerror})"
    raise OverlayError(found=found, needed="a readable file", fix="correct its permissions") from error
  except UnicodeDecodeError as error:
    raise OverlayError(found=f"{path} is not UTF-8: {error}", needed="a YAML map", fix="correct the file") from error


def parse(text: str, path: str) -> dict[str, dict]:
  """The text of one file as {"maxtext": …, "moe_te": …, "xla_flags": …, "env": …}; see `load`."""
  content = _map(parse_yaml(text, path), path, "the file")
  about = content.pop("about", "")
  if not isinstance(about, str) or "\n" in about.strip():
    raise OverlayError(found=f"`about` in {path} is not one line of text", needed="one line", fix="shorten it")
  sections = {name: _map(content.pop(name, None), path, f"`{name}`") for name in _MAPS}
  for key, fix in _NOT_IN_OVERLAYS.items():
    if key in content:
      raise OverlayError(found=f"{path} sets {key}", needed="an overlay without it", fix=fix)
  MoeTeOptions.from_mapping(sections["moe_te"], path)
  for section in ("xla_flags", "env"):
    for key, value in sections[section].items():
      _check_environment(path, section, key, value)
  sections["env"] = {key: xla_flags.as_text(value) for key, value in sections["env"].items()}
  return {"maxtext": content, **sections}


def parse_yaml(text: str, path: str, needed: str = "a YAML map") -> Any:
  """What a YAML text holds.

  Raises:
    OverlayError: it is no YAML, or a key stands in it twice.
  """
  try:
    return yaml.load(text, _loader(path))
  except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number that Python does not read
    mark = getattr(error, "problem_mark", None)
    raise OverlayError(
      found=f"{path} is not YAML: {getattr(error, 'problem', None) or error}" + (f", line {mark.line + 1}" if mark else ""),
      needed=needed,
      fix="correct the file",
    ) from error


def _map(value, path, what):
  if value is None:
    return {}
  if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
    raise OverlayError(found=f"{what} in {path} is not a map from names to values", needed="KEY: VALUE lines", fix="correct the file")
  return value


def _check_environment(path, section, key, value):
  if not isinstance(value, str | int | float):
    raise OverlayError(
      found=f"{section}.{key} in {path} is {value!r}",
      needed="text, a number, true or false",
      fix=f"write one value for {key}",
    )
  if section == "env" and (not re.fullmatch(r"[A-Za-z_]\w*", key) or "\0" in str(value)):
    raise OverlayError(
      found=f"env.{key} in {path}", needed="the name of an environment variable and its text", fix="correct the name or the value"
    )
  if section == "xla_flags" and (key.startswith("-") or re.search(r"\s", key + str(value))):
    raise OverlayError(
      found=f"XLA flag {key!r}: {value!r} in {path}",
      needed="a name without dashes and a value without spaces (XLA drops what follows a space without a word)",
      fix=f"write {re.sub(r'\s', '', key.lstrip('-'))}: {re.sub(r'\s', '', str(value))}",
    )
  if section == "env" and (key == "XLA_FLAGS" or key.startswith("M_")):
    place = "the map `xla_flags`" if key == "XLA_FLAGS" else f"the top level, as {key[2:].lower()}"
    raise OverlayError(found=f"env.{key} in {path}", needed=f"the same in {place}", fix=f"move it to {place}")


def _loader(path):
  """A safe YAML loader that refuses duplicate keys, reads 1e-3 as a number and leaves a date as text, as MaxText's own does."""

  class Loader(yaml.SafeLoader):
    def construct_mapping(self, node, deep=False):
      seen = set()
      for key_node, _ in node.value:
        key = key_node.value if isinstance(key_node.value, str) else None
        if key in seen and key != "<<":
          raise OverlayError(
            found=f"{path} sets {key} twice, the second time in line {key_node.start_mark.line + 1}",
            needed="each key once",
            fix="remove one of the two",
          )
        seen.add(key)
      return super().construct_mapping(node, deep)

  Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
  }
  Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789"))
  return Loader
