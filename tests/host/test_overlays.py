"""Every overlay that ships, resolved by MaxText with its model; the table in configs/README.md names exactly these."""

import pathlib
import re

import pytest

from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings.config import MoeTeOptions

pytestmark = pytest.mark.host


@pytest.mark.parametrize("name", sorted(set(overlays.packaged()) - {"demo"}))
def test_maxtext_accepts_it(name):
  from maxtext.configs import pyconfig

  from maxtext_moe_te.host import configuration, patching

  overlay = overlays.load(name)
  words = ["x", pyconfig.__file__.replace("pyconfig.py", "base.yml")]
  words += ["run_name=t", "base_output_directory=unused", "log_config=false"]
  if "model_name" not in overlay.maxtext:
    words.append("model_name=mixtral-8x7b")
  words += ["skip_jax_distributed_system=true", "dataset_type=synthetic", "tokenizer_path=unused", "tokenizer_type=sentencepiece"]
  options = MoeTeOptions.from_mapping(overlay.moe_te, name)
  seams = configuration.config_seams(overlay, options)
  with patching.apply_all(seams, host_version="0.2.5"):
    config = pyconfig.initialize(words)
  for key, value in overlay.maxtext.items():
    found = getattr(config, key)
    assert str(getattr(found, "value", getattr(found, "name", found))).lower() == str(value).lower(), key


def test_the_table_names_them_all():
  table = (pathlib.Path(__file__).parents[2] / "configs" / "README.md").read_text()
  assert set(re.findall(r"^\| `([\w.-]+)` \|", table, re.M)) == set(overlays.packaged())
