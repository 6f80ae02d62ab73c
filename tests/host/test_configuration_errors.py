"""What the configuration seam says of words, keys, values, variables and files that are wrong."""

import os
import subprocess
import sys

import pytest
import yaml

from maxtext_moe_te.errors import OptionError, in_one_line
from maxtext_moe_te.settings.config import MoeTeOptions
from tests.host.conftest import refused

pytestmark = pytest.mark.host


def test_unknown_keys(resolve, tmp_path):
  needed = "needed: a key of MaxText's configuration. Fix: write num_experts."
  assert refused(resolve, OptionError, "num_expert=8") == f"unknown MaxText key 'num_expert' on the command line; {needed}"
  text = refused(resolve, OptionError, num_expert=8)
  assert text == f"unknown MaxText key 'num_expert' among the keyword arguments; {needed}"
  text = refused(resolve, OptionError, overlay="num_expert: 8\n")
  assert text == f"unknown MaxText key 'num_expert' in overlay {tmp_path}/overlay.yml; {needed}"
  text = refused(resolve, OptionError, run="num_expert: 8\n")
  assert text == f"unknown MaxText key 'num_expert' in {tmp_path}/run.yml or its base_config; {needed}"
  text = refused(resolve, OptionError, model="num_expert: 8\n")
  assert text == f"unknown MaxText key 'num_expert' in {tmp_path}/models/gpt3-52k.yml; {needed}"
  assert refused(resolve, OptionError, "zzzzzz=8").endswith("Fix: remove it.")


def test_nested_and_multimodal_keys_are_known(resolve):
  assert resolve("lora.lora_rank=4").lora.lora_rank == 4
  resolve("image_path=x")


@pytest.mark.parametrize(
  ("word", "text"),
  [
    ("per_device_batch_size=abc", r"per_device_batch_size=abc, which MaxText refuses; needed: .* Fix: change per_device_batch_size\."),
    ("model_name=qwen3-30b-a4b", "qwen3-30b-a4b"),
    (
      "num_experts=4",
      "a combination of values that MaxText refuses; needed: For a fully MoE model, base_mlp_dim must equal base_moe_mlp_dim. "
      r"Got base_mlp_dim=64, base_moe_mlp_dim=32\. Fix: change one of the keys named there\.",
    ),
  ],
)
def test_values_that_maxtext_refuses(resolve, word, text):
  """One line on a command line, MaxText's own error in a program."""
  words = [word, *(["base_moe_mlp_dim=32"] if "experts" in word else [])]
  with pytest.raises(OptionError, match=text) as caught, in_one_line():
    resolve(*words)
  assert caught.value.__cause__ is None
  with pytest.raises(ValueError) as plain:
    resolve(*words, plain=True)
  with pytest.raises(type(plain.value)) as ours:
    resolve(*words)
  assert str(ours.value) == str(plain.value)


def test_a_message_that_names_everything_is_cut(resolve):
  with pytest.raises(OptionError, match=r" …\. Fix: change one of the keys named there\.$") as caught, in_one_line():
    resolve("compile_topology=nope", "compile_topology_num_slices=1")
  assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
  ("variable", "value", "words", "text"),
  [
    ("M_STEPS", "abc", [], "the environment variable M_STEPS=abc; needed: a value like 150001. Fix: correct or unset M_STEPS."),
    ("M_SCAN_LAYERS", "maybe", [], "the environment variable M_SCAN_LAYERS=maybe; needed: a value like True."),
    ("M_MESH_AXES", "x", [], "needed: a variable only for text, a number, true or false. Fix: unset M_MESH_AXES"),
    ("M_STEPS", "4", ["steps=3"], "steps is set by steps=3 on the command line and by M_STEPS; needed: one of the two. Fix: unset M_"),
  ],
)
def test_variables_that_maxtext_refuses(resolve, monkeypatch, variable, value, words, text):
  monkeypatch.setenv(variable, value)
  assert text in refused(resolve, OptionError, *words)
  with pytest.raises((ValueError, TypeError)) as plain:
    resolve(*words, plain=True)
  with pytest.raises(type(plain.value)):
    resolve(*words)


def test_an_empty_model_name(resolve):
  assert refused(resolve, OptionError, "model_name=").startswith("model_name is empty; needed: a model of MaxText.")


def test_words_that_are_not_key_value(resolve):
  assert refused(resolve, OptionError, "foo") == (
    "the word 'foo' on the command line is not key=value; needed: key=value words. Fix: write foo=VALUE or remove it."
  )
  assert "Fix: make it the first word, with the ending .yml." in refused(resolve, OptionError, "other.yaml")


@pytest.mark.parametrize("word", ["moe_te.router=te", "overlay=x"])
def test_our_words_do_not_reach_maxtext(resolve, word):
  assert "Fix: start the run with maxtext-moe-te train or run." in refused(resolve, OptionError, word)


def test_missing_and_broken_files(resolve, pyconfig, tmp_path):
  from maxtext_moe_te.host import configuration, patching

  raised = {}
  (tmp_path / "broken.yml").write_text("a: [1\n")
  (tmp_path / "orphan.yml").write_text("base_config: no_such_base.yml\n")
  (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\xe9")
  with patching.apply_all(configuration.config_seams(None, MoeTeOptions())):
    for name, text in (
      ("nope.yml", "the run's YAML nope.yml does not exist"),
      (f"{tmp_path}/broken.yml", "MaxText's configuration cannot be read: "),
      (f"{tmp_path}/orphan.yml", "MaxText's configuration cannot be read: "),
      (f"{tmp_path}/binary.yml", "MaxText's configuration cannot be read: "),
    ):
      with pytest.raises(OptionError, match=text) as ours:
        pyconfig.initialize(["train.py", name])
      raised[name] = ours
  for name, ours in raised.items():
    if "binary" in name:
      continue  # MaxText's UnicodeDecodeError holds the bytes
    with pytest.raises(Exception) as plain:
      pyconfig.initialize(["train.py", name])
    kinds = (FileNotFoundError, yaml.YAMLError)
    assert [isinstance(ours.value, kind) for kind in kinds] == [isinstance(plain.value, kind) for kind in kinds]


COMMANDS = """
import sys
from maxtext_moe_te import cli
from maxtext.configs import pyconfig
base = pyconfig.__file__.replace("pyconfig.py", "base.yml")
standing = ["hardware=cpu", "skip_jax_distributed_system=true", "run_name=t", "log_config=false"]
value = ["per_device_batch_size=abc"]
both = ["model_name=deepseek3-tiny", "vocab_size=7"]
together = ["num_experts=4", "base_moe_mlp_dim=7"]
for command, words in ((["train"], value), (["train"], both), (["train"], together), (["config", "show"], value)):
  print("STATUS", cli.main([*command, base, *standing, *words]), "SAID", file=sys.stderr)
"""


def test_the_command_line_shows_each_in_one_line(tmp_path):
  """Outside of pytest, in which MaxText raises; on its own it prints five lines and ends the process."""
  done = subprocess.run(
    [sys.executable, "-c", COMMANDS], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}, cwd=tmp_path
  )
  assert done.returncode == 0, done.stderr
  said = done.stderr.split("SAID\n")[:-1]
  for text in said:
    errors = [line.partition(" error: ")[2] for line in text.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0], text
    assert text.endswith("STATUS 2 ") and "Traceback" not in text and "====" not in text, text
  assert ["Fix: change per_device_batch_size." in text for text in said] == [True, False, False, True]
  assert "Fix: write override_model_config=true, or remove it." in said[1]
