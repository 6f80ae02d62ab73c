"""Runs that ask for a MoE path which the plugin replaces: switched and reported, or refused where the user insists."""

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests.host.conftest import refused, reports

pytestmark = pytest.mark.host

DENSE = "num_experts: 4\nsparse_matmul: false\ncapacity_factor: 1.25\n"


def test_dropping_yaml_is_switched_and_reported(resolve, caplog):
  config = resolve(run=DENSE)
  assert (config.sparse_matmul, config.capacity_factor, config.megablox) == (True, -1.0, False)
  assert reports(caplog) == [
    "the run dropped tokens (sparse_matmul=false, capacity_factor=1.25) and no longer does: "
    "sparse_matmul=true, capacity_factor=-1.0, megablox=false"
  ]


def test_dropping_model_yaml_is_switched(resolve, caplog):
  config = resolve(model=DENSE)
  assert (config.sparse_matmul, config.capacity_factor, config.override_model_config) == (True, -1.0, True)
  assert len(reports(caplog)) == 3 and reports(caplog)[0].startswith("the run dropped tokens")


def test_an_overlay_that_makes_the_run_dropless_is_reported_too(resolve, caplog):
  assert resolve(run=DENSE, overlay="sparse_matmul: true\n").sparse_matmul
  assert reports(caplog)[0].startswith("the run dropped tokens")


def test_not_dropping_is_left_alone(resolve, caplog):
  assert resolve(run="sparse_matmul: false\n", overlay=None).sparse_matmul is False
  assert resolve(run="num_experts: 4\nsparse_matmul: false\n").sparse_matmul is False
  assert resolve(run="num_experts: 4\ncapacity_factor: 1.0\n").capacity_factor == 1.0
  assert reports(caplog) == []


def test_the_user_who_insists_on_dropping_is_refused(resolve, monkeypatch):
  end = "; needed: a dropless run on the plugin's MoE layer. Fix: remove {}, or write moe_te.enabled=false."
  words = ("num_experts=4", "sparse_matmul=false", "capacity_factor=1.25")
  assert refused(resolve, RefusedError, *words) == (
    "sparse_matmul=false on the command line and capacity_factor=1.25 on the command line together: the run drops tokens"
    + end.format("them")
  )
  text = refused(resolve, RefusedError, "capacity_factor=2.0", run="num_experts: 4\nsparse_matmul: false\n")
  assert text == "capacity_factor=2.0 on the command line drops tokens" + end.format("it")
  text = refused(resolve, RefusedError, run="num_experts: 4\ncapacity_factor: 2.0\n", sparse_matmul=False)
  assert text == "the keyword argument sparse_matmul=false drops tokens" + end.format("it")
  monkeypatch.setenv("M_SPARSE_MATMUL", "false")
  text = refused(resolve, RefusedError, run="num_experts: 4\ncapacity_factor: 2.0\n")
  assert text == "the environment variable M_SPARSE_MATMUL=false drops tokens" + end.format("it")


def test_an_overlay_that_drops_is_refused(resolve, tmp_path):
  text = refused(resolve, RefusedError, overlay=DENSE)
  assert text.startswith(f"overlay {tmp_path}/overlay.yml sets sparse_matmul=false, capacity_factor=1.25; needed:")
  assert "Fix: remove sparse_matmul, capacity_factor from the overlay" in text


UPSTREAM_TE = """
num_experts: 4
te_moe_block: true
prefuse_moe_weights: true
te_gmm_quantization: te_mxfp8
ragged_buffer_factor: 2.0
"""


def test_upstream_te_block_is_replaced_and_reported(resolve, caplog):
  config = resolve(run=UPSTREAM_TE)
  assert (config.te_moe_block, config.te_gmm_quantization, config.ragged_buffer_factor) == (False, "", -1.0)
  assert config.prefuse_moe_weights
  assert reports(caplog) == [
    "MaxText's te_moe_block replaced by the plugin (not used: te_gmm_quantization=te_mxfp8, ragged_buffer_factor=2.0)"
  ]


def test_the_user_who_insists_on_the_upstream_block_is_refused(resolve, tmp_path):
  text = refused(resolve, RefusedError, "num_experts=4", "te_moe_block=true")
  assert text.startswith("te_moe_block=true on the command line selects MaxText's own Transformer Engine MoE block; needed:")
  text = refused(resolve, RefusedError, "ragged_buffer_factor=1.5", run=UPSTREAM_TE)
  assert text.startswith("ragged_buffer_factor=1.5 on the command line selects")
  text = refused(resolve, RefusedError, overlay="te_moe_block: true\n")
  assert text.startswith(f"overlay {tmp_path}/overlay.yml sets te_moe_block=true")


def test_disabled_leaves_the_moe_keys_alone_but_loads_the_overlay(resolve, caplog):
  config = resolve(run=DENSE, overlay="steps: 3\n", options=MoeTeOptions(enabled=False))
  assert (config.sparse_matmul, config.capacity_factor, config.steps) == (False, 1.25, 3)
  assert config.moe_te["enabled"] is False
  assert reports(caplog) == []


def test_what_maxtext_resolves_is_checked_whatever_was_read(resolve, monkeypatch):
  from maxtext_moe_te.host.configuration import join

  monkeypatch.setattr(join, "_switches", lambda *args: ({}, []))
  text = refused(resolve, RefusedError, run=DENSE)
  assert text.startswith("MaxText resolved num_experts=4, te_moe_block=false, sparse_matmul=false, capacity_factor=1.25;")
