"""Replacing attributes of other modules and putting them back: mechanism only, it knows no host.

`python -m maxtext_moe_te.host.patching TARGET[,TARGET…] …` prints the fingerprint to record for a seam (the further targets
of one word are those that it `relies_on`).
"""

import ast
import collections
import functools
import hashlib
import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxtext_moe_te.errors import SeamError

log = logging.getLogger("maxtext_moe_te")


@dataclass(frozen=True, kw_only=True)
class Seam:
  """One place that is replaced.

  Args:
    target: "package.module:Attr.path"; the last name must be the owner's own, not inherited.
    replace: takes the original, returns what takes its place.
    fingerprints: host version to fingerprint, see `fingerprint`; "VERSION patched" for the source as patches/ leaves it.
    reason: why this place is replaced, in a few words.
    relies_on: further targets whose source the replacement counts on; part of the fingerprint.
  """

  target: str
  replace: Callable[[Any], Any]
  fingerprints: Mapping[str, str]
  reason: str
  relies_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Change:
  target: str
  owner: Any
  name: str
  old: Any  # the owner's exact __dict__ entry
  new: Any
  log_line: str

  @property
  def in_place(self):
    return vars(self.owner).get(self.name) is self.new

  def undo(self):
    setattr(self.owner, self.name, self.old)


@dataclass
class Activation:
  """The changes made by one `apply_all`, and their undoing. Usable as a context manager.

  Args:
    calls: target to how often its replacement was called: the proof that a path ran.

  JAX caveat: what was traced while the activation was in place keeps the replacements after `undo`.
  """

  calls: collections.Counter = field(default_factory=collections.Counter)
  _changes: list[_Change] = field(default_factory=list)
  _after_undo: list[Callable[[], None]] = field(default_factory=list)

  @property
  def active(self) -> bool:
    return bool(self._changes)

  @property
  def targets(self) -> tuple[str, ...]:
    return tuple(change.target for change in self._changes)

  def undo(self) -> None:
    """Restores every owner's own entry, last change first. A second call does nothing.

    Raises:
      SeamError: somebody replaced one of the targets after us. Nothing was changed.
    """
    lost = [change.target for change in self._changes if not change.in_place]
    if lost:
      raise SeamError(
        found=f"{', '.join(lost)} was replaced by somebody else after the plugin was activated",
        needed="the last to replace being the first to undo",
        fix="undo the other replacement first",
      )
    while self._changes:
      self._changes.pop().undo()
    while self._after_undo:
      self._after_undo.pop()()

  def after_undo(self, call: Callable[[], None]) -> None:
    """Has `call` run once, after everything else was undone."""
    self._after_undo.append(call)

  def __enter__(self):
    return self

  def __exit__(self, *exc_info):
    self.undo()


def apply_all(seams: Sequence[Seam], *, host_version: str, accept_unknown: bool = False) -> Activation:
  """Checks all seams, then makes all changes, or none.

  Args:
    seams: each target at most once.
    host_version: the key into `Seam.fingerprints`.
    accept_unknown: replace a target even if its source is not the one recorded; warned about.

  Raises:
    SeamError: a target is missing, given twice, or its source is not the recorded one. Nothing was changed.
  """
  twice = [target for target, count in collections.Counter(seam.target for seam in seams).items() if count > 1]
  if twice:
    raise SeamError(found=f"two seams for {', '.join(twice)}", needed="one seam per target", fix="join the two replacements")
  places = [(seam, *_resolve(seam.target)) for seam in seams]
  recorded = lambda seam: [seam.fingerprints.get(version) for version in (host_version, f"{host_version} patched")]
  changed = [seam.target for seam in seams if _fingerprint_of(seam) not in recorded(seam)]
  if changed and not accept_unknown:
    raise SeamError(
      found=f"the source of {', '.join(changed)} is not what the plugin was written against (host version {host_version})",
      needed="the source recorded for a supported version",
      fix="use a supported version or moe_te.unknown_host=true",
    )
  for target in changed:
    log.warning("%s: unknown source accepted, nothing vouches for the result", target)

  activation = Activation()
  planned = [_plan(seam, owner, name, activation.calls) for seam, owner, name in places]
  try:
    for change in planned:
      setattr(change.owner, change.name, change.new)
      activation._changes.append(change)
      log.info(change.log_line)
  except BaseException:
    activation.undo()
    raise
  return activation


_current: tuple[Any, Activation] | None = None


def activate_once(key: Any, make: Callable[[], Activation]) -> Activation:
  """One activation per process: the same settings give the same one again.

  Args:
    key: the settings it stands for, compared with ==.
    make: makes it.

  Raises:
    SeamError: another one, with other settings, is in place.
  """
  global _current
  if _current is not None and _current[1].active:
    if _current[0] == key:
      return _current[1]
    raise SeamError(
      found="the plugin is already active with other settings",
      needed="one activation per process",
      fix="call undo() on the first activation, or use the same overlay and options",
    )
  activation = make()
  _current = (key, activation)
  return activation


def fingerprint(*targets: str) -> str:
  """The sha256 of the source of the targets, comments, blank lines and indentation of the whole left out.

  Raises:
    SeamError: a target is missing or has no source.
  """
  digest = hashlib.sha256()
  for target in targets:
    owner, name = _resolve(target)
    entry = vars(owner)[name]
    try:
      source = inspect.getsource(getattr(entry, "__func__", entry))
    except (OSError, TypeError) as error:
      raise SeamError(
        found=f"{target} has no Python source", needed="a function or class written in Python", fix="use a supported version"
      ) from error
    digest.update(_normalized(source).encode())
  return digest.hexdigest()


def _fingerprint_of(seam):
  return fingerprint(seam.target, *seam.relies_on)


def _normalized(source):
  # Not `ast.dump`: its text changes between Python versions. Parsed only to make sure that it is complete.
  source = textwrap.dedent(source)
  ast.parse(source)
  lines = (line.rstrip() for line in source.splitlines())
  return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def _resolve(target):
  """The object that owns the target, and the name under which it does."""
  module, colon, path = target.partition(":")
  *parents, name = path.split(".")
  try:
    owner = functools.reduce(getattr, parents, importlib.import_module(module))
    present = bool(colon) and name in vars(owner)
  except ModuleNotFoundError as error:
    if error.name is None or not module.startswith(error.name):
      raise  # a dependency is missing, not the target
    present = False
  except AttributeError:
    present = False
  if not present:
    raise SeamError(found=f"{target} does not exist", needed="the place the plugin replaces", fix="use a supported version of the package")
  return owner, name


def _plan(seam, owner, name, calls):
  old = vars(owner)[name]
  new = seam.replace(old)
  log_line = f"{seam.target}: {_describe(old)} -> {_describe(new)}"
  return _Change(seam.target, owner, name, old, _counted(new, seam.target, calls), log_line)


def _counted(new, target, calls):
  if not inspect.isfunction(new):
    return new

  @functools.wraps(new)
  def counted(*args, **kwargs):
    calls[target] += 1
    return new(*args, **kwargs)

  return counted


def _describe(value):
  value = getattr(value, "__func__", value)
  while inspect.isfunction(value) and value.__globals__["__name__"] == "contextlib":
    value = value.__wrapped__  # what @contextmanager was put on
  if inspect.isfunction(value):
    # Not __module__ and __qualname__: a replacement made with functools.wraps carries the original's.
    return f"{value.__globals__['__name__']}.{value.__code__.co_qualname.replace('<locals>.', '')}"
  return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}".lstrip(".")


def main(words: Sequence[str]) -> int:
  for word in words:
    print(word.split(",")[0], fingerprint(*word.split(",")))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
