"""What a running job says of its own routing."""

import logging

import numpy as np
import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests import helpers

pytestmark = pytest.mark.host


def said(needed):
  from maxtext_moe_te.host.advice import Advice

  advice = Advice()
  return [line for line in map(advice.add, needed) if line]


def test_the_smallest_factor_that_would_have_done():
  usual = list(np.linspace(1.0, 1.3, 97))
  assert said([*usual, 1.9, 1.4, 1.6]) == [
    "in the last 100 steps a rank was sent at most 1.9 times the rows of balanced routing: moe_te.capacity_factor=1.9 would have held "
    "them, 1.4 in all but 2 steps"
  ]
  assert said([1.0] * 99) == [], "not before there are enough"
  (line,) = said([1.25] * 400)
  assert line.endswith("moe_te.capacity_factor=1.25 would have held them"), "not again while it stays so"
  first, second = said([3.0] * 100 + [1.5] * 150)
  assert "=3 would" in first and "=1.5 would" in second, "of the last steps, not of the first"


@pytest.mark.plot
def test_a_picture_of_the_load(tmp_path, caplog):
  caplog.set_level(logging.INFO, "maxtext_moe_te")
  words = ["model_name=mixtral-8x7b", "ici_expert_parallelism=4", "ici_fsdp_parallelism=2", "base_num_decoder_layers=2", "steps=3"]
  (*_, last) = helpers.train(tmp_path, words, options=MoeTeOptions(load_map=2))
  pictures = sorted(path.name for path in (tmp_path / "test" / "moe_te_load").iterdir())
  assert pictures == ["step-0000000.png", "step-0000002.png"]
  assert (tmp_path / "test" / "moe_te_load" / pictures[0]).read_bytes().startswith(b"\x89PNG")
  assert last["moe_te/load_p01"] <= last["moe_te/load_p50"] <= last["moe_te/load_p99"] <= last["moe_te/load_max_over_mean"]
  assert last["moe_te/experts_unused"] == 0 and last["moe_te/demand_over_balanced"] >= 1


def test_nothing_to_draw_with(monkeypatch):
  import sys

  from maxtext_moe_te.host import advice

  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(RefusedError, match=r"moe_te.load_map=5 without matplotlib; needed: what draws .* 'maxtext-moe-te\[plot\]'"):
    advice.advising(MoeTeOptions(load_map=5))
