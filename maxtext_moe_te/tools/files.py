"""Files that are there as a whole or not at all."""

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
  """Writes a file, with the permissions of the one that is there.

  Raises:
    OSError: it cannot be written. Nothing was changed.
  """
  path = Path(os.path.realpath(path))  # of a link, the file it points to
  staged = path.with_name(f".{path.name}.{os.getpid()}.new")
  try:
    staged.write_bytes(content)
    if path.exists():
      staged.chmod(path.stat().st_mode)
    os.replace(staged, path)
  except BaseException:
    staged.unlink(missing_ok=True)
    raise
