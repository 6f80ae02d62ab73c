"""`maxtext-moe-te enable|disable|status`: the .pth file through which `MAXTEXT_MOE_TE_OVERLAY` reaches MaxText's unchanged command.

The file is entered in the RECORD of the installed package, so that uninstalling the package removes it too. What it does once the
variable is set is in `hook`. Imports neither jax nor MaxText.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import os
import site
from pathlib import Path

from maxtext_moe_te.errors import MoeTeError, PatchError
from maxtext_moe_te.host import known
from maxtext_moe_te.settings import words as our_words
from maxtext_moe_te.settings.variable import PTH, PTH_LINE, VARIABLE
from maxtext_moe_te.tools import files, patches

_ABOUT = {
  "enable": f"let {VARIABLE} switch the plugin on under MaxText's own command, in this Python environment",
  "disable": "take that back",
  "status": "whether it is, and what MaxText's own command would do now",
}


def main(words: list[str]) -> int:
  """Runs one of the three commands, which the first word names.

  Returns:
    int: 0.

  Raises:
    PatchError: the package is not where Python reads .pth files, or its folder cannot be written. Nothing was changed.
  """
  action, *words = words
  argparse.ArgumentParser(prog=f"maxtext-moe-te {action}", description=_ABOUT[action]).parse_args(words)
  try:
    pth, record = places()
  except PatchError as error:
    if action != "status":
      raise
    print(status(None, None, error.found))
    return 0
  if action != "status":
    try:
      (enable if action == "enable" else disable)(pth, record)
    except OSError as error:
      raise PatchError(
        found=f"{error.filename} cannot be written ({error.strerror})",
        needed="write access to the folder of installed packages",
        fix="run it as the user who installed the package",
      ) from error
  print(status(pth, record))
  return 0


def places() -> tuple[Path, Path | None]:
  """Where the .pth file belongs, and the RECORD of the package if there is one."""
  try:
    distribution = importlib.metadata.distribution("maxtext-moe-te")
    folder = Path(distribution.locate_file("")).resolve()
    record = next((Path(file.locate()) for file in distribution.files or () if file.name == "RECORD"), None)
  except importlib.metadata.PackageNotFoundError:
    folder, record = Path(__file__).resolve().parents[2], None
  read = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
  if folder not in (Path(place).resolve() for place in read):
    raise PatchError(
      found=f"maxtext-moe-te is installed in {folder}, where Python reads no .pth files",
      needed=f"an installation in {' or '.join(read)}",
      fix="pip install maxtext-moe-te in the environment that runs MaxText",
    )
  return folder / PTH, record


def enable(pth: Path, record: Path | None) -> None:
  """Writes the file and its line in RECORD, each if it is not there."""
  if record is not None:
    content = record.read_bytes()
    if _record_line(content) not in content:
      files.replace(record, _without_line(content) + _record_line(content))
  if not pth.is_file() or pth.read_bytes() != PTH_LINE.encode():
    files.replace(pth, PTH_LINE.encode())


def disable(pth: Path, record: Path | None) -> None:
  """The reverse of `enable`: RECORD is byte for byte what it was."""
  pth.unlink(missing_ok=True)
  if record is not None:
    content = record.read_bytes()
    if _without_line(content) != content:
      files.replace(record, _without_line(content))


def status(pth: Path | None, record: Path | None, impossible: str = "") -> str:
  """What is in place and what follows from it, a line each.

  Args:
    pth, record: see `places`; pth is None where no such file is read.
    impossible: why.
  """
  written = pth is not None and pth.is_file()
  right = written and pth.read_bytes() == PTH_LINE.encode()
  kept = ", not in RECORD: run `maxtext-moe-te disable` before uninstalling" if written and not _recorded(record) else ""
  hooked = "not possible" if pth is None else "enabled" if right else "of another version, enable it again" if written else "disabled"
  lines = [f"import hook: {hooked} ({impossible or pth}{kept})"]
  root = patches.find("maxtext")
  state = patches.inspect(patches.load(), "maxtext", root)
  lines.append(f"MaxText: {'cannot be imported' if root is None else f'{known.standing()}; patches {state.state}'}")
  overlay = os.environ.get(VARIABLE)
  lines.append(f"{VARIABLE}: {overlay or 'not set'}")
  reached = right or state.state == patches.APPLIED
  lines.append(f"python -m maxtext.…: {_outcome(overlay) if overlay and reached else 'plain MaxText'}")
  return "\n".join(lines)


def _outcome(overlay):
  try:
    options = our_words.read([], overlay).options
    unknown = known.unknown((known.LAYER, known.STEP)) if options.enabled else []
  except MoeTeError as error:
    return f"refused: {error}"
  if unknown and options.selfcheck == "never":
    return "refused: this source is not known to the plugin, and moe_te.selfcheck=never"
  return f"under the plugin, overlay {overlay}{', if its numbers are equal' if unknown else ''}"


def _recorded(record):
  return record is not None and _record_line(record.read_bytes()) in record.read_bytes()


def _record_line(content):
  """The file's line in RECORD, with the line ending of the others."""
  digest = base64.urlsafe_b64encode(hashlib.sha256(PTH_LINE.encode()).digest()).rstrip(b"=")
  end = b"\r\n" if b"\r\n" in content else b"\n"
  return b"%s,sha256=%s,%d%s" % (PTH.encode(), digest, len(PTH_LINE), end)


def _without_line(content):
  return b"".join(line for line in content.splitlines(keepends=True) if not line.startswith(PTH.encode() + b","))
