"""An overlay belongs to the run's own configuration; teachers, samplers and others beside it get the checks and the field `moe_te`."""

import contextlib
import logging
import os
import sys
from pathlib import Path

import pytest

from maxtext_moe_te.errors import RefusedError
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.settings.overlay import Overlay
from tests.host.conftest import RUN, reports

pytestmark = pytest.mark.host

OVERLAY = Overlay(("mine",), {"base_num_decoder_layers": 4, "num_experts": 32})
TEACHER = {"model_name": "deepseek3-671b", "load_parameters_path": "/nowhere"}
QUIET = {"log_config": False, "skip_jax_distributed_system": True, "run_name": "t", "base_output_directory": "unused"}


@pytest.fixture
def active(pyconfig, tmp_path, caplog, monkeypatch):
  """The seams in place for a run with an overlay; the path of the run's YAML, which sets what `run` says."""
  from maxtext_moe_te.host import configuration, patching, remat

  caplog.set_level(logging.INFO, "maxtext_moe_te")
  monkeypatch.setattr(sys, "argv", ["pytest"])

  @contextlib.contextmanager
  def activate(run="", options=None, overlay=OVERLAY):
    (tmp_path / "run.yml").write_text(RUN + run)
    options = options or MoeTeOptions()
    own = [lambda config: remat.check(options, config)]
    with patching.apply_all(configuration.config_seams(overlay, options, own_checks=own)):
      caplog.clear()
      yield str(tmp_path / "run.yml")

  return activate


def experts(config):
  return config.num_decoder_layers, config.num_experts


def test_a_teacher_keeps_its_own_model(pyconfig, active, caplog):
  with active() as run:
    own = pyconfig.initialize(["x", run, "model_name=deepseek3-tiny"])
    assert experts(own) == (4, 32) and own.override_model_config
    caplog.clear()
    teacher = pyconfig.initialize(["x", run], **TEACHER)
  assert experts(teacher) == (61, 256) and not teacher.override_model_config
  assert teacher.moe_te == own.moe_te
  assert reports(caplog) == ["a configuration beside the run's own (model_name=deepseek3-671b): mine not used for it"]


def test_the_same_run_again_is_still_the_runs_own(pyconfig, active, caplog):
  """Elastic restarts, compilations of several batch sizes, and a notebook that tries other settings."""
  words = ["model_name=deepseek3-tiny", "steps=3"]
  with active() as run:
    for more, kwargs in (([], {}), ([], {}), (["per_device_batch_size=2"], {}), ([], {"learning_rate": 1e-3}), (["steps=4"], {})):
      assert experts(pyconfig.initialize(["x", run, *words, *more], **kwargs)) == (4, 32)
    assert experts(pyconfig.initialize(["x", run, "model_name=deepseek3-tiny"])) == (4, 32)
    assert not [line for line in reports(caplog) if "beside" in line]
    assert experts(pyconfig.initialize(["x", run, *words, "load_parameters_path=/elsewhere"])) != (4, 32)
    assert reports(caplog)[-1].startswith("a configuration beside the run's own (load_parameters_path=/elsewhere)")
  with active() as run:  # another activation is for another run
    assert experts(pyconfig.initialize(["x", run], model_name="deepseek3-671b")) == (4, 32)


@pytest.mark.parametrize("words", [[], ["steps=7"]])
def test_distillation(pyconfig, active, words, monkeypatch):
  """As train_distill resolves them; without words the teacher's call has the student's words, and its model may be the same."""
  run = """
student_overrides: {model_name: deepseek3-671b}
teacher_overrides: {model_name: deepseek3-671b, load_parameters_path: /nowhere}
"""
  with active(run) as path:
    argv = ["x", path, *words]
    monkeypatch.setattr(sys, "argv", argv)
    own = pyconfig.initialize(argv)
    student = pyconfig.initialize(argv, **own.student_overrides)
    teacher = pyconfig.initialize(argv[:2], **own.teacher_overrides)
    again = pyconfig.initialize(argv, **own.student_overrides)
  assert [experts(config) for config in (own, student, teacher, again)] == [(4, 32), (4, 32), (61, 256), (4, 32)]
  assert student.override_model_config and not teacher.override_model_config


def test_a_teacher_that_comes_first(pyconfig, active, monkeypatch, caplog):
  """Told from the run's own by the command line, of which nothing is in it."""
  with active() as run:
    argv = ["program", run, "model_name=deepseek3-tiny", "steps=7"]
    monkeypatch.setattr(sys, "argv", [*argv, "--flag", "other=thing"])
    assert experts(pyconfig.initialize(["x", run], **TEACHER)) == (61, 256)
    assert "no word of the command line is in it" in reports(caplog)[-1]
    assert experts(pyconfig.initialize(argv)) == (4, 32)
    assert experts(pyconfig.initialize(["x", run, "model_name=deepseek3-tiny", "steps=8"])) == (4, 32)


