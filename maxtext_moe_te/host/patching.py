"""Replacing attributes of other modules and putting them back: mechanism only, it knows no host."""

import collections
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
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
    reason: why this place is replaced, in a few words.
    passes: names of the parameters by which the replacement and the original's callers understand each other; the original must have them,
      in this order among its own.
    complete: whether it may have no others: the replacement does not call it, and what it does not know it would lose.
  """

  target: str
  replace: Callable[[Any], Any]
  reason: str
  passes: tuple[str, ...] = ()
  complete: bool = False


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


def apply_all(seams: Sequence[Seam], *, check: Callable[[Seam, Any], None] = lambda seam, original: None) -> Activation:
  """Checks all seams, then makes all changes, or none.

  Args:
    seams: each target at most once.
    check: called with each seam and what it replaces; raises what speaks against it.

  Raises:
    SeamError: a target is missing, given twice, or has other parameters than the replacement relies on. Nothing was changed.
  """
  twice = [target for target, count in collections.Counter(seam.target for seam in seams).items() if count > 1]
  if twice:
    raise SeamError(found=f"two seams for {', '.join(twice)}", needed="one seam per target", fix="join the two replacements")
  places = [(seam, *_resolve(seam.target)) for seam in seams]
  for seam, owner, name in places:
    _check_parameters(seam, vars(owner)[name])
    check(seam, vars(owner)[name])

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


def _check_parameters(seam, original):
  original = getattr(original, "__func__", original)
  if not seam.passes or not callable(original):
    return
  names = list(inspect.signature(original).parameters)
  found = f"{seam.target} has the parameters ({', '.join(names)})"
  if [name for name in names if name in seam.passes] != list(seam.passes):
    raise SeamError(found=found, needed=f"among them {', '.join(seam.passes)}", fix="use a supported version of the package")
  more = [name for name in names if name not in seam.passes]
  if seam.complete and more:
    raise SeamError(
      found=f"{found}, of which the plugin does not know {', '.join(more)}",
      needed=f"no more than {', '.join(seam.passes)}",
      fix="use a supported version of the package",
    )


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
