"""Supported versions: missing and unsupported packages are named with what would do."""

import re
import shutil
import subprocess
import sys

import pytest

from maxtext_moe_te import versions
from maxtext_moe_te.errors import VersionError
from maxtext_moe_te.signatures import Package


@pytest.fixture
def pretend(monkeypatch):
  def install(**found):
    names = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(versions, "installed", names.get)

  return install


def test_supported_versions_pass(pretend):
  pretend(jax="0.12.0.1", jaxlib="0.12.0.1")
  assert versions.check_jax() == "0.12.0.1"
  assert versions.jax_hazard() is None


# jaxlib, whether it is taken, whether it offloads wrongly, whether it crashes.
COMPILERS = [
  ("0.9.0", False, False, False),
  ("0.10.2", False, True, False),
  ("0.11.0", False, True, False),
  ("0.11.0.dev20260101+nv", False, True, False),
  ("0.11.1", True, False, False),
  ("0.11.1.dev20260701", True, False, False),
  ("0.11.2", True, False, True),
  ("0.11.2.dev20260822+nv26.9", True, False, True),
  ("0.11.3", True, False, False),
  ("0.12", True, False, False),
  ("0.12.0.1", True, False, False),
  ("0.12.1.dev20260822", True, False, False),
]


@pytest.mark.parametrize(("version", "taken", "offloads_wrongly", "crashes"), COMPILERS)
def test_a_compiler_is_known_by_the_release_it_leads_to(pretend, version, taken, offloads_wrongly, crashes):
  pretend(jax=version, jaxlib=version)
  assert versions.offloads_wrongly(version) == offloads_wrongly
  assert bool(versions.jax_hazard()) == crashes == ("zero-element constants" in (versions.jax_hazard() or ""))
  if taken:
    assert versions.check_jax() == version
  else:
    needed = r"0\.11\.1 or newer \(0\.10\.2 and 0\.11\.0 give wrong gradients .*Fix: pip install 'jax"
    with pytest.raises(VersionError, match=rf"^jaxlib {re.escape(version)} is installed; needed: {needed}"):
      versions.check_jax()


@pytest.mark.parametrize(("jaxlib", "found"), [(None, "no jaxlib, or one that does not say its version"), ("x", "jaxlib x is installed")])
def test_a_compiler_that_cannot_be_judged_is_refused(pretend, jaxlib, found):
  pretend(jax="0.12.0", jaxlib=jaxlib)
  with pytest.raises(VersionError, match=f"^{found}; needed: "):
    versions.check_jax()


def test_jax_from_git_is_judged_by_what_it_has(pretend, tmp_path):
  """Its version, which names no release, decides nothing."""
  pretend(jax="0.12.1.dev20260822+gabcdef", jaxlib="0.12.1.dev20260822")
  for call in versions.JAX_CALLS:
    file = tmp_path / "jax" / f"{call.module.replace('.', '/') or '__init__'}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    owner, _, member = call.name.rpartition(".")
    parameters = ", ".join((*(call.positional or ()), *(f"{name}=None" for name in call.named)))
    text = f"class {owner}:\n  {member} = 1\n" if owner else f"def {call.name}({parameters}): pass\n"
    file.write_text((file.read_text() if file.exists() else "") + text)
  jax = Package(tmp_path / "jax")
  assert versions.check_jax(jax) == "0.12.1.dev20260822+gabcdef"
  file = tmp_path / "other" / "jax" / "__init__.py"
  shutil.copytree(tmp_path / "jax", file.parent)
  file.write_text(file.read_text().replace("check_vma", "check_rep"))
  with pytest.raises(VersionError) as refused:
    versions.check_jax(Package(file.parent))
  assert str(refused.value) == (
    f"jax 0.12.1.dev20260822+gabcdef in {file.parent} has shard_map without a parameter check_vma; needed: what the plugin calls of JAX "
    "0.11.1 to 0.12. Fix: pip install 'jax[cuda13]>=0.12'."
  )


def test_no_jax(monkeypatch):
  monkeypatch.setattr(versions.Package, "installed", lambda name: None)
  with pytest.raises(VersionError, match=r"^jax is not installed; needed: jax 0\.11\.1 or newer\. Fix: pip install"):
    versions.check_jax()


def test_the_source_of_the_installed_jax_is_taken():
  """Not only the imported one: the doctor judges it without importing it."""
  imported = Package.installed("jax")
  assert versions.check_jax(Package(imported.folder)) == versions.check_jax(imported)


def test_jax_says_its_version_itself(tmp_path, monkeypatch):
  """Without metadata, or with that of another copy: imported or not."""
  for name in ("jax", "jaxlib"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / name / "version.py").write_text("_release_version = None\n__version__ = '0.13.0.dev' + '20261001'\n")
    info = tmp_path / f"{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
  code = (
    f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from maxtext_moe_te import versions\n"
    "print(versions.installed('jax'), versions.installed('jaxlib'), 'jax' in sys.modules)\n"
    "import types; sys.modules['jax'] = types.SimpleNamespace(__version__='0.14'); print(versions.installed('jax'))"
  )
  printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
  assert printed == ["0.13.0.dev20261001", "0.13.0.dev20261001", "False", "0.14"]


def test_installed_reads_metadata():
  assert versions.installed("pytest") == pytest.__version__
  assert versions.installed("no-such-distribution") is None
