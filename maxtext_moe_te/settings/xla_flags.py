"""XLA_FLAGS as text: parse, format, merge. Knows no flag by name."""

import shlex
from collections.abc import Mapping

from maxtext_moe_te.errors import OverlayError

Scalar = bool | int | float | str


def parse(text: str) -> list[tuple[str, str | None]]:
  """The flags of an XLA_FLAGS string in order; the value of a bare `--flag` is None.

  Words that are no flags are left out: XLA ignores them too.
  """
  words = [word[2:].partition("=") for word in shlex.split(text) if word.startswith("--")]
  return [(name, value if equals else None) for name, equals, value in words]


def format_flags(flags: Mapping[str, Scalar]) -> str:
  """Flags as XLA_FLAGS text; booleans become true and false."""
  return " ".join(f"--{name}={as_text(value)}" for name, value in flags.items())


def merge(flags: Mapping[str, Scalar], user: str) -> tuple[str, list[str]]:
  """Puts flags before those the user has set, leaving out each one that the user sets himself.

  Args:
    flags: flag names without dashes, and values.
    user: the user's own XLA_FLAGS, kept word for word.

  Returns:
    tuple[str, list[str]]: the merged text, and one report line per flag left out whose value differs.

  Raises:
    OverlayError: XLA_FLAGS names a file, so nothing can be added to it.
  """
  user = user.strip()
  if flags and user and not user.startswith("-"):
    raise OverlayError(
      found=f"XLA_FLAGS={user} names a file of flags and the overlay sets flags of its own",
      needed="flags in XLA_FLAGS itself, each starting with --",
      fix="put the flags of that file into XLA_FLAGS",
    )
  theirs = dict(parse(user)) if flags else {}
  added = {name: value for name, value in flags.items() if name not in theirs}
  lost = [
    f"xla flag {name}={as_text(value)} of the overlay not used: XLA_FLAGS sets {theirs[name] or 'true'}"
    for name, value in flags.items()
    if name in theirs and (theirs[name] or "true") != as_text(value)
  ]
  return " ".join(filter(None, (format_flags(added), user))), lost


def as_text(value: Scalar) -> str:
  """A YAML scalar as the environment wants it."""
  return str(value).lower() if isinstance(value, bool) else str(value)
