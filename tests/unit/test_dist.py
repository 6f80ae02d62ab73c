"""What is released: the bytes are the same each time, nothing unwanted is inside, and it works where it is installed."""

import os
import shutil
import tarfile
import zipfile

import pytest

from maxtext_moe_te import __version__ as VERSION
from tests import environments

pytestmark = pytest.mark.dist

# What may lie in the wheel beside modules.
DATA = {
  "maxtext_moe_te/host": (".json",),
  "maxtext_moe_te/settings": (".toml",),
  "maxtext_moe_te/tools": (".json",),
  "maxtext_moe_te/configs": (".yml", ".md"),
  "maxtext_moe_te/patches": (".toml", ".md"),
  "maxtext_moe_te/patches/maxtext": (".patch",),
  "maxtext_moe_te/patches/transformer_engine": (".patch",),
}
TOP_OF_SDIST = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "configs", "maxtext_moe_te", "patches", "pyproject.toml", ".gitignore"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """The sdist and the wheel."""
  sdist, wheel = environments.build(tmp_path_factory.mktemp("dist"), SOURCE_DATE_EPOCH="1767225600")
  return sdist, wheel


def test_the_same_bytes_from_another_folder_with_other_times_and_rights(built, tmp_path):
  copy = tmp_path / "copy"
  left_out = shutil.ignore_patterns(".git", ".venv*", "tests", "dist", "demo_output", "__pycache__", ".*_cache")
  shutil.copytree(environments.ROOT, copy, ignore=left_out)
  for path in copy.rglob("*"):
    os.utime(path, (1, 1))
    path.chmod(0o700 if path.is_dir() else 0o600)
  again = environments.build(tmp_path / "dist", copy, SOURCE_DATE_EPOCH="1767225600")
  assert [path.name for path in again] == [path.name for path in built]
  assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_nothing_unwanted_in_the_wheel(built):
  names = zipfile.ZipFile(built[1]).namelist()
  info = f"maxtext_moe_te-{VERSION}.dist-info"
  assert {name for name in names if name.startswith(info)} == {
    f"{info}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD")
  }
  for name in names:
    folder = name.rpartition("/")[0]
    module = name.startswith("maxtext_moe_te/") and name.endswith(".py") and f"{folder}/__init__.py" in names
    assert module or name.startswith(info) or name.endswith(DATA.get(folder, ())), f"{name} is in the wheel"


def test_everything_wanted_in_the_wheel(built):
  archive = zipfile.ZipFile(built[1])
  inside = {name.removeprefix("maxtext_moe_te/"): archive.read(name) for name in archive.namelist()}
  for folder, pattern in (("maxtext_moe_te", "*.py"), ("configs", "*.yml"), ("patches", "*.patch"), ("patches", "*.toml")):
    source = environments.ROOT / folder
    found = list(source.rglob(pattern))
    assert found
    for path in found:
      name = str(path.relative_to(source if folder == "maxtext_moe_te" else environments.ROOT))
      assert inside.get(name) == path.read_bytes(), name


def test_nothing_unwanted_in_the_sdist(built):
  with tarfile.open(built[0]) as archive:
    names = archive.getnames()
  tops = {name.split("/")[1] for name in names}
  assert tops == TOP_OF_SDIST
  assert not [name for name in names if name.endswith((".pyc", ".so", ".log")) or "__pycache__" in name]


@pytest.mark.parametrize("which", ["sdist", "wheel"])
def test_it_works_where_it_is_installed(built, tmp_path, which):
  python = environments.make(tmp_path / "venv")
  before = environments.own_files(tmp_path / "venv")
  archive = built[0] if which == "sdist" else built[1]
  done = environments.run(python, python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", archive)
  assert done.returncode == 0, done.stderr

  def said(*words):
    done = environments.run(python, "maxtext-moe-te", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout

  assert said("--version") == f"maxtext-moe-te {VERSION}\n"
  assert "plugin-loader.patch" in said("patch", "list")
  listed = "from maxtext_moe_te.settings import overlay; print(overlay.__file__, *overlay.packaged())"
  where, *overlays = environments.run(python, python, "-c", listed).stdout.split()
  assert where.startswith(str(tmp_path))
  assert sorted(overlays) == sorted(path.stem for path in (environments.ROOT / "configs").glob("*.yml"))
  if environments.run(python, python, "-c", "import maxtext").returncode == 0:
    assert "mixtral-8x7b" in said("models")

  assert environments.run(python, python, "-m", "pip", "uninstall", "--yes", "maxtext-moe-te").returncode == 0
  assert environments.own_files(tmp_path / "venv") == before
