"""What the configuration seam says of words, keys, values, variables and files that are wrong."""

import pytest

from maxtext_moe_te.errors import OptionError
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
  with pytest.raises(OptionError, match=text) as caught:
    resolve(word, *(["base_moe_mlp_dim=32"] if "experts" in word else []))
  assert caught.value.__cause__ is None


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

  (tmp_path / "broken.yml").write_text("a: [1\n")
  (tmp_path / "orphan.yml").write_text("base_config: no_such_base.yml\n")
  (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\xe9")
  with patching.apply_all(configuration.config_seams(None, MoeTeOptions()), host_version="0.2.5"):
    for name, text in (
      ("nope.yml", "the run's YAML nope.yml does not exist"),
      (f"{tmp_path}/broken.yml", "MaxText's configuration cannot be read: "),
      (f"{tmp_path}/orphan.yml", "MaxText's configuration cannot be read: "),
      (f"{tmp_path}/binary.yml", "MaxText's configuration cannot be read: "),
    ):
      with pytest.raises(OptionError, match=text):
        pyconfig.initialize(["train.py", name])
