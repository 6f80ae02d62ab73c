"""Fresh Python environments for the tests of what is released, without downloading or copying what they need.

Every package of the running environment is linked in, one by one, except this project and what a test leaves out.
"""

import fnmatch
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("maxtext_moe_te*", "_maxtext_moe_te*", "__editable__*maxtext_moe_te*", "*.pth")


def make(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
  """Makes an environment and returns its interpreter.

  Args:
    folder: where; must not exist.
    without: patterns of names in site-packages that are left out.
  """
  subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
  site = site_packages(folder)
  for entry in Path(sysconfig.get_path("purelib")).iterdir():
    if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in (*OURS, *without)):
      (site / entry.name).symlink_to(entry)
  return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
  """Its site-packages folder."""
  return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def own_files(folder: Path) -> dict[str, bytes]:
  """Content of every file in its site-packages that is not linked in, by path; not what Python compiles of linked modules."""
  site, found = site_packages(folder), {}
  for where, _, names in site.walk():
    for path in (where / name for name in names):
      compiled = where == site / "__pycache__" and (site / f"{path.name.partition('.')[0]}.py").is_symlink()
      if not path.is_symlink() and not compiled:
        found[str(path.relative_to(site))] = path.read_bytes()
  return found


def variables(python: Path) -> dict[str, str]:
  """Environment variables for commands in it: its programs first, nothing of a checkout."""
  kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "XLA_", "JAX_", "MAXTEXT_MOE_TE"))}
  return kept | {"PATH": f"{python.parent}:{kept['PATH']}"}


def run(python: Path, *words: str | Path, **more: str) -> subprocess.CompletedProcess:
  """Runs a command in it, from the file system's root, where no checkout is in the way."""
  return subprocess.run(list(map(str, words)), env=variables(python) | more, cwd="/", capture_output=True, text=True)


def build(destination: Path, source: Path = ROOT, **more: str) -> list[Path]:
  """Builds sdist and wheel of a source tree.

  Returns:
    list: the sdist and the wheel.
  """
  command = [sys.executable, "-m", "hatchling", "build", "-d", str(destination)]
  subprocess.run(command, cwd=source, env=os.environ | more, check=True, capture_output=True)
  return sorted(destination.iterdir(), key=lambda path: path.suffix)
