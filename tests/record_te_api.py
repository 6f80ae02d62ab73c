"""Writes tests/te_api.json: what Transformer Engine had, in some of its states, of all that the plugin calls. Names and signatures only.

    python -m tests.record_te_api --git CLONE COMMIT --wheel transformer_engine-2.20.2-py3-none-any.whl [--wheel …]

CLONE is one of https://github.com/NVIDIA/TransformerEngine; wheels are PyPI's (pip download --no-deps transformer-engine==…). Nothing of
them is imported. The receive capacities are what the last wheel's own function gives.
"""

import argparse
import ast
import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import tempfile
import typing
import zipfile

from maxtext_moe_te.moe import te_api
from maxtext_moe_te.signatures import Package

RECORD = pathlib.Path(__file__).with_name("te_api.json")
# What one state has and another has not.
SOMETIMES = (
  ("jax.cpp_extensions.gemm", "_v2_grouped_gemm_supports_per_group_alpha_beta"),
  ("jax.cpp_extensions.ep", "use_nccl_comm_from_xla"),
  ("jax.cpp_extensions.router", "ScoreFunction.SQRTSOFTPLUS"),
)


def record(folder: pathlib.Path, source: str) -> dict:
  """One state: module to name to signature, or "" for what has none."""
  package, names = Package(folder), {}
  calls = [(call.module, call.name) for part in te_api.PARTS.values() for call in part]
  for module, name in dict.fromkeys([*calls, *SOMETIMES]):
    found = package.find(module, name)
    if found is not None:
      names.setdefault(module, {})[name] = "" if found is True else str(found)
  return {"source": source, "nccl_floor": package.constant("", "_NCCL_EP_MIN_VERSION"), "names": names}


def capacities(folder: pathlib.Path) -> list[str]:
  """Transformer Engine's own formula at work: "tokens ranks experts experts_per_token factor rows", for sizes that meet each branch."""
  module = ast.parse((folder / "jax/moe.py").read_text())
  wanted = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "get_moe_recv_capacity_per_rank"]
  scope = {"math": math, "Optional": typing.Optional, "_ALIGN_SIZE": 128}
  exec(compile(ast.Module(wanted, []), "moe.py", "exec"), scope)
  found = []
  for tokens, ranks, experts, k, factor in itertools.product((4, 100, 4096), (2, 8), (8, 128), (1, 8), (None, 1.0, 1.25, 2.0, 100.0)):
    rows = scope["get_moe_recv_capacity_per_rank"](
      num_experts=experts, num_experts_per_tok=k, max_tokens_per_rank=tokens, ep_size=ranks, recv_capacity_factor=factor, alignment=128
    )
    found.append(f"{tokens} {ranks} {experts} {k} {factor or 0:g} {rows}")
  return found


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--git", nargs=2, metavar=("CLONE", "COMMIT"))
  parser.add_argument("--wheel", action="append", default=[], type=pathlib.Path)
  args = parser.parse_args()
  states = {}
  with tempfile.TemporaryDirectory() as root:
    if args.git:
      git = ["git", "-C", args.git[0]]
      shown = subprocess.run(
        [*git, "show", "-s", "--format=%H %cs", args.git[1]], check=True, capture_output=True, text=True
      ).stdout.split()
      archive = subprocess.run([*git, "archive", args.git[1], te_api.PACKAGE], check=True, capture_output=True).stdout
      subprocess.run(["tar", "x", "-C", root], input=archive, check=True)
      source = f"https://github.com/NVIDIA/TransformerEngine, main, commit {shown[0]} of {shown[1]}"
      states["main"] = record(pathlib.Path(root, te_api.PACKAGE), source)
    for wheel in args.wheel:
      version = wheel.name.split("-")[1]
      zipfile.ZipFile(wheel).extractall(f"{root}/{version}")
      folder = pathlib.Path(root, version, te_api.PACKAGE)
      states[version] = record(folder, f"PyPI: {wheel.name}, sha256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    written = {"command": "python -m tests.record_te_api", "states": states, "receive_capacities": capacities(folder)}
  RECORD.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
  main()
