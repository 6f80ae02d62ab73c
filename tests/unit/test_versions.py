"""Supported versions: missing and unsupported packages are named with what would do."""

import pytest

from maxtext_moe_te import versions
from maxtext_moe_te.errors import VersionError


@pytest.fixture
def pretend(monkeypatch):
  def install(**found):
    names = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(versions, "installed", names.get)

  return install


def test_supported_versions_pass(pretend):
  pretend(maxtext="0.2.5", jax="0.12.0.1", transformer_engine_jax="2.20.2")
  assert versions.check_maxtext() == "0.2.5"
  assert versions.check("jax") == "0.12.0.1"
  assert versions.check("transformer-engine") == "2.20.2"
  assert versions.hazard("jax") is None


def test_missing_maxtext(pretend):
  pretend()
  with pytest.raises(VersionError, match=r"^maxtext is not installed; needed: maxtext>=0\.2\.4,<0\.2\.6 .*Fix: pip install 'maxtext>="):
    versions.check_maxtext()
  with pytest.raises(VersionError, match="maxtext is not installed"):
    versions.check_maxtext(accept_unknown=True)


@pytest.mark.parametrize("version", ["0.2.3", "0.2.6", "0.2.10", "0.2.6.dev1"])
def test_unsupported_maxtext(pretend, version):
  pretend(maxtext=version)
  with pytest.raises(VersionError, match=rf"^maxtext {version} is installed; needed: maxtext>=0\.2\.4,<0\.2\.6 \(the places"):
    versions.check_maxtext()
  assert versions.check_maxtext(accept_unknown=True) == version


@pytest.mark.parametrize("version,before", [("0.2.4", True), ("0.2.5", False), ("0.2.10", False), (None, False)])
def test_behaviour_that_depends_on_the_release(pretend, version, before):
  pretend(**({"maxtext": version} if version else {}))
  assert versions.maxtext_before("0.2.5") is before


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0"])
def test_jax_with_wrong_offload_gradients_is_refused(pretend, version):
  pretend(jax=version)
  with pytest.raises(VersionError, match=f"jax {version} is installed; needed: jax>=0.11.1 .*wrong gradients"):
    versions.check("jax")


def test_the_hazard_of_jax_0_11_2_is_stated(pretend):
  pretend(jax="0.11.2")
  assert "zero-element constants" in versions.hazard("jax")


def test_versions_compare_as_versions_not_text(pretend):
  pretend(jax="0.9.0")
  with pytest.raises(VersionError):
    versions.check("jax")


def test_installed_reads_metadata():
  assert versions.installed("pytest") == pytest.__version__
  assert versions.installed("no-such-distribution") is None
