"""The exceptions a user can meet, and how they read.

    MoeTeError                 every mistake we can explain in one line; the command line exits with status 2
    ├── OptionError            a `moe_te` option or a MaxText key that does not exist, or has a wrong value
    ├── OverlayError           an overlay that is missing, malformed, or contradicts another
    ├── VersionError           a package that is missing or whose version is not supported
    ├── SeamError              a place in MaxText that is not what the plugin was written against
    ├── PatchError             a source tree that the patches in patches/ were not made for, or an import hook that cannot be placed
    ├── RefusedError           a run that would not be exact, or would hang or abort, under the plugin
    └── CapacityError          a step that needed more receive capacity than the run was given

Nothing else belongs here: an error of MaxText, JAX or XLA surfaces as it is, but for what MaxText's configuration refuses where
`in_one_line` is in force. OptionError and RefusedError are ValueErrors too: what MaxText raises for such a configuration.
"""

import contextlib
import difflib
from collections.abc import Iterable
from contextvars import ContextVar


class MoeTeError(Exception):
  """What was found, what is needed, and the one change that fixes it.

  Args:
    found: what is wrong, naming the value and where it came from. No full stop.
    needed: what would be right. No full stop.
    fix: the one change that gets there, in the imperative. No full stop.
  """

  exit_status = 2

  def __init__(self, *, found: str, needed: str, fix: str):
    self.found, self.needed, self.fix = found, needed, fix
    super().__init__(f"{found}; needed: {needed}. Fix: {fix}.")

  @property
  def fields(self) -> dict[str, str]:
    """The three parts, by name: for JSON, and to raise it again elsewhere."""
    return {"found": self.found, "needed": self.needed, "fix": self.fix}

  def __reduce__(self):  # keyword-only arguments do not survive pickling between processes by themselves
    return (_rebuild, (type(self), self.found, self.needed, self.fix))


def _rebuild(cls, found, needed, fix):
  return cls(found=found, needed=needed, fix=fix)


class OptionError(MoeTeError, ValueError):
  """A `moe_te` option or a MaxText key that does not exist, or has a wrong value."""


class OverlayError(MoeTeError):
  """An overlay that is missing, malformed, or contradicts another."""


class VersionError(MoeTeError):
  """A package that is missing or whose version is not supported."""


class SeamError(MoeTeError):
  """A place in MaxText that is not what the plugin was written against."""


class PatchError(MoeTeError):
  """A source tree that the patches in patches/ were not made for, or an import hook that cannot be placed."""


class RefusedError(MoeTeError, ValueError):
  """A run that would not be exact, or would hang or abort, under the plugin."""


class CapacityError(MoeTeError):
  """A step that needed more receive capacity than the run was given. Its update was not applied."""


_one_line = ContextVar("one_line", default=False)


@contextlib.contextmanager
def in_one_line():
  """Says that somebody above shows errors in one line: a command line, not a program that handles MaxText's own."""
  token = _one_line.set(True)
  try:
    yield
  finally:
    _one_line.reset(token)


def wanted_in_one_line() -> bool:
  """Whether somebody above does."""
  return _one_line.get()


def nearest(name: str, known: Iterable[str]) -> str | None:
  """The known name closest to a misspelt one, whatever its case, or None if nothing is close."""
  by_lower = {other.lower(): other for other in known}
  matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
  return by_lower[matches[0]] if matches else None
