"""Peak memory of a train step by capacity factor and parts, compiled for GPUs that are not there; adds to tests/te/capacity.json.

    python -m tests.te.compile_capacity      an hour on two cores

A step with a finite factor is two programs: the one that most steps take, and the one that runs again what overflowed. See
`compile_overlays` for what is needed and what XLA does not count.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from maxtext_moe_te.tools import described
from tests.te import compile_overlays
from tests.te.compile_overlays import GIB

RECORD = pathlib.Path(__file__).with_name("capacity.json")
EXPERT64 = ("ici_expert_parallelism=64", "ici_fsdp_parallelism=2")
STOP = dict(on_overflow="stop")
# Overlay, words besides, options.
CASES = {
  f"{name}, {mesh}": [(name, words, changes) for changes in grid]
  for name, mesh, words, grid in (
    (
      "deepseek3-671b-te-h200",
      "expert 8 x fsdp 16",
      (),
      ({"capacity_factor": 2.0}, {"capacity_factor": 2.0, **STOP}, {"capacity_factor": 0}, {"capacity_factor": 0, "chunks": 8}),
    ),
    (
      "deepseek3-671b-te-gb300",
      "expert 8 x fsdp 16",
      (),
      ({"capacity_factor": 2.0}, {"capacity_factor": 2.0, **STOP}, {"capacity_factor": 0}, {"capacity_factor": 0, "chunks": 8}),
    ),
    (
      "deepseek3-671b-te-gb300",
      "expert 64 x fsdp 2",
      EXPERT64,
      ({"capacity_factor": 2.0}, {"capacity_factor": 0, "chunks": 8}, {"capacity_factor": 0, "chunks": 32}),
    ),
  )
}


def compile_one(name, words, changes) -> dict:
  step, flags, _ = compile_overlays.build(name, changes, words)
  device = described.memory_bytes(described.target(compile_overlays.gpus(name)[1]))
  found = {**changes, "device_gib": round(device / GIB, 1)}
  for key, again in (("peak_gib", False), ("again_peak_gib", True))[: 2 if step.has_second else 1]:
    try:
      memory = step.compile(flags, again=again).memory_analysis()
      found[key] = round(memory.peak_memory_in_bytes / GIB, 1)
      found["arguments_gib"] = round(memory.argument_size_in_bytes / GIB, 1)
    except Exception as error:  # XLA's, where nothing fits
      found[key] = " ".join(str(error).split())[:200]
  return found


def main(chosen):
  if chosen[:1] == ["--child"]:
    for case in chosen[1:]:
      for one in CASES[case]:
        print(json.dumps([case, compile_one(*one)]), flush=True)
    return
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "tests.te.compile_capacity", "--child", *(chosen or CASES)]
    child = subprocess.Popen(command, env=described.environment(pathlib.Path(folder)), stdout=subprocess.PIPE, text=True)
    fresh = {case: [] for case in chosen or CASES}
    for line in child.stdout:
      if not line.startswith('["deep'):
        continue  # MaxText prints
      case, found = json.loads(line)
      fresh[case].append(found)
      record = json.loads(RECORD.read_text()) if RECORD.exists() else {"command": "python -m tests.te.compile_capacity", "cases": {}}
      record["cases"] |= {case: fresh[case]}
      RECORD.write_text(json.dumps(record, indent=1) + "\n")
      print(case, found, flush=True)
    sys.exit(child.wait())


if __name__ == "__main__":
  main(sys.argv[1:])
