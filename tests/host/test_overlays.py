"""Every overlay that ships, resolved by MaxText with its model; the table in configs/README.md names exactly these."""

import json
import pathlib
import re

import pytest

from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions
from tests.te import compile_overlays

pytestmark = pytest.mark.host

TABLE = (pathlib.Path(__file__).parents[2] / "configs" / "README.md").read_text()
NAMES = sorted(set(overlays.packaged()) - {"demo"})
WITH_MODEL = [name for name in NAMES if "model_name" in overlays.load(name).maxtext]


def resolved(name, *words):
  from maxtext.configs import pyconfig

  from maxtext_moe_te.host import configuration, patching

  overlay = overlays.load(name)
  base = pyconfig.__file__.replace("pyconfig.py", "base.yml")
  words = ["x", base, "run_name=t", "base_output_directory=unused", "log_config=false", *words]
  if "model_name" not in overlay.maxtext:
    words.append("model_name=mixtral-8x7b")
  words += ["skip_jax_distributed_system=true", "dataset_type=synthetic", "tokenizer_path=unused", "tokenizer_type=huggingface"]
  options = MoeTeOptions.from_mapping(overlay.moe_te, name)
  with patching.apply_all(configuration.config_seams(overlay, options)):
    return overlay, pyconfig.initialize(words)


@pytest.mark.parametrize("name", NAMES)
def test_maxtext_accepts_it(name):
  from maxtext_moe_te.host import checks, rules_from_config

  overlay, config = resolved(name)
  for key, value in overlay.maxtext.items():
    found = getattr(config, key)
    assert str(getattr(found, "value", getattr(found, "name", found))).lower() == str(value).lower(), key
  assert rules_from_config.refusal(config) is None
  rules_from_config.check_mesh(config, checks.axis_sizes(config))


@pytest.mark.parametrize("name", WITH_MODEL)
def test_it_names_its_gpus_and_mesh_and_has_that_mesh(name):
  overlay = overlays.load(name)
  about = overlays.packaged()[name].read_text().splitlines()[0]
  (row,) = [line for line in TABLE.splitlines() if line.startswith(f"| `{name}` |")]
  assert name.endswith("-offload-qv") or re.search(r"\d+ \w*[HB]\d+", row), "the table names the GPUs"
  gpus = int(re.search(r" on (\d+) G?[HB]\d00\b", about)[1])
  axes = {axis: int(size) for axis, size in re.findall(r"(fsdp|expert)(?: axis)? (\d+)", about)}
  assert axes.get("fsdp", 1) * axes["expert"] == gpus
  assert overlay.maxtext["ici_fsdp_parallelism"] == axes.get("fsdp", 1)
  assert overlay.maxtext["ici_expert_parallelism"] == axes["expert"]


@pytest.mark.parametrize("name", NAMES)
def test_its_flags_are_good_on_the_installed_jaxlib(name):
  overlay = overlays.load(name)
  environ = {}
  overlays.apply_environment(overlay, environ, MoeTeOptions.from_mapping(overlay.moe_te, name).xla_profile)
  assert xla_flags.check(environ.get("XLA_FLAGS", ""), xla_flags.installed_names(), environ) == []


@pytest.mark.parametrize("name", [name for name in WITH_MODEL if "recipe" not in overlays.load(name).moe_te])
def test_mxfp8_stacks_on_it(name):
  assert overlays.load(f"{name},te-moe-mxfp8").moe_te["recipe"] == "mxfp8"


@pytest.mark.parametrize("name", WITH_MODEL)
def test_the_table_says_what_was_compiled(name):
  (row,) = [line for line in TABLE.splitlines() if line.startswith(f"| `{name}` |")]
  found = json.loads(compile_overlays.RECORD.read_text())["overlays"].get(name)
  if found is None:
    assert "compiled" not in row
    return
  assert f"compiled: {found['peak_gib']} of {found['device_gib']} GiB" in row
  assert found["settings"] == compile_overlays.digest(name), f"compile it anew: python -m tests.te.compile_overlays {name}"
  assert found["gpus"] == " ".join(map(str, compile_overlays.gpus(name)))


def test_the_table_names_them_all():
  assert set(re.findall(r"^\| `([\w.-]+)` \|", TABLE, re.M)) == set(overlays.packaged())
