"""Launcher settings as overlays: every setting is accounted for, once, with its reason."""

import pathlib

import pytest
import yaml

from maxtext_moe_te.errors import OverlayError
from maxtext_moe_te.settings import importer
from maxtext_moe_te.settings import overlay as overlays

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
KNOWN = [
  *("base_num_decoder_layers", "base_output_directory", "capacity_factor", "dcn_fsdp_parallelism", "ici_data_parallelism"),
  *("ici_expert_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism", "learning_rate", "model_name", "num_slices"),
  *("per_device_batch_size", "profiler", "quantization", "query_proj", "remat_policy", "scan_layers", "shard_optimizer_over_data"),
  *("sparse_matmul", "steps", "value_proj"),
]


def imported(text, name="launcher.yml"):
  return importer.import_texts({name: text}, KNOWN)


def account(result):
  return {change.key: (change.action, change.becomes, change.reason) for change in result.changes}


def test_every_setting_of_the_published_file_is_accounted_for_once():
  text = (FIXTURES / "deepseek3-671b-published.yml").read_text()
  content = yaml.safe_load(text)
  written = {*content, *(f"custom_remat_config.{name}" for name in content.pop("custom_remat_config"))} - {"custom_remat_config"}
  known = [*content, *(name.partition(".")[2] for name in written)]
  changes = importer.import_texts({"published.yml": text}, {*known, "num_slices"}).changes
  keys = [change.key.partition("=")[0] for change in changes if change.action != "added"]
  assert sorted(keys) == sorted(written)
  assert all(change.reason for change in changes)


@pytest.mark.parametrize(
  ("line", "key", "action", "becomes", "reason"),
  [
    ("steps: 3", "steps", "kept", "steps=3", "a MaxText key"),
    ("ici_ep: 8", "ici_ep", "renamed", "ici_expert_parallelism=8", "MaxText's name for it"),
    ("zero_one: true", "zero_one", "renamed", "shard_optimizer_over_data=true", "MaxText's name for it"),
    ("te_moe_block: true", "te_moe_block", "renamed", "moe_te.experts=te", "the plugin's layer in its place, on the same kernels"),
    ("te_moe_block: false", "te_moe_block", "dropped", "", "the plugin's layer runs either way"),
    ("te_gmm_quantization: te_no_quant", "te_gmm_quantization", "renamed", "moe_te.recipe=bf16", "precision of the expert products"),
    ("te_gmm_quantization: te_nvfp4", "te_gmm_quantization", "dropped", "", "te_nvfp4 is no recipe of the plugin; bf16 is its default"),
    ("ragged_buffer_factor: -1", "ragged_buffer_factor", "renamed", "moe_te.capacity_factor=0.0", "the worst case fits"),
    ("capacity_factor: -1", "capacity_factor=-1", "kept", "capacity_factor=-1.0", "no token is dropped; receive capacity is"),
    ("sparse_matmul: false", "sparse_matmul", "kept", "sparse_matmul=true", "MaxText's only dropless path"),
    ("pgle: true", "pgle", "renamed", "env.JAX_ENABLE_PGLE=true", "JAX's own switch; MaxText has none"),
    ("pgle: false", "pgle", "dropped", "", "off is JAX's default"),
    ("nodes: 32", "nodes", "dropped", "", "the launcher's own: the job decides it"),
    ("te_use_gmm: true", "te_use_gmm", "dropped", "", "a key of NVIDIA's fork of MaxText, whose part the plugin plays"),
    ("te_ep_overflow_check_every_n_steps: 20", "te_ep_overflow_check_every_n_steps", "dropped", "", "the plugin checks every step"),
    ("override_model_config: true", "override_model_config", "dropped", "", "an overlay may replace keys of the model YAML without it"),
    ("stepz: 3", "stepz", "dropped", "", "MaxText has no such key; the nearest is steps"),
    ("custom_remat_enabled: true", "custom_remat_enabled", "renamed", "remat_policy=custom", "MaxText's switch for placing tensors"),
    ("custom_remat_enabled: false", "custom_remat_enabled", "dropped", "", "remat_policy says it"),
    (
      "custom_remat_config: {query_proj: offload}",
      "custom_remat_config.query_proj",
      "renamed",
      "query_proj=offload",
      "MaxText has these keys at the top level",
    ),
    (
      "custom_remat_config: {query_prj: offload}",
      "custom_remat_config.query_prj",
      "dropped",
      "",
      "MaxText places no tensor of this name; the nearest is query_proj",
    ),
    ("NCCL_DEBUG: INFO", "NCCL_DEBUG", "kept", "env.NCCL_DEBUG=INFO", "an environment variable, not a MaxText key"),
    ("env_vars: {NCCL_DEBUG: INFO}", "NCCL_DEBUG", "kept", "env.NCCL_DEBUG=INFO", "an environment variable, not a MaxText key"),
    ("xla_flags: [--xla_a=1]", "xla_a", "kept", "xla_flags.xla_a=1", "set in XLA_FLAGS before JAX starts"),
    ("""xla_a: "'A,B'" """, "xla_a", "kept", "xla_flags.xla_a=A,B", "without the quotes inside the value, which would end the process"),
  ],
)
def test_rules(line, key, action, becomes, reason):
  changes = account(imported(line))
  assert changes.keys() == {key}
  assert changes[key][:2] == (action, becomes)
  assert changes[key][2].startswith(reason)


