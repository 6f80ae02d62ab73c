"""The session rules: what cannot run is skipped with a reason, or fails where it is required."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.parametrize(
  ("words", "required", "status", "text"),
  [
    ([], "", 0, "1 skipped"),
    ([], "gpu", 1, "gpu tests are required and cannot run: no GPU asked for: JAX_PLATFORMS=cpu"),
    (["--require-gpu"], "", 1, "gpu tests are required and cannot run"),
  ],
)
def test_a_gpu_test_without_a_gpu(tmp_path, words, required, status, text):
  (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
  (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_gpu():\n  assert False\n")
  (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs a GPU\n")
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MOE_TE_REQUIRE": required}
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-rs", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert done.returncode == status, done.stdout + done.stderr
  assert text in done.stdout
