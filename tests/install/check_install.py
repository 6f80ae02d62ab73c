"""The wheel beside MaxText 0.2.5 and 0.2.4, in environments made for it: `make test-install`.

Apart from the other tests because it downloads, makes two environments of a gigabyte and takes some ten minutes. Each: install the
wheel, with nothing else to install; train the demo's model; the unchanged command through the import hook and through the patches;
uninstall; every file of the environment is then what it was.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

from maxtext_moe_te.settings.variable import VARIABLE
from tests.host.test_patched import WORDS

REPOSITORY = pathlib.Path(__file__).parents[2]
VERSIONS = os.environ.get("MAXTEXT_VERSIONS", "0.2.5 0.2.4").split()


def command(*words, status=0, **environment):
  """Standard output and error, as one text, of a command that must end with `status`."""
  clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS", VARIABLE)}
  # No bytecode: what Python writes beside a source is not the package's, and would hide what is.
  clean |= {"PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE", **environment}
  done = subprocess.run(list(map(str, words)), env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  assert done.returncode == status, done.stdout[-4000:]
  return done.stdout


def contents(folder):
  """Path to sha256, link target included, of everything in an environment."""
  found = {}
  for path in sorted(folder.rglob("*")):
    if path.is_symlink():
      found[path.relative_to(folder)] = os.readlink(path)
    elif path.is_file():
      found[path.relative_to(folder)] = hashlib.sha256(path.read_bytes()).hexdigest()
    else:
      found[path.relative_to(folder)] = "folder"
  return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  out = tmp_path_factory.mktemp("dist")
  command(sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", out, REPOSITORY)
  (found,) = out.glob("*.whl")
  return found


@pytest.fixture(scope="module", params=VERSIONS)
def environment(request, tmp_path_factory):
  """(MaxText version, folder of a fresh environment with what requirements.lock says, but this MaxText)."""
  folder = tmp_path_factory.mktemp("environment") / "venv"
  lock = folder.parent / "lock.txt"
  lines = (REPOSITORY / "requirements.lock").read_text()
  lock.write_text(re.sub(r"(?m)^maxtext==(.*\\\n)*.*\n", "", lines))
  uv = (sys.executable, "-m", "uv")
  command(*uv, "venv", "--quiet", "--seed", "--python", sys.executable, folder)
  install = (*uv, "pip", "install", "--quiet", "--python", folder / "bin/python", "--no-deps")
  command(*install, "--require-hashes", "-r", lock)
  command(*install, f"maxtext=={request.param}")
  return request.param, folder


def test_install_train_uninstall(environment, wheel, tmp_path):
  version, folder = environment
  python, ours = folder / "bin/python", folder / "bin/maxtext-moe-te"
  before = contents(folder)
  command(python, "-m", "pip", "install", "--quiet", "--no-index", wheel)
  installed = contents(folder)
  assert {path: installed[path] for path in before} == before, "installing changed what was there"

  said = command(ours, "demo", "--steps", "3", "--output", tmp_path / "demo")
  assert re.search(r"\b3 steps\b", said) or "step 3" in said or "completed step: 2" in said, said[-2000:]

  (source,) = folder.glob("lib/python*/site-packages/maxtext")
  train = [python, "-m", "maxtext.trainers.pre_train.train", source / "configs/base.yml", f"base_output_directory={tmp_path}", *WORDS]
  on, layer = {VARIABLE: "dropless"}, "maxtext_moe_te.host.layer."
  assert layer not in command(*train, **on)  # not asked for: nothing is loaded
  command(ours, "enable")
  said = command(*train, **on)
  assert layer in said and "completed step: 2" in said
  assert "moe_te" not in command(*train)
  command(ours, "disable")
  assert {path: kind for path, kind in contents(folder).items() if kind != "folder"} == {
    path: kind for path, kind in installed.items() if kind != "folder"
  }

  command(ours, "patch", "apply", "maxtext")
  assert f"maxtext {version}" in command(ours, "patch", "check", "maxtext")
  said = command(*train, **on)
  assert layer in said and "completed step: 2" in said
  command(ours, "patch", "revert", "maxtext")
  assert contents(folder) == installed

  command(ours, "enable")  # uninstalling takes this back too
  command(python, "-m", "pip", "uninstall", "--quiet", "--yes", "maxtext-moe-te")
  assert contents(folder) == before
  assert "moe_te" not in command(python, "-c", "pass", **on)


@pytest.mark.parametrize("environment", ["0.2.4"], indirect=True)  # 0.2.5 is what all the other tests run on
def test_layers_and_losses_of_0_2_4(environment):
  _, folder = environment
  tests = REPOSITORY / "tests/host/test_maxtext_0_2_4.py"
  said = command(folder / "bin/python", "-m", "pytest", tests, "-q", "--require-host", "--require-host_0_2_4", PYTHONPATH=str(REPOSITORY))
  assert re.search(r"\d+ passed", said) and "skipped" not in said
