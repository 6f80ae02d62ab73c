"""Transformer Engine around a run of MaxText: one that is not for JAX is left out and named, one with other mesh resources is refused."""

import logging

import pytest

from maxtext_moe_te.errors import VersionError
from tests import helpers, te_stub

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def config():
  return helpers.maxtext_config("mixtral-8x7b")


@pytest.mark.parametrize(("targets", "said"), [(None, 1), (te_stub.EVERY_TARGET, 0)])
def test_one_without_a_jax_extension_is_left_out(monkeypatch, tmp_path, caplog, targets, said):
  """Such as one that was installed for PyTorch: importing its JAX part would end the run with a missing file."""
  from maxtext.utils import max_utils

  from maxtext_moe_te.host import seams

  guard = "import contextlib\nentered = []\n@contextlib.contextmanager\ndef global_shard_guard(resource):\n  entered.append(1)\n  yield\n"
  edit = {"jax.sharding": lambda text: text + guard}
  folder = te_stub.install(monkeypatch, tmp_path, "2.20.2", targets=targets, edit=edit)
  entered = []
  with caplog.at_level(logging.INFO, "maxtext_moe_te"), seams.honest_context(max_utils.transformer_engine_context)():
    if not said:
      import transformer_engine.jax.sharding

      entered = transformer_engine.jax.sharding.entered
  assert len(entered) == 1 - said
  lines = [record.getMessage() for record in caplog.records if "Transformer Engine not used" in record.getMessage()]
  assert lines == [f"Transformer Engine not used: the one in {folder} has no JAX extension (transformer_engine_jax*.so)"] * said


def test_other_mesh_resources_are_refused_with_the_configuration(monkeypatch, tmp_path, config):
  from maxtext_moe_te.host.checks import check_config

  folder = te_stub.install(
    monkeypatch, tmp_path, "main", edit={"jax.sharding": lambda text: text.replace("tpsp_resource", "sequence_resource")}
  )
  check_config(config)  # a CPU run enters no such context
  monkeypatch.setitem(config._flat_config, "hardware", "gpu")
  with pytest.raises(VersionError) as refused:
    check_config(config)
  assert str(refused.value) == (
    f"transformer-engine 2.20.0.dev0 in {folder} has jax.sharding.MeshResource without a parameter tpsp_resource; needed: what the "
    "plugin calls of it, as 2.20.2 has it. Fix: pip install 'transformer-engine[jax]==2.20.2'."
  )