def test_the_samplers_share_of_the_slices(pyconfig, active):
  """As setup_configs_and_devices resolves them: the run's own, the trainer's share, the sampler's."""
  share = {"num_slices": 2, "ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 1, "dcn_data_parallelism": 2}
  rl = os.path.join(os.path.dirname(pyconfig.__file__), "post_train", "rl.yml")
  base = {"model_name": "qwen3-30b-a3b", "num_trainer_slices": 2, "num_samplers_slices": 2, **QUIET}
  base.pop("log_config")
  resolve = lambda **kwargs: pyconfig.initialize_pydantic(["x", rl], config_class=pyconfig.types.RLConfig, **base, **kwargs)
  with active(overlay=Overlay(("mine",), {"num_experts": 32})):
    found = [resolve().num_experts, resolve(**share).num_experts, resolve(**{**share, "ici_tensor_parallelism": -1}).num_experts]
  assert found == [32, 32, 128]


def test_another_configuration_is_not_offloaded_and_not_permitted(pyconfig, active, caplog):
  with active(options=MoeTeOptions(offload=("query_proj",)), overlay=None) as run:
    own = pyconfig.initialize(["x", run, "model_name=mixtral-8x7b"])
    teacher = pyconfig.initialize(["x", run], model_name="deepseek3-671b")
    assert (own.remat_policy, teacher.remat_policy) == ("custom", "full")
    assert "moe_te.offload not used for it" in reports(caplog)[-1]


def test_another_that_drops_is_switched_or_refused(pyconfig, active, tmp_path):
  """What its model YAML says cannot be switched without permission."""
  drops = "sparse_matmul: false\ncapacity_factor: 1.25\n"
  (tmp_path / "models").mkdir()
  (tmp_path / "models/deepseek3-test.yml").write_text(drops + "num_experts: 4\nbase_mlp_dim: 64\nbase_moe_mlp_dim: 64\n")
  with active() as run:
    pyconfig.initialize(["x", run, "model_name=deepseek3-tiny"])
    with pytest.raises(RefusedError, match=r"^MaxText resolved num_experts=4, te_moe_block=false, sparse_matmul=false"):
      pyconfig.initialize(["x", run], model_name="deepseek3-test")
  with active(drops) as run:
    pyconfig.initialize(["x", run, "model_name=deepseek3-tiny"])
    other = pyconfig.initialize(["x", run], model_name="deepseek3-671b")
  assert (other.sparse_matmul, other.capacity_factor) == (True, -1.0)


def test_a_sampler_of_vllm_stays_on_maxtexts_own_layer(pyconfig, active, caplog):
  from types import SimpleNamespace

  from maxtext_moe_te.host import checks, layer, rules_from_config

  vllm = os.path.join(os.path.dirname(pyconfig.__file__), "inference", "vllm.yml")
  with active() as run:
    pyconfig.initialize(["x", run, "model_name=deepseek3-tiny"])
    caplog.clear()
    sampler = pyconfig.initialize(["", vllm, "log_config=False"], model_name="qwen3-30b-a3b", sparse_matmul=False, capacity_factor=2.0)
    assert experts(sampler) == (48, 128) and not sampler.sparse_matmul
  assert reports(caplog) == [
    f"a configuration beside the run's own (its YAML is {vllm}): mine not used for it",
    "attention=vllm_rpa: a sampler of vLLM, which stays on MaxText's own MoE layer",
  ]
  checks.check_config(sampler)
  for attention in rules_from_config.SAMPLERS:
    call = layer.replacing(MoeTeOptions())(lambda self, inputs, **kwargs: ("MaxText's own", inputs, kwargs))
    found = call(SimpleNamespace(config=SimpleNamespace(attention=attention)), "x", gate_inputs="g")
    assert found == ("MaxText's own", "x", {"input_ids": None, "gate_inputs": "g", "out_sharding": None})


# What MaxText itself refuses to resolve, whatever else is said.
NO_RUN = {"lora_module_path.yml": "'llama3.1' not in ", "rl_mt_jt.yml": "'mmap_eod_id' not in "}


def test_every_configuration_of_post_training(pyconfig):
  """Resolved as its trainer does, with all checks; what plain MaxText refuses is refused by the plugin too."""
  from maxtext_moe_te.host import checks, configuration, patching

  refused = {}
  for path in sorted((Path(pyconfig.__file__).parent / "post_train").glob("*.yml")):
    # The trainers of SFT, DPO and reinforcement learning use MaxText's second way, and the last a class of its own.
    rl = path.name.startswith("rl")
    resolve = "initialize_pydantic" if path.name.startswith(("rl", "sft", "dpo")) else "initialize"
    call = lambda path=path, rl=rl, resolve=resolve: getattr(pyconfig, resolve)(
      ["", str(path)],
      config_class=pyconfig.types.RLConfig if rl else pyconfig.types.MaxTextConfig,
      model_name="gemma4-26b" if "vision" in path.name else "qwen3-30b-a3b",
      **{key: value for key, value in QUIET.items() if key != "log_config" or not rl},
    )
    with patching.apply_all(configuration.config_seams(None, MoeTeOptions(), [checks.check_config])):
      try:
        assert call().moe_te["enabled"], path.name
        continue
      except ValueError as error:
        refused[path.name] = error
    with pytest.raises(ValueError) as plain:
      call()
    assert NO_RUN[path.name] in str(plain.value)
  assert refused.keys() == NO_RUN.keys()
