"""The patches on MaxText's own source: applied, run with the unchanged command, reverted to identical bytes."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from maxtext_moe_te import cli
from maxtext_moe_te.settings.variable import VARIABLE
from maxtext_moe_te.tools import patches
from tests import helpers

pytestmark = pytest.mark.host

REPOSITORY = pathlib.Path(__file__).parents[2]
SMALL = dict(
  run_name="t",
  enable_checkpointing=False,
  hardware="cpu",
  skip_jax_distributed_system=True,
  log_config=False,
  enable_tensorboard=False,
  dataset_type="synthetic",
  dtype="float32",
  weight_dtype="float32",
  matmul_precision="highest",
  base_emb_dim=32,
  base_mlp_dim=32,
  base_moe_mlp_dim=32,
  base_num_query_heads=2,
  base_num_kv_heads=2,
  head_dim=16,
  base_num_decoder_layers=1,
  num_experts=4,
  num_experts_per_tok=2,
  vocab_size=128,
  max_target_length=16,
  per_device_batch_size=2,
  steps=3,
  opt_type="sgd",
  learning_rate=0.03,
  attention="dot_product",
  megablox=False,
  sparse_matmul=True,
  override_model_config=True,
  model_name="mixtral-8x7b",
)
WORDS = [f"{key}={value}" for key, value in SMALL.items()]


def bytes_of(folder):
  return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(params=["site-packages", "git"])
def root(request, tmp_path):
  """A copy of the installed MaxText in either layout; the folder to give to --root."""
  installed = pathlib.Path(importlib.util.find_spec("maxtext").submodule_search_locations[0])
  place = tmp_path / ("src" if request.param == "git" else "")
  shutil.copytree(installed, place / "maxtext", ignore=shutil.ignore_patterns("__pycache__", "assets"))
  return tmp_path


def test_applied_and_reverted(root):
  before = bytes_of(root)
  assert cli.main(["patch", "apply", "maxtext", "--root", str(root)]) == 0
  assert bytes_of(root) != before
  assert cli.main(["patch", "revert", "maxtext", "--root", str(root)]) == 0
  assert bytes_of(root) == before


def test_git_comes_to_the_same(root):
  (series,) = (s for s in patches.load() if (s.package, s.version) == ("maxtext", importlib.metadata.version("maxtext")))
  source = patches.find("maxtext", str(root))
  subprocess.run(["git", "init", "-q", root], check=True)
  for patch in series.patches:
    strip = "-p1" if source.name == "src" else "-p2"
    subprocess.run(["git", "apply", strip, patches.folder() / patch.file], cwd=root, check=True)
  assert patches.inspect((series,), "maxtext", source).state == patches.APPLIED


def run(source, output, *words, variable=None, status=0):
  """(metrics of each step, standard error) of three steps of a small model with MaxText's own command, from this source."""
  path = os.pathsep.join([str(source), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
  environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XLA_FLAGS": ""}
  environment |= {VARIABLE: variable} if variable else {}
  metrics = output / "metrics.jsonl"
  metrics.unlink(missing_ok=True)
  command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", source / "maxtext/configs/base.yml"]
  command += [f"base_output_directory={output}", f"metrics_file={metrics}", *WORDS, *words]
  done = subprocess.run(command, env=environment, cwd=output, capture_output=True, text=True)
  assert done.returncode == status, done.stderr[-3000:]
  lines = metrics.read_text().splitlines() if metrics.is_file() else []
  return [json.loads(line) for line in lines], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("root", ["git"], indirect=True)
def test_the_unchanged_command_in_a_patched_tree(root, tmp_path_factory):
  """Off, it is MaxText to the bit; on, the plugin's layer runs, takes its words and refuses as its own command does."""
  source, output, before = root / "src", tmp_path_factory.mktemp("output"), bytes_of(root)
  plain, said = run(source, output)
  assert "moe_te" not in said
  assert cli.main(["patch", "apply", "maxtext", "--root", str(root)]) == 0
  off, said = run(source, output)
  losses = lambda metrics: [step["learning/loss"] for step in metrics]
  assert losses(off) == losses(plain) and len(off) == 3 and "moe_te" not in said
  on, said = run(source, output, "moe_te.experts=reference", variable="dropless")
  helpers.assert_same_losses(on, plain)
  assert f"moe_te: overlay dropless, from {VARIABLE}" in said and "experts reference" in said
  assert ": maxtext.layers.moe.RoutedMoE.__call__ -> maxtext_moe_te.host.layer." in said
  _, said = run(source, output, variable="dropples", status=2)
  assert said.splitlines()[-1].startswith(f"maxtext-moe-te: error: no overlay is called dropples, from {VARIABLE};")
  assert "Traceback" not in said
  assert cli.main(["patch", "revert", "maxtext", "--root", str(root)]) == 0
  assert bytes_of(root) == before


@pytest.mark.slow
@pytest.mark.parametrize("root", ["site-packages"], indirect=True)
def test_a_scanned_mixtral_is_converted(root, tmp_path_factory):
  """Every expert and every router in its place; without the patch the tool stops at the first router."""
  import jax
  import numpy as np
  import orbax.checkpoint as ocp
  from safetensors.numpy import save_file

  folder = tmp_path_factory.mktemp("conversion")
  layers, experts, width, hidden, heads, vocabulary = 32, 8, 16, 8, 4, 32  # as many layers as the tool's own table says
  random = np.random.default_rng(0)
  normal = lambda *shape: random.standard_normal(shape, dtype=np.float32)
  weights = {"model.embed_tokens.weight": normal(vocabulary, width), "model.norm.weight": normal(width)}
  weights["lm_head.weight"] = normal(vocabulary, width)
  for layer in range(layers):
    of_layer = {f"self_attn.{name}_proj.weight": normal(width, width) for name in "qkvo"}
    of_layer |= {"input_layernorm.weight": normal(width), "post_attention_layernorm.weight": normal(width)}
    of_layer["block_sparse_moe.gate.weight"] = normal(experts, width)
    for expert in range(experts):
      shapes = {"w1": (hidden, width), "w3": (hidden, width), "w2": (width, hidden)}
      of_layer |= {f"block_sparse_moe.experts.{expert}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
    weights |= {f"model.layers.{layer}.{name}": value for name, value in of_layer.items()}
  save_file(weights, folder / "model.safetensors")
  index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  command = [sys.executable, "-m", "maxtext.checkpoint_conversion.to_maxtext", "model_name=mixtral-8x7b", "override_model_config=true"]
  command += [f"base_emb_dim={width}", f"base_num_query_heads={heads}", f"base_num_kv_heads={heads}", f"head_dim={width // heads}"]
  command += [f"base_mlp_dim={hidden}", f"base_moe_mlp_dim={hidden}", f"vocab_size={vocabulary}", "weight_dtype=float32", "hardware=cpu"]
  command += ["skip_jax_distributed_system=true", f"base_output_directory={folder / 'out'}", "run_name=x", "scan_layers=true"]
  command += [f"--hf_model_path={folder}", "--save_dtype=float32"]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "XLA_FLAGS": ""}
  convert = lambda: subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
  assert "Shape mismatch for tensor 'params-decoder-layers-MoeBlock_0-gate-kernel'" in convert().stderr
  assert cli.main(["patch", "apply", "maxtext", "--root", str(root)]) == 0
  done = convert()
  assert done.returncode == 0, done.stderr[-2000:]
  (items,) = folder.glob("out/**/items")
  checkpointer = ocp.PyTreeCheckpointer()
  arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), checkpointer.metadata(items).item_metadata.tree)
  block = checkpointer.restore(items, restore_args=arrays)["params"]["params"]["decoder"]["layers"]["MoeBlock_0"]
  for layer in range(layers):
    of_layer = f"model.layers.{layer}.block_sparse_moe"
    np.testing.assert_array_equal(block["gate"]["kernel"][:, layer], weights[f"{of_layer}.gate.weight"].T)
    for expert in range(experts):
      for ours, theirs in (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2")):
        np.testing.assert_array_equal(block[ours][expert, layer], weights[f"{of_layer}.experts.{expert}.{theirs}.weight"].T)


def test_an_error_of_the_run_is_not_hidden(root):
  """MaxText's context manager, patched and not, around a body that fails."""
  source = patches.find("maxtext", str(root))
  code = (
    "import ast, contextlib, sys, types\n"
    "tree = ast.parse(open(sys.argv[1]).read())\n"
    "tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == 'transformer_engine_context']\n"
    "stub = types.ModuleType('transformer_engine.jax.sharding')\n"
    "stub.MeshResource, stub.global_shard_guard = (lambda **k: None), contextlib.nullcontext\n"
    "sys.modules |= {'transformer_engine': stub, 'transformer_engine.jax': stub, 'transformer_engine.jax.sharding': stub}\n"
    "scope = {'contextmanager': contextlib.contextmanager}\n"
    "exec(compile(tree, 'x', 'exec'), scope)\n"
    "with scope['transformer_engine_context']():\n"
    "  raise KeyError('of the run')\n"
  )
  said = lambda: subprocess.run([sys.executable, "-c", code, source / "maxtext/utils/max_utils.py"], capture_output=True, text=True).stderr
  assert "RuntimeError: generator didn't stop after throw()" in said()
  assert cli.main(["patch", "apply", "maxtext", "--root", str(root)]) == 0
  assert said().splitlines()[-1] == "KeyError: 'of the run'"
