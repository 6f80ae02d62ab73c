"""Which JAX the plugin works with, and why not another. MaxText is judged in `host`, Transformer Engine in `moe.te_api`.

JAX is judged by what it has: the functions the plugin calls by their signatures, and the compiler by the version that jaxlib itself
names, metadata or not. A build from git counts as the release it leads to. Imports no package.
"""

import importlib.metadata
import importlib.util
import sys

from packaging.version import InvalidVersion, Version

from maxtext_moe_te.errors import VersionError
from maxtext_moe_te.signatures import Call, Package

# By what the compiler does, so of jaxlib. Releases and the builds that lead to them: 0.11.0.dev20260101+nv is a 0.11.0.
JAX_FLOOR = "0.11.1"
# Tensors offloaded under a scan are read back in the order they were written, not reversed: the gradients are wrong and nothing
# says so. https://github.com/openxla/xla/pull/46231, repaired by https://github.com/openxla/xla/pull/46308.
WRONG_OFFLOAD = ("0.10.2", "0.11.0")
JAX_REASON = "0.10.2 and 0.11.0 give wrong gradients when tensors are offloaded to the host under a scan"
JAX_HAZARDS = {"0.11.2": "its compiler crashes on zero-element constants made in a shard_map in a scan under grad"}

# What of JAX is younger than the floor or has changed its parameters before.
JAX_CALLS = (
  Call("", "shard_map", ("f",), ("mesh", "in_specs", "out_specs", "check_vma")),
  Call("", "set_mesh", ("mesh",)),
  Call("sharding", "AxisType.Auto"),
  Call("ad_checkpoint", "checkpoint_name", ("x", "name")),
  Call("lax", "all_gather", ("x", "axis_name"), ("tiled",)),
  Call("lax", "psum_scatter", ("x", "axis_name"), ("tiled",)),
  Call("lax", "ragged_dot", ("lhs", "rhs", "group_sizes"), ("preferred_element_type",)),
  Call("experimental.multihost_utils", "sync_global_devices", ("name",)),
  Call("_src.distributed", "global_state"),  # its client is the only way to the coordinator's key-value store
  Call("_src.distributed", "State.client"),
)


def installed(name: str) -> str | None:
  """The installed version of a distribution, or None. For jax and jaxlib what their own source says, with metadata or without."""
  if name in ("jax", "jaxlib"):
    return _own_version(name)
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _own_version(name):
  """`__version__` of jax or jaxlib; read from the package's version.py, which needs nothing else, where it is not imported."""
  if name in sys.modules and hasattr(sys.modules[name], "__version__"):
    return sys.modules[name].__version__
  package = Package.installed(name)
  file = package.folder / "version.py" if package else None
  if file is None or not file.is_file():
    return None
  spec = importlib.util.spec_from_file_location(f"_version_of_{name}", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.__version__


def check_jax(jax: Package | None = None) -> str:
  """Whether JAX has what the plugin calls, and a compiler that is right.

  Args:
    jax: the package; None for the installed one.

  Returns:
    str: JAX's version.

  Raises:
    VersionError: it is missing, a function is or takes other parameters, or jaxlib is too old.
  """
  jax = jax or Package.installed("jax")
  install = "pip install 'jax[cuda13]>=0.12'"
  if jax is None:
    raise VersionError(found="jax is not installed", needed=f"jax {JAX_FLOOR} or newer", fix=install)
  version, compiler = installed("jax"), installed("jaxlib")
  for call in JAX_CALLS:
    problem = jax.problem(call)
    if problem:
      raise VersionError(
        found=f"jax {version} in {jax.folder} {problem}", needed="what the plugin calls of JAX 0.11.1 to 0.12", fix=install
      )
  problem = jaxlib_problem(compiler)
  if problem:
    raise VersionError(found=problem, needed=f"{JAX_FLOOR} or newer ({JAX_REASON})", fix=install)
  return version


def jaxlib_problem(version: str | None) -> str:
  """What is against the compiler of a jaxlib, or nothing."""
  if version is None:
    return "no jaxlib, or one that does not say its version"
  return f"jaxlib {version} is installed" if release(version) < release(JAX_FLOOR) else ""


def release(version: str) -> tuple[int, ...]:
  """(0, 11, 0) of 0.11.0.dev20260101+nv, and of 0.11.0.1: what a compiler's faults go by; of what is no version (), older than any."""
  try:
    return (*Version(version).release, 0, 0)[:3]
  except InvalidVersion:
    return ()


def jax_hazard(version: str | None = None) -> str | None:
  """What goes wrong only with care taken not to meet it, or None.

  Args:
    version: of jaxlib; None for the installed one.
  """
  version = version or installed("jaxlib")
  return JAX_HAZARDS.get(".".join(map(str, release(version)))) if version else None


def offloads_wrongly(version: str) -> bool:
  """Whether a compiler of this version reads tensors that were offloaded under a scan back in the wrong order."""
  return release(version) in map(release, WRONG_OFFLOAD)
