"""The words of a command line that are ours, among those that belong to MaxText."""

from maxtext_moe_te.errors import OptionError


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
  try:
    return float(text)
  except ValueError:
    return {"true": True, "false": False}.get(text.lower(), text)
