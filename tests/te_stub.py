"""Transformer Engine as it was recorded, for tests on machines without it: its names and signatures as source, its kernels as NumPy."""

import importlib
import inspect
import json
import pathlib
import sys

import jax.numpy as jnp

from maxtext_moe_te.moe import te_api

RECORD = json.loads(pathlib.Path(__file__).with_name("te_api.json").read_text())
STATES = RECORD["states"]
EVERY_TARGET = " ".join(target for targets in te_api.TARGETS.values() for target in targets)


def write(root: pathlib.Path, state: str, *, version: str | None = None, targets: str | None = EVERY_TARGET, edit=None) -> pathlib.Path:
  """Writes the source of a state, importable, and returns the package's folder.

  Args:
    root: where site-packages would be.
    state: a key of `STATES`.
    version: that its metadata names; the state's own by default, none at all for "".
    targets: what its JAX extension registers; None for no extension.
    edit: {module: function from its text to another}, to spoil it.
  """
  package, names = root / te_api.PACKAGE, STATES[state]["names"]
  edit = edit or {}
  for module in dict.fromkeys(["", "jax", "jax.cpp_extensions", *names]):
    folder = package.joinpath(*filter(None, module.split(".")))
    text = _source(names.get(module, {}))
    if not module:
      text = f"_NCCL_EP_MIN_VERSION = {tuple(STATES[state]['nccl_floor'])}\n"
    file = folder / "__init__.py" if module in ("", "jax", "jax.cpp_extensions") else folder.with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(edit.pop(module, str)(text))
  assert not edit, f"there is no {', '.join(edit)}"
  if targets is not None:
    (package / "wheel_lib").mkdir()
    (package / "wheel_lib" / "transformer_engine_jax.so").write_text(targets)
  version = {"main": "2.20.0.dev0"}.get(state, state) if version is None else version
  if version:
    info = root / f"{te_api.PACKAGE}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
  return package


def _source(names):
  classes, lines = {}, ["import enum"]
  for name, signature in names.items():
    owner, _, member = name.rpartition(".")
    if owner:
      classes.setdefault(owner, []).append((member, signature))
    else:
      lines.append(f"def {name}{signature or '(*args)'}: return None")
  for owner, members in classes.items():
    enum = not any(signature or member.endswith("primitive") for member, signature in members)
    lines.append(f"class {owner}{'(enum.IntEnum)' if enum else ''}:")
    for place, (member, signature) in enumerate(members):
      lines += ["  @staticmethod", f"  def {member}{signature}: return None"] if signature else [f"  {member} = {place}"]
  return "\n".join(lines) + "\n"


def install(monkeypatch, root: pathlib.Path, state: str, **spoiled) -> pathlib.Path:
  """`write`, and puts it where `import transformer_engine` finds it until the test ends."""
  folder = write(root, state, **spoiled)
  # Undone in the reverse order: what a test imports of the stand-in is gone after it, what stood there before is back.
  names = {name for name in sys.modules if name.partition(".")[0] == te_api.PACKAGE}
  files = (path.relative_to(root).with_suffix("") for path in folder.rglob("*.py"))
  for name in names | {".".join(path.parts).removesuffix(".__init__") for path in files}:
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.syspath_prepend(str(root))
  importlib.invalidate_caches()
  return folder


class Primitive:
  """One that is bound: it holds what it gets to the recorded parameters, keeps it, and computes."""

  def __init__(self, abstract, compute):
    self.signature, self.compute, self.calls = inspect.signature(abstract), compute, []

  def bind(self, *arrays, **static):
    self.signature.bind(*arrays, **static)
    self.calls.append((arrays, static))
    return self.compute(*arrays, **static)


def grouped_gemm(state: str, *, hopper: bool) -> Primitive:
  """Puts a grouped GEMM into the imported stub. It wants as many scales as the state's JAX side and the GPU's kernel do."""
  module = importlib.import_module(f"{te_api.PACKAGE}.jax.cpp_extensions.gemm")
  per_group = getattr(module, "_v2_grouped_gemm_supports_per_group_alpha_beta", None)
  if per_group is not None:
    module._v2_grouped_gemm_supports_per_group_alpha_beta = lambda: not hopper
  wanted = 1 if hopper and state != "main" else None

  def compute(lhs, _, rhs, __, bias, sizes, _1, _2, _3, _4, _5, alpha, beta, *, lhs_is_trans, rhs_is_trans, out_shape, **static):
    groups = sizes.size
    assert alpha.shape == beta.shape == ((wanted or groups),), "the kernel's check of its scales"
    group = jnp.repeat(jnp.arange(groups), sizes, total_repeat_length=lhs.shape[0])
    of_group = (group[None] == jnp.arange(groups)[:, None]).astype(lhs.dtype)
    if lhs_is_trans:
      out = jnp.einsum("gr,rk,rn->gkn", of_group, lhs, rhs)
    else:
      out = jnp.einsum("gr,rk,gnk->rn" if rhs_is_trans else "gr,rk,gkn->rn", of_group, lhs, rhs)
    assert out.shape == tuple(out_shape)
    return (out,)

  module.GroupedGemmPrimitive.outer_primitive = Primitive(module.GroupedGemmPrimitive.abstract, compute)
  return module.GroupedGemmPrimitive.outer_primitive
