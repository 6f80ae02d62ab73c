"""The configuration seam against MaxText itself: precedence, reports, and the field `moe_te`."""

import copy
import pickle

import pytest

from maxtext_moe_te.errors import OptionError, RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from tests.host.conftest import refused, reports

pytestmark = pytest.mark.host


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


def test_the_plan_is_decided_without_maxtext_and_without_the_environment(monkeypatch):
  """From what was asked for alone: the same inputs give the same plan whatever else there is."""
  from maxtext_moe_te.host.configuration import inputs, join
  from maxtext_moe_te.settings.overlay import Overlay

  asked = inputs.Inputs(
    fields={}, base={"steps": 1}, base_path="run.yml", model={"steps": 2, "num_experts": 4}, model_path="models/m.yml",
    overlay=Overlay(("o",), {"steps": 3, "log_period": 5}, sources={"maxtext.log_period": "o.yml"}), words={}, kwargs={},
    variables={"log_period": 7}, texts={"log_period": "7"},
  )  # fmt: skip
  monkeypatch.setattr(join.pyconfig, "_initialize_pydantic", None)
  monkeypatch.setenv("M_LOG_PERIOD", "9")
  monkeypatch.setenv("M_STEPS", "9")
  plan = join.plan(asked, MoeTeOptions())
  assert plan == join.Plan(
    injected={"steps": 3, "override_model_config": True},
    lost={"log_period": "the environment variable M_LOG_PERIOD=7"},
    replaced={"steps": 2},
    lines=(
      "log_period=5 of overlay o.yml not used: the environment variable M_LOG_PERIOD=7 wins",
      "steps=2 of models/m.yml replaced: steps=3",
    ),
  )


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
  with patching.apply_all(configuration.config_seams(None, MoeTeOptions())):
    assert pyconfig.initialize is not before[0]
  assert pyconfig.initialize is before[0] and pyconfig.initialize_pydantic is before[1]


@pytest.mark.parametrize(
  ("spoil", "text"),
  [
    (
      lambda original, argv, config_class, **kwargs: original(argv, config_class, **{**kwargs, "steps": 5}),
      "configuration: steps=3 became 5",
    ),
    (lambda original, argv, config_class, **kwargs: original(argv, **kwargs), "resolved does not carry the plugin's options"),
  ],
)
def test_a_maxtext_that_loses_what_is_added(resolve, pyconfig, monkeypatch, spoil, text):
  """Its text may be any, and its parameters as known: what comes out is looked at."""
  original = pyconfig.initialize

  def initialize(argv=None, config_class=None, **kwargs):
    return spoil(original, argv, config_class, **kwargs)

  monkeypatch.setattr(pyconfig, "initialize", initialize)
  assert text in refused(resolve, RefusedError, overlay="steps: 3\n")
