"""Compiles the train step of overlays for the GPUs they name, on a machine without any, and records the memory it takes.

    python -m tests.te.compile_overlays [NAME …]      adds to tests/te/overlays.json; all overlays with a model if none is named

Needs Transformer Engine and the CUDA plugin (the environment of `make test-te`). An NVLink domain is a host of 8 GPUs, or for GB200 and
GB300 a rack of 64. Not counted by XLA: NCCL's and NCCL EP's own buffers, CUDA graphs, and what cuDNN's attention really wants as workspace.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from maxtext_moe_te.settings import overlay as overlays
from maxtext_moe_te.settings import xla_flags
from maxtext_moe_te.settings.config import MoeTeOptions
from maxtext_moe_te.tools import described

RECORD = pathlib.Path(__file__).with_name("overlays.json")
WORDS = (
  "run_name=compile", "enable_checkpointing=false", "dataset_type=synthetic", "skip_jax_distributed_system=true", "log_config=false",
  "enable_tensorboard=false", "enable_goodput_recording=false", "monitor_goodput=false", "tokenizer_type=huggingface",
)  # fmt: skip
GIB = 2**30


def gpus(name: str) -> tuple[int, str]:
  """How many GPUs an overlay is for, and of which kind, from its first line."""
  count, kind = re.search(r" on (\d+) (G?[HB]\d00)\b", overlays.packaged()[name].read_text().splitlines()[0]).groups()
  return int(count), kind


def digest(name: str) -> str:
  """Of what an overlay sets for the compiler, so that a record of other settings is known."""
  overlay = overlays.load(name)
  settings = json.dumps([overlay.maxtext, overlay.moe_te, overlay.xla_flags], sort_keys=True)
  return hashlib.sha256(settings.encode()).hexdigest()[:16]


def compile_one(name: str) -> dict:
  step, flags, topology = build(name)
  count, kind = gpus(name)
  compiled = step.compile(flags)
  memory = compiled.memory_analysis()
  calls = re.findall(r'custom_call_target="(te_\w+)"', compiled.as_text())
  return {
    "settings": digest(name),
    "gpus": f"{count} {kind}",
    "topology": topology,
    "mesh": {axis: size for axis, size in step.mesh.shape.items() if size > 1},
    "peak_gib": round(memory.peak_memory_in_bytes / GIB, 1),
    "arguments_gib": round(memory.argument_size_in_bytes / GIB, 1),
    "host_gib": round(memory.host_temp_size_in_bytes / GIB, 1),
    "device_gib": round(described.memory_bytes(described.target(kind)) / GIB, 1),
    "transformer_engine_calls": {call: calls.count(call) for call in sorted(set(calls))},
  }


def build(name: str, changes: dict | None = None, words: tuple[str, ...] = ()):
  """(step, compiler flags, topology) of an overlay.

  Args:
    name: of the overlay.
    changes: of the plugin's options.
    words: for MaxText, besides.
  """
  count, kind = gpus(name)
  domain = min(count, 64 if kind.startswith("G") else 8)
  topology = f"{count // domain}x{domain}x1"
  devices, _ = described.devices(kind, topology)
  described.pretend_expert_parallel()
  described.pretend_fused_attention()
  import jax
  from maxtext.configs import pyconfig

  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.moe.transport import nccl_ep

  jax.clear_caches()
  nccl_ep._bootstrapped = None  # a pretended group, unlike a real one, can be made again
  overlay = overlays.load(name)
  options = MoeTeOptions.from_mapping(overlay.moe_te | (changes or {}), name)
  flags = xla_flags.profile(options.xla_profile) | overlay.xla_flags
  flags |= described.COMPILER_OPTIONS
  base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
  with tempfile.TemporaryDirectory() as folder:
    words = [base, f"base_output_directory={folder}", *WORDS, *words]
    options = options.replace_from({"xla_profile": []}, "here")  # its flags are options of the compilation here
    return steps.build(words, overlay=overlay, options=options, devices=devices), flags, topology


def main(names):
  if names[:1] == ["--child"]:  # all in one process: importing MaxText and Transformer Engine takes as long as a compilation
    for name in names[1:]:
      print(json.dumps([name, compile_one(name)]), flush=True)
    return
  names = names or [name for name, path in overlays.packaged().items() if " on " in path.read_text().splitlines()[0]]
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "tests.te.compile_overlays", "--child", *names]
    child = subprocess.Popen(command, env=described.environment(pathlib.Path(folder)), stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
      if not line.startswith('["'):
        continue  # MaxText prints
      name, found = json.loads(line)
      record = json.loads(RECORD.read_text()) if RECORD.exists() else {"command": "python -m tests.te.compile_overlays", "overlays": {}}
      record["overlays"] = dict(sorted({**record["overlays"], name: found}.items()))
      RECORD.write_text(json.dumps(record, indent=1) + "\n")
      print(name, found, flush=True)
    sys.exit(child.wait())


if __name__ == "__main__":
  main(sys.argv[1:])
