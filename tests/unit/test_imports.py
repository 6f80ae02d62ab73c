"""What must be light is light: measured in fresh interpreters."""

import subprocess
import sys

import pytest

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
    "maxtext_moe_te.train",
    "maxtext_moe_te.settings.config",
    "maxtext_moe_te.settings.overlay",
    "maxtext_moe_te.settings.xla_flags",
    "maxtext_moe_te.settings.importer",
    "maxtext_moe_te.settings.words",
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
