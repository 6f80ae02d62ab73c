"""The configuration seam against MaxText itself: precedence, reports, refusals, unknown keys, and the field `moe_te`."""

import copy
import logging
import pickle

import pytest

from maxtext_moe_te.errors import OptionError, RefusedError
from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings.config import MoeTeOptions

pytestmark = pytest.mark.host

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
    with patching.apply_all(seams, host_version="0.2.5"):
      caplog.clear()
      return getattr(pyconfig, function)(argv, **kwargs)

  return call


def reports(caplog):
  return [record.getMessage() for record in caplog.records if record.name == "maxtext_moe_te"]


def refused(resolve, kind, *words, **kwargs):
  with pytest.raises(kind) as caught:
    resolve(*words, **kwargs)
  return str(caught.value)


# Precedence. `steps` stands for any key; the model YAML sets it where `model` is true.
@pytest.mark.parametrize(
  ("model", "overlay", "user", "expected"),
  [
    (False, False, None, 1),  # base chain
    (True, False, None, 2),
    (False, True, None, 3),
    (True, True, None, 3),
    (False, False, "words", 4),
    (False, True, "words", 4),
    (False, True, "kwargs", 4),
    (False, True, "variables", 4),
    (False, True, "both", 4),
    (True, True, "allowed words", 4),
    (True, True, "allowed variables", 4),
  ],
)
@pytest.mark.parametrize("function", ["initialize", "initialize_pydantic"])
def test_precedence(resolve, monkeypatch, function, model, overlay, user, expected):
  words, kwargs = [], {}
  if user in ("words", "allowed words"):
    words = ["steps=4"]
  if user == "kwargs":
    kwargs = {"steps": 4}
  if user == "both":
    words, kwargs = ["steps=5"], {"steps": 4}
  if user in ("variables", "allowed variables"):
    monkeypatch.setenv("M_STEPS", "4")
  if user and user.startswith("allowed"):
    words.append("override_model_config=true")
  config = resolve(
    *words,
    run="steps: 1\n",
    model="steps: 2\n" if model else None,
    overlay="steps: 3\n" if overlay else None,
    function=function,
    **kwargs,
  )
  assert config.steps == expected


def test_without_overlay_values_are_those_of_plain_maxtext(resolve):
  plain = resolve("steps=4", plain=True).get_keys()
  ours = dict(resolve("steps=4").get_keys())
  assert ours.pop("moe_te") == MoeTeOptions().as_dict()
  assert ours == plain


def test_a_lost_key_is_reported(resolve, caplog, monkeypatch):
  resolve("steps=4", overlay="steps: 3\nper_device_batch_size: 2\n", per_device_batch_size=1)
  source = [message.split(" not used: ") for message in reports(caplog)]
  assert [ours.split(" of overlay ")[0] for ours, _ in source] == ["steps=3", "per_device_batch_size=2"]
  assert [wins for _, wins in source] == [
    "steps=4 on the command line wins",
    "the keyword argument per_device_batch_size=1 wins",
  ]
  monkeypatch.setenv("M_STEPS", "6")
  assert resolve(overlay="steps: 3\n").steps == 6
  assert reports(caplog)[0].endswith("not used: the environment variable M_STEPS=6 wins")


def test_an_equal_value_is_not_reported(resolve, caplog):
  assert resolve("steps=3", model="learning_rate: 1.e-3\n", overlay="steps: 3\nlearning_rate: 1e-3\n").steps == 3
  assert reports(caplog) == []


def test_a_replaced_model_key_is_reported_and_allowed(resolve, caplog, tmp_path):
  config = resolve(model="steps: 2\n", overlay="steps: 3\n")
  assert (config.steps, config.override_model_config) == (3, True)
  assert reports(caplog) == [f"steps=2 of {tmp_path}/models/gpt3-52k.yml replaced: steps=3"]


def test_permission_does_not_loosen_what_maxtext_asks_of_the_user(resolve, monkeypatch, tmp_path):
  model = "steps: 2\nlearning_rate: 0.1\n"
  text = refused(resolve, OptionError, "learning_rate=0.2", model=model, overlay="steps: 3\n")
  assert text == (
    f"learning_rate=0.2 on the command line differs from {tmp_path}/models/gpt3-52k.yml; "
    "needed: override_model_config=true for keys that the model YAML sets. "
    "Fix: write override_model_config=true, or remove it."
  )
  monkeypatch.setenv("M_LEARNING_RATE", "0.2")
  text = refused(resolve, OptionError, model=model, overlay="steps: 3\n")
  assert text.startswith("the environment variable M_LEARNING_RATE=0.2 differs from")
  monkeypatch.delenv("M_LEARNING_RATE")
  assert resolve("learning_rate=0.1", model=model, overlay="steps: 3\n").steps == 3


