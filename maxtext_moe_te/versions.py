"""Supported versions of the packages the plugin meets, each floor with its reason.

One table, used by the code, the tests and the documentation. Imports none of the packages: versions come from installed
metadata.
"""

import importlib.metadata
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from maxtext_moe_te.errors import VersionError

MAXTEXT = ">=0.2.4,<0.2.6"  # the seams are written against, and fingerprinted on, the source of these two releases
JAX = ">=0.11.1"  # 0.10.2 and 0.11.0 give wrong gradients when tensors are offloaded to the host under a scan
TRANSFORMER_ENGINE = "==2.20.*"  # the grouped GEMM and NCCL EP entry points are called by the signatures of this series


@dataclass(frozen=True, kw_only=True)
class Supported:
  """What is supported of one package.

  Args:
    distributions: names under which it may be installed, the preferred one first.
    versions: a PEP 440 specifier.
    reason: why not another version.
    hazards: versions inside the range that work only with care, and what goes wrong with them.
  """

  distributions: tuple[str, ...]
  versions: str
  reason: str
  hazards: dict[str, str]


SUPPORTED = {
  "maxtext": Supported(
    distributions=("maxtext",),
    versions=MAXTEXT,
    reason="the places the plugin replaces are checked against the source of 0.2.4 and 0.2.5",
    hazards={},
  ),
  "jax": Supported(
    distributions=("jax",),
    versions=JAX,
    reason="0.10.2 and 0.11.0 give wrong gradients when tensors are offloaded to the host under a scan",
    hazards={"0.11.2": "its compiler crashes on zero-element constants made in a shard_map in a scan under grad"},
  ),
  "transformer-engine": Supported(
    distributions=("transformer-engine", "transformer-engine-jax"),
    versions=TRANSFORMER_ENGINE,
    reason="its grouped GEMM and NCCL EP functions are called by the signatures of this series",
    hazards={},
  ),
}


def installed(name: str) -> str | None:
  """The installed version of a distribution, or None."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def check(name: str) -> str:
  """Checks one package of the table.

  Args:
    name: a key of `SUPPORTED`.

  Returns:
    str: the installed version.

  Raises:
    VersionError: it is missing or its version is not supported.
  """
  supported = SUPPORTED[name]
  found = next((version for version in map(installed, supported.distributions) if version), None)
  needed = f"{name}{supported.versions} ({supported.reason})"
  install = f"pip install '{name}{supported.versions}'"
  if found is None:
    raise VersionError(found=f"{name} is not installed", needed=needed, fix=install)
  if not SpecifierSet(supported.versions).contains(Version(found), prereleases=True):
    raise VersionError(found=f"{name} {found} is installed", needed=needed, fix=install)
  return found


def check_maxtext(*, accept_unknown: bool = False) -> str:
  """The installed MaxText version.

  Args:
    accept_unknown: take an unsupported version (option `unknown_host`); a missing MaxText is an error all the same.

  Raises:
    VersionError: it is missing or its version is not supported.
  """
  found = installed("maxtext")
  return found if accept_unknown and found else check("maxtext")


def maxtext_before(version: str) -> bool:
  """Whether the installed MaxText is older than a release."""
  found = installed("maxtext")
  return found is not None and Version(found) < Version(version)


def hazard(name: str) -> str | None:
  """What goes wrong with the installed, supported version of a package, or None."""
  return SUPPORTED[name].hazards.get(check(name))