def test_of_two_lines_one_is_struck():
  same = account(imported("remat_policy: custom\ncustom_remat_enabled: true\n"))
  assert same["remat_policy"][0] == "kept" and same["custom_remat_enabled"] == ("dropped", "", "remat_policy says the same")
  other = imported("zero_one: true\nshard_optimizer_over_data: false\n")
  assert account(other)["zero_one"] == ("dropped", "", "shard_optimizer_over_data sets it again, further down")
  assert other.maxtext == {"shard_optimizer_over_data": False}


def test_expert_tensors_that_te_moe_block_could_not_name_are_not_kept():
  text = "custom_remat_config: {query_proj: device, moe_mlpwi_0: offload, mlpwo: device, moe_mlpwo: remat}\n"
  known = ["query_proj", "moe_mlpwi_0", "moe_mlpwo", "mlpwo"]
  result = importer.import_texts({"a.yml": f"te_moe_block: true\n{text}"}, known)
  assert result.maxtext == {"query_proj": "device", "moe_mlpwi_0": "remat", "mlpwo": "remat", "moe_mlpwo": "remat"}
  assert account(result)["custom_remat_config.moe_mlpwi_0=offload"] == (
    "renamed",
    "moe_mlpwi_0=remat",
    "offload would keep every routed row: the plugin's experts have a tensor of this name, te_moe_block's have none",
  )
  assert importer.import_texts({"a.yml": text}, known).maxtext["moe_mlpwi_0"] == "offload"


def test_dcn_axes_need_slices():
  result = imported("dcn_fsdp: 2\n")
  assert account(result)["num_slices"] == ("added", "num_slices=2", "the dcn axes need it, and on GPUs MaxText finds 1")
  assert "num_slices" not in account(imported("dcn_fsdp: 1\n"))


def test_job_script():
  result = imported((FIXTURES / "deepseek-small.sh").read_text(), "job.sh")
  assert result.maxtext == {
    "per_device_batch_size": 1,
    "scan_layers": True,
    "profiler": "xplane",
    "ici_data_parallelism": 1,
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 1,
    "ici_expert_parallelism": 2,
    "quantization": "te_no_quant",
    "base_num_decoder_layers": 4,
    "learning_rate": 0.001,
    "steps": 21,
  }
  assert result.moe_te == {"experts": "te", "recipe": "bf16", "capacity_factor": 0.0}
  assert result.env == {"NCCL_NVLS_ENABLE": "0"}
  assert result.xla_flags == {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS",
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_latency_hiding_scheduler": True,
  }
  changes = account(result)
  dropped = {key: reason for key, (action, _, reason) in changes.items() if action == "dropped"}
  assert dropped == {
    "LOGS": "a variable of the job script",
    "deepseek-v3-671b": "a preset of the launcher: import its YAML too, before this file",
    "--cluster": "the launcher's own: the job decides it",
    "--nodes": "the launcher's own: the job decides it",
    "--ntasks-per-node": "the launcher's own: the job decides it",
    "--tag": "the launcher's own: the job decides it",
    "pgle": "off is JAX's default",
    "override_model_config": "an overlay may replace keys of the model YAML without it",
    "base_output_directory": "${LOGS} is known only to the shell; set it yourself",
  }


def test_a_script_that_calls_maxtext_itself():
  result = imported("srun python3 -m maxtext.trainers.pre_train.train base.yml steps=5 learning_rate=1e-3\n", "job.sh")
  assert result.maxtext == {"steps": 5, "learning_rate": 0.001}


