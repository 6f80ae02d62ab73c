"""What must be light is light, measured in fresh interpreters; and imports run downwards, read from the source."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import maxtext_moe_te
from maxtext_moe_te import cli

HEAVY = ("jax", "jaxlib", "maxtext", "transformer_engine", "numpy")


def heavy_modules_after(code):
  probe = f"{code}\nimport sys; print('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
  done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
  return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
  "module",
  [
    "maxtext_moe_te",
    "maxtext_moe_te.errors",
    "maxtext_moe_te.signatures",
    "maxtext_moe_te.versions",
    "maxtext_moe_te.cli",
    "maxtext_moe_te.session",
    "maxtext_moe_te.train",
    "maxtext_moe_te.settings.config",
    "maxtext_moe_te.settings.overlay",
    "maxtext_moe_te.settings.xla_flags",
    "maxtext_moe_te.settings.importer",
    "maxtext_moe_te.settings.words",
    "maxtext_moe_te.settings.variable",
    "maxtext_moe_te.settings.rank",
    "maxtext_moe_te.settings.entries",
    "maxtext_moe_te.tools.config",
    "maxtext_moe_te.moe.te_api",
    "maxtext_moe_te.host.patching",
    "maxtext_moe_te.tools.deep",
    "maxtext_moe_te.tools.described",
    "maxtext_moe_te.tools.doctor",
    "maxtext_moe_te.tools.doctor.probes",
    "maxtext_moe_te.tools.streams",
    "maxtext_moe_te.tools.patches",
    "maxtext_moe_te.tools.enable",
    "maxtext_moe_te.hook",
  ],
)
def test_import_is_light(module):
  assert heavy_modules_after(f"import {module}") == []


def test_the_check_sees_a_heavy_module():
  assert "jax" in heavy_modules_after("import sys, types; sys.modules['jax'] = types.ModuleType('jax')")


ROOT = Path(maxtext_moe_te.__file__).parent
# From the bottom up; what stands in one row does not import the others of it. A folder is one place.
FLOORS = (
  {"errors"},
  {"signatures"},
  {"versions", "settings"},
  {"moe"},
  {"host"},
  {"session"},
  {"hook", "__init__"},  # the package itself, whose `activate` is the session's
  {"tools"},
  {"cli"},
  {"train", "__main__"},
)
FLOOR = {place: number for number, places in enumerate(FLOORS) for place in places}


def imports(path, files):
  """The files of ours that one file imports, wherever in it."""
  package = [*path.relative_to(ROOT.parent).parent.parts]
  for node in ast.walk(ast.parse(path.read_text())):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = [*package[: len(package) + 1 - node.level], *filter(None, [node.module])] if node.level else [node.module]
      names = [".".join([*base, alias.name]) for alias in node.names]
    for name in names:
      found = files.get(name) or files.get(name.rpartition(".")[0])
      if found and found != path:
        yield found


def graph(root=ROOT):
  """File to the files it imports."""
  files = {}
  for path in root.rglob("*.py"):
    files[".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")] = path
  return {path: set(imports(path, files)) for path in files.values()}


def test_no_circle_of_imports():
  try:
    graphlib.TopologicalSorter(graph()).prepare()
  except graphlib.CycleError as error:
    pytest.fail(" -> ".join(str(path.relative_to(ROOT)) for path in reversed(error.args[1])))


def test_imports_run_downwards():
  place = lambda path: path.relative_to(ROOT).with_suffix("").parts[0]
  arrows = {(place(path), place(other)) for path, others in graph().items() for other in others}
  assert {a for arrow in arrows for a in arrow} == FLOOR.keys(), "every file is on a floor"
  assert sorted((a, b) for a, b in arrows if a != b and FLOOR[a] <= FLOOR[b]) == []
  assert [a for a, b in arrows if b == "hook"] == [], "only the .pth file and the patched MaxText import it"


def test_what_the_table_of_commands_names_exists():
  """The command line's own imports are by name, which reading the source does not see."""
  for target, _ in cli.TOOLS.values():
    assert importlib.util.find_spec(f"maxtext_moe_te.tools.{target.split()[0]}"), target
