"""The recorded Transformer Engine is the installed one, and its source says what its objects say."""

import subprocess
import sys

import pytest

from maxtext_moe_te.moe import te_api
from maxtext_moe_te.signatures import Package
from maxtext_moe_te.tools import described
from tests import record_te_api

pytestmark = pytest.mark.te

SHAPES = """
import sys, transformer_engine.jax, transformer_engine.jax.ep
from maxtext_moe_te.moe import te_api
from maxtext_moe_te.signatures import Package
live = Package.installed(te_api.PACKAGE)
source = Package(live.folder)
shape = lambda found: [(p.name, p.kind, p.default is p.empty) for p in found.parameters.values()] if hasattr(found, "parameters") else found
for part, calls in te_api.PARTS.items():
  for call in calls:
    if call.positional is not None:
      assert f"{live.folder.name}.{call.module}" in sys.modules, call
      assert shape(live.find(call.module, call.name)) == shape(source.find(call.module, call.name)), call
    assert not live.problem(call) and not source.problem(call), call
print("SAME")
"""


def test_the_installed_one_can_be_used_whole():
  engine = te_api.installed()
  assert engine.version == te_api.TESTED and not engine.incomplete
  assert {part: problem for part in te_api.PARTS if (problem := engine.problem(part))} == {}
  assert engine.serves_hopper and engine.borrows and engine.has_score_function("sqrtsoftplus") and engine.nccl_floor is None
  recorded = record_te_api.json.loads(record_te_api.RECORD.read_text())
  assert record_te_api.record(engine.package.folder, "")["names"] == recorded["states"][te_api.TESTED]["names"]
  assert record_te_api.capacities(engine.package.folder) == recorded["receive_capacities"]


def test_source_and_objects_agree(tmp_path):
  done = subprocess.run([sys.executable, "-c", SHAPES], env=described.environment(tmp_path), capture_output=True, text=True)
  assert done.returncode == 0 and "SAME" in done.stdout, done.stderr[-2000:]


def test_a_spoiled_copy_of_it_is_known(tmp_path):
  """The file itself, one parameter renamed."""
  folder = te_api.installed().package.folder
  for part in ("jax/cpp_extensions/gemm.py", "jax/quantize/__init__.py", "jax/quantize/scaling_modes.py"):
    target = tmp_path / te_api.PACKAGE / part
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text((folder / part).read_text().replace("rhs_axis_boundary", "rhs_boundary"))
  problem = te_api.Api(Package(tmp_path / te_api.PACKAGE), complete=False).problem("experts")
  assert problem == "has jax.cpp_extensions.gemm.GroupedGemmPrimitive.abstract without a parameter rhs_axis_boundary"