def test_the_user_may_forbid_overriding(resolve):
  text = refused(resolve, OptionError, "override_model_config=false", model="steps: 2\n", overlay="steps: 3\n")
  assert text.startswith("steps must differ from ")
  assert "override_model_config=false on the command line does not allow it" in text


def test_stock_strictness_without_overlay(resolve):
  with pytest.raises(ValueError, match="are overridden by both model config and CLI/kwargs"):
    resolve("steps=4", model="steps: 2\n")


def test_a_variable_that_maxtext_would_not_read(resolve, monkeypatch):
  monkeypatch.setenv("M_PREFUSE_MOE_WEIGHTS", "false")
  text = refused(resolve, OptionError, overlay="prefuse_moe_weights: true\n")
  assert text.startswith("M_PREFUSE_MOE_WEIGHTS is set, and MaxText does not read it because prefuse_moe_weights is in no")
  assert text.endswith("Fix: unset M_PREFUSE_MOE_WEIGHTS and write prefuse_moe_weights=false on the command line.")


def test_rules_of_the_overlay_join_those_of_the_model(resolve):
  rule = "logical_axis_rules: [['{name}', ['{axis}']]]\n"
  config = resolve(model=rule.format(name="activation_batch", axis="data"), overlay=rule.format(name="mlp", axis="fsdp"))
  rules = dict(config.logical_axis_rules)
  assert rules["activation_batch"] == ("data",) and rules["mlp"] == ("fsdp",) and len(rules) > 10


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
  from maxtext_moe_te.host import configuration

  monkeypatch.setattr(configuration, "_switches", lambda *args: {})
  text = refused(resolve, RefusedError, run=DENSE)
  assert text.startswith("MaxText resolved num_experts=4, te_moe_block=false, sparse_matmul=false, capacity_factor=1.25;")


def test_options_are_in_the_configuration(resolve, pyconfig, caplog):
  config = resolve("log_config=true", options=MoeTeOptions(router="jax"))
  assert config.moe_te == MoeTeOptions(router="jax").as_dict()
  assert type(config._pydantic_config).__name__ == "MaxTextConfig"
  assert isinstance(config._pydantic_config, pyconfig.types.MaxTextConfig)


def test_configurations_copy_and_pickle(resolve, pyconfig):
  config = resolve("steps=4", options=MoeTeOptions(router="jax"))
  for made in (
    copy.deepcopy(config),
    pickle.loads(pickle.dumps(config)),
    pyconfig.HyperParameters(pickle.loads(pickle.dumps(config._pydantic_config))),
    pyconfig.HyperParameters(config._pydantic_config.model_copy(update={"log_period": 7})),
  ):
    assert (made.steps, made.moe_te["router"]) == (4, "jax")
    assert type(made._pydantic_config) is type(config._pydantic_config)


def test_another_configuration_class_is_kept(resolve, pyconfig):
  class Mine(pyconfig.types.MaxTextConfig):
    mine: int = 3

  config = resolve(config_class=Mine)
  assert (config.mine, config.moe_te["enabled"]) == (3, True)
  assert isinstance(config._pydantic_config, Mine)
  again = resolve(config_class=type(config._pydantic_config))
  assert type(again._pydantic_config) is type(config._pydantic_config)


def test_checks_see_the_configuration_and_refuse(resolve):
  def check(config):
    raise RefusedError(found=f"steps={config.steps}", needed="b", fix="c")

  for function in ("initialize", "initialize_pydantic"):
    assert refused(resolve, RefusedError, "steps=4", checks=[check], function=function) == "steps=4; needed: b. Fix: c."


def test_undo_restores_maxtexts_own_functions(pyconfig):
  from maxtext_moe_te.host import configuration, patching

  before = pyconfig.initialize, pyconfig.initialize_pydantic
  with patching.apply_all(configuration.config_seams(None, MoeTeOptions()), host_version="0.2.5"):
    assert pyconfig.initialize is not before[0]
  assert pyconfig.initialize is before[0] and pyconfig.initialize_pydantic is before[1]
