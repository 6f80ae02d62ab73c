"""`doctor --verify-offload` on GPUs: gradients with Q and V in host memory are those without, bit for bit."""

import importlib.util
import pathlib

import pytest

from maxtext_moe_te.tools import deep, gradients

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.host]


def test_offload_changes_no_bit():
  base = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0], "configs", "base.yml")
  options = {"offload": list(deep.OFFLOAD)}
  request = deep.Request(words=(str(base), "run_name=t"), overlay="qwen3-30b-a3b-te-h200", options=options, layers=4)
  result, findings = gradients.check(request, timeout_s=280)
  assert findings == []
  assert result["platform"] == "gpu" and result["arrays"] >= 10
  assert result["host_bytes"] == 4 * 512 * (32 + 4) * 128 * 2  # layers x tokens x (heads of Q + heads of V) x their width x bfloat16
