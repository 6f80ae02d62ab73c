"""`maxtext-moe-te config`: the published settings imported, resolved by MaxText, and held to a golden file."""

import json
import os
import pathlib

import pytest

from maxtext_moe_te import cli

pytestmark = pytest.mark.host

TESTS = pathlib.Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "config-show-published.txt"  # UPDATE_GOLDEN=1 writes it anew
PUBLISHED = TESTS / "fixtures" / "deepseek3-671b-published.yml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("XLA_FLAGS", raising=False)  # the tests' own eight devices
  monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))  # the command sets it


@pytest.fixture
def run(capsys):
  def config(*words, status=0):
    assert cli.main(["config", *map(str, words)]) == status
    return capsys.readouterr()

  return config


def test_the_published_settings_come_out_as_the_golden_file_says(run, monkeypatch):
  monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)  # it is shown
  account = run("import", PUBLISHED, "--output", "published.yml").err
  assert "42 kept, 19 renamed, 5 dropped, 1 added" in account
  shown = run("show", "overlay=./published.yml").out
  if os.environ.get("UPDATE_GOLDEN"):
    GOLDEN.write_text(shown)
  assert shown == GOLDEN.read_text()


def test_import_writes_yaml_to_standard_output_or_json(run):
  overlay = run("import", PUBLISHED).out
  assert overlay.startswith("about: 'imported from deepseek3-671b-published.yml: 128 GPUs, fsdp 16 x expert 8'\nmodel_name: ")
  answer = json.loads(run("import", PUBLISHED, "--json").out)
  assert answer["overlay"] == overlay
  assert {"key": "nodes", "action": "dropped", "becomes": "", "reason": "the launcher's own: the job decides it"} in answer["changes"]


def test_show_names_every_source(run, monkeypatch, tmp_path):
  (tmp_path / "my.yml").write_text("base_config: base.yml\nsteps: 9\nlog_period: 5\nte_moe_block: true\n")
  (tmp_path / "my-overlay.yml").write_text(
    "sparse_matmul: true\nmoe_te: {experts: ragged_dot}\nxla_flags: {xla_gpu_autotune_level: 0}\nenv: {A: 1}\n"
  )
  monkeypatch.setenv("M_LOG_PERIOD", "7")
  monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_as_text")
  words = ["my.yml", "model_name=deepseek3-tiny", "overlay=./my-overlay.yml", "moe_te.xla_profile=published", "learning_rate=1e-3"]
  found = json.loads(run("show", *words, "--json", "--all").out)
  source = {key: value["source"] for key, value in found["maxtext"].items()}
  assert found["joined"] == ["MaxText's te_moe_block replaced by the plugin"]
  assert {key: source[key] for key in ("steps", "log_period", "learning_rate", "sparse_matmul", "num_experts", "adam_b1")} == {
    "steps": "my.yml",
    "log_period": "M_LOG_PERIOD",
    "learning_rate": "the command line",
    "sparse_matmul": "overlay my-overlay.yml",
    "num_experts": "models/deepseek3-tiny.yml",
    "adam_b1": "base.yml",
  }
  assert found["maxtext"]["log_period"]["value"] == 7
  assert found["maxtext"]["te_moe_block"] == {"value": False, "source": "maxtext-moe-te"}
  assert {"MaxText's default", "MaxText derives it"} < set(source.values())
  assert found["moe_te"]["experts"] == {"value": "ragged_dot", "source": "overlay my-overlay.yml"}
  assert found["moe_te"]["router"]["source"] == "default"
  assert found["env"] == {"A": {"value": "1", "source": "overlay my-overlay.yml"}}
  flags = found["xla_flags"]
  assert flags["xla_dump_hlo_as_text"] == {"value": "true", "source": "XLA_FLAGS"}
  assert flags["xla_gpu_autotune_level"] == {"value": "0", "source": "overlay my-overlay.yml"}
  assert flags["xla_gpu_memory_limit_slop_factor"] == {"value": "99", "source": "profile published"}
  assert found["findings"] == []


def test_show_says_what_is_wrong_with_the_flags(run, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_no_such_flag=1")
  shown = run("show", "model_name=mixtral-8x7b", "tokenizer_path=unused", "tokenizer_type=sentencepiece", "overlay=te-moe-bf16").out
  assert ["dtype", "bfloat16", "overlay", "te-moe-bf16"] in [line.split() for line in shown.splitlines()]
  assert shown.splitlines()[-1].startswith("! jaxlib ") and "has no flag --xla_gpu_no_such_flag" in shown.splitlines()[-1]


def test_diff(run, monkeypatch):
  words = ["model_name=deepseek3-tiny", "steps=3"]
  monkeypatch.setenv("MAXTEXT_MOE_TE_OVERLAY", "te-moe-bf16")  # - is none all the same
  assert {line.split()[0] for line in run("diff", "-", "te-moe-bf16", *words).out.splitlines()} >= {"-", "moe_te.experts"}
  differences = json.loads(run("diff", "-", "te-moe-bf16", *words, "--json").out)
  assert {key for key in differences if "." in key} == {"moe_te.experts", "env.XLA_PYTHON_CLIENT_MEM_FRACTION"}
  assert differences["moe_te.experts"]["b"] == {"value": "te", "source": "overlay te-moe-bf16"}
  assert run("diff", "te-moe-bf16", "te-moe-bf16", *words).out == "no difference\n"
  assert "XLA_FLAGS" not in os.environ  # MaxText sets it


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["import", "nope.yml"], "nope.yml cannot be read: "),
    (["import", PUBLISHED, "--output", "x.txt"], "Fix: write x.txt.yml."),
    (["import", "mine.yml", "--output", "./mine.yml"], "--output ./mine.yml is the file to import; needed: another file."),
    (["import", "mine.yml", "--output", ""], "Fix: write mine.yml."),
    (["import", PUBLISHED, "--output", "no/x.yml"], "no/x.yml cannot be written: "),
    (["show", "stepz=3"], "unknown MaxText key 'stepz' on the command line"),
    (["show", "overlay=nope"], "no overlay is called nope"),
    (["show", "moe_te.xla_profile=nope"], "names the profile nope"),
  ],
)
def test_mistakes(run, words, message):
  pathlib.Path("mine.yml").write_text("steps: 2\n")
  err = run(*words, status=2).err
  assert message in err and "Traceback" not in err
  assert [path.name for path in pathlib.Path().iterdir()] == ["mine.yml"] and pathlib.Path("mine.yml").read_text() == "steps: 2\n"


def test_what_import_writes_can_be_read_back(run):
  pathlib.Path("a.yml").write_text("steps: 2\nxla_flags: {xla_gpu_a: a b}\n")
  err = run("import", "a.yml", "--output", "b.yml", status=2).err
  assert "XLA flag 'xla_gpu_a': 'a b' in what a.yml would become; needed: a name without dashes and a value without spaces" in err
  assert not pathlib.Path("b.yml").exists()
