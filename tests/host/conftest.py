"""MaxText's configuration with the seam in place, for the tests of `host.configuration`."""

import logging

import pytest

from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings.config import MoeTeOptions

# What a run needs to resolve without files or network. Its model YAML, looked up beside the run's, is the test's own.
RUN = """
base_config: base.yml
run_name: t
base_output_directory: /tmp/maxtext_moe_te_tests
log_config: false
hardware: cpu
base_mlp_dim: 64
base_moe_mlp_dim: 64
dataset_type: synthetic
enable_checkpointing: false
"""


@pytest.fixture(scope="module")
def pyconfig():
  from maxtext.configs import pyconfig

  return pyconfig


@pytest.fixture
def resolve(pyconfig, tmp_path, caplog, monkeypatch):
  """Resolves a configuration with the seam in place; `run`, `model` and `overlay` are the texts of the YAML files."""
  from maxtext_moe_te.host import configuration, patching

  caplog.set_level(logging.INFO, "maxtext_moe_te")
  monkeypatch.delenv("M_STEPS", raising=False)

  def call(*words, run="", model=None, overlay=None, options=None, function="initialize", checks=(), plain=False, **kwargs):
    (tmp_path / "run.yml").write_text(RUN + run + ("model_name: gpt3-52k\n" if model is not None else ""))
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "gpt3-52k.yml").write_text(model or "")
    loaded = None
    if overlay is not None:
      (tmp_path / "overlay.yml").write_text(overlay)
      loaded = overlays.load(str(tmp_path / "overlay.yml"))
    argv = ["train.py", str(tmp_path / "run.yml"), *words]
    if plain:
      return getattr(pyconfig, function)(argv, **kwargs)
    seams = configuration.config_seams(loaded, options or MoeTeOptions(), checks)
    with patching.apply_all(seams):
      caplog.clear()
      return getattr(pyconfig, function)(argv, **kwargs)

  return call


def reports(caplog):
  return [record.getMessage() for record in caplog.records if record.name == "maxtext_moe_te"]


def refused(resolve, kind, *words, **kwargs):
  with pytest.raises(kind) as caught:
    resolve(*words, **kwargs)
  return str(caught.value)