def test_of_several_files_the_later_wins():
  result = importer.import_texts({"a.yml": "steps: 1\nmodel_name: m\n", "job.sh": "x/launcher.py p --maxtext-arg steps=2\n"}, KNOWN)
  assert result.maxtext == {"steps": 2, "model_name": "m"}


def test_a_documentation_page_is_read_by_its_blocks():
  assert imported("# Title: x\n\nText.\n```yaml\nsteps: 3\n```\nMore.\n```bash\nxla_a: 1\n```\n", "page.md").maxtext == {"steps": 3}


def test_the_overlay_loads_again(tmp_path):
  result = imported((FIXTURES / "deepseek-small.sh").read_text(), "job.sh")
  file = tmp_path / "x.yml"
  file.write_text(result.text("about it"))
  overlay = overlays.load(str(file))
  assert (overlay.maxtext, overlay.moe_te, overlay.env, overlay.xla_flags) == (result.maxtext, result.moe_te, result.env, result.xla_flags)


@pytest.mark.parametrize(
  ("text", "name", "message"),
  [
    ("", "a.yml", "a.yml holds no settings; needed: KEY: VALUE lines, or a job script that calls NVIDIA's launcher or MaxText."),
    ("just words\n", "a.yml", "a.yml holds no settings"),
    ("ls\n", "a.sh", "a.sh holds no settings"),
    ("a: [1\n", "a.yml", "but got '<stream end>', line 2; needed: YAML, or a job script that ends in .sh. Fix: correct the file."),
    ("a: 1\na: 2\n", "a.yml", "a.yml sets a twice, the second time in line 2"),
    ("ragged_buffer_factor: two\n", "a.yml", "ragged_buffer_factor: two; needed: a number. Fix: correct ragged_buffer_factor in the file."),
    ("a: " + "[" * 2000, "a.yml", "a.yml is not YAML: maximum recursion depth exceeded"),
    ("env: {A: [1]}\n", "a.yml", "A: [1]; needed: text, a number, true or false. Fix: correct A in the file."),
    ("xla_flags: {xla_a: {b: 1}}\n", "a.yml", "xla_a: {'b': 1}; needed: text, a number, true or false."),
    ("custom_remat_config: 3\n", "a.yml", "custom_remat_config: 3; needed: a map from tensors to remat, device or offload."),
  ],
)
def test_mistakes(text, name, message):
  with pytest.raises(OverlayError) as caught:
    imported(text, name)
  assert message in str(caught.value)


def test_values_of_any_type_are_accounted_for():
  found = imported("xla_flags: 5\n")
  assert found.changes[0].key == "XLA_FLAGS … 5" and found.changes[0].action == "dropped"
  found = imported("te_gmm_quantization: [x]\ncustom_remat_config: {1: offload}\nsteps: 2024-01-01\nxla_flags: {--xla_gpu_a: 1}\n")
  assert [(change.key, change.action) for change in found.changes] == [
    ("te_gmm_quantization", "dropped"), ("custom_remat_config.1", "dropped"), ("steps", "kept"), ("--xla_gpu_a", "renamed"),
  ]  # fmt: skip
  assert found.maxtext == {"steps": "2024-01-01"} and found.xla_flags == {"xla_gpu_a": 1}


def test_a_variable_that_is_a_setting_in_disguise():
  """XLA_FLAGS and M_ variables are no part of an overlay's env."""
  for text in ('env: {XLA_FLAGS: "--xla_a=1", M_STEPS: "7", BB: }\n', 'XLA_FLAGS: ["--xla_a=1"]\nM_STEPS: 7\nBB: ""\n'):
    found = imported(text)
    assert (found.xla_flags, found.maxtext, found.env) == ({"xla_a": 1}, {"steps": 7}, {"BB": ""})
  found = imported("export M_STEPS=7 XLA_FLAGS=--xla_a=1\n", "job.sh")
  assert (found.xla_flags, found.maxtext, found.env) == ({"xla_a": 1}, {"steps": 7}, {})


def test_a_word_that_is_no_yaml_is_text():
  found = imported("python launcher.py --maxtext-arg model_name=@x --maxtext-arg base_output_directory=[a\n", "job.sh")
  assert found.maxtext == {"model_name": "@x", "base_output_directory": "[a"}
