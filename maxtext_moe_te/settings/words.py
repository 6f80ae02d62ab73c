"""The words of a command line that are ours, among those that belong to MaxText, and what they ask for."""

from dataclasses import dataclass
from typing import Any

from maxtext_moe_te.errors import MoeTeError, OptionError
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings.config import MoeTeOptions


@dataclass(frozen=True, kw_only=True)
class Asked:
  """What a command line asks for.

  Args:
    words: the words that are MaxText's, in order.
    spec: the overlays as the user named them, joined by commas; None if he named none.
    overlay: what they hold; empty if there are none.
    given: the options on the command line.
    options: the overlay's and, over them, those.
  """

  words: list[str]
  spec: str | None
  overlay: overlays.Overlay
  given: dict[str, Any]
  options: MoeTeOptions


def read(words: list[str], variable: str | None) -> Asked:
  """Reads a command line and the overlay it names.

  Args:
    words: MaxText's arguments and, among them, ours.
    variable: the overlay that the environment names, for a command line that names none; None or empty for none.

  Raises:
    MoeTeError: a word, an overlay or an option is wrong.
  """
  rest, spec, given = split_words(words)
  if spec is not None or not variable:
    overlay = overlays.load(spec) if spec is not None else overlays.Overlay(())
  else:
    spec = variable
    try:
      overlay = overlays.load(spec)
    except MoeTeError as error:
      raise type(error)(found=f"{error.found}, from MAXTEXT_MOE_TE_OVERLAY", needed=error.needed, fix=error.fix) from error
  options = MoeTeOptions.from_mapping(overlay.moe_te, spec or "no overlay").replace_from(given, "the command line")
  return Asked(words=rest, spec=spec, overlay=overlay, given=given, options=options)


def split_words(words: list[str]) -> tuple[list[str], str | None, dict]:
  """Takes our words out of MaxText's arguments.

  Returns:
    tuple: the other words in order; the overlays joined by commas, or None; our options, the last word for one winning.

  Raises:
    OptionError: a `moe_te` word that is not `moe_te.OPTION=VALUE`.
  """
  rest, specs, options = [], [], {}
  for word in words:
    name, equals, value = word.partition("=")
    if name == "overlay" and equals:
      specs.append(value)
    elif name == "moe_te" or name.startswith("moe_te."):
      if not equals or not name.removeprefix("moe_te"):
        raise OptionError(
          found=f"the word {word!r} on the command line",
          needed="moe_te.OPTION=VALUE",
          fix="write for example moe_te.router=jax",
        )
      options[name.removeprefix("moe_te.")] = _value(value)
    else:
      rest.append(word)
  return rest, ",".join(specs) if specs else None, options


def _value(text):
  for number in (int, float):
    try:
      return number(text)
    except ValueError:
      pass
  return {"true": True, "false": False}.get(text.lower(), text)
