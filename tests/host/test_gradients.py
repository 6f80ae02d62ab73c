"""The check of `doctor --verify-offload`, on CPUs: there both programs are the same, so that what it computes is what is tested."""

import pytest

from maxtext_moe_te.tools import deep, gradients
from tests import helpers

pytestmark = pytest.mark.host


def test_two_steps_of_a_reduced_model(monkeypatch, tmp_path):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  words = tuple(helpers.tiny_run(tmp_path, ["model_name=mixtral-8x7b", "attention=cudnn_flash_te"]))
  result, findings = gradients.check(deep.Request(words=words, options={"offload": ["query_proj"]}, layers=2))
  assert findings == []
  assert result["platform"] == "cpu" and result["attention"] == "dot_product" and result["names"] == ["query_proj"]
  assert result["arrays"] >= 10
  assert len(result["losses"][0]) == gradients.STEPS and result["losses"][0] == result["losses"][1]


def test_a_reduced_run_that_is_refused(monkeypatch, tmp_path):
  """Plain attention, which is all that a CPU has, names no context."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  words = tuple(helpers.tiny_run(tmp_path, ["model_name=mixtral-8x7b"]))
  result, (finding,) = gradients.check(deep.Request(words=words, options={"offload": ["context"]}, layers=2))
  assert result is None
  assert finding.severity == "warning"
  assert finding.found.startswith("gradients with offload were not compared: moe_te.offload with context")
