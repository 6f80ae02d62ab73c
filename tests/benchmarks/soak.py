"""A thousand steps with NCCL EP, several times over: every run ends, and equal runs have equal losses to the last bit.

    python -m tests.benchmarks.soak --steps 1000 --out tests/benchmarks/results/soak-h200x2.json

One run after the other, each with the GPUs to itself. What does not repeat itself in a step that has nothing to do with experts is
left out: the embedding's gradient is a product instead of a scatter, kernels are not chosen by time, and XLA's are deterministic.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

from tests.benchmarks import end_to_end, losses, record

MULTISTREAM = {"moe_te.xla_profile": "multistream-domain"}
RUNS = {"plain": {}, "multistream": MULTISTREAM, "multistream-again": MULTISTREAM}
REPEATABLE = dict(use_iota_embed="true")
FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", choices=losses.MODELS, default="deepseek3")
  parser.add_argument("--mesh", choices=["te-mesh", "te-mesh-fsdp"], default="te-mesh")
  parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
  parser.add_argument("--steps", type=int, default=1000)
  parser.add_argument("--timeout", type=int, default=150, help="seconds for one run")
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  module, ranks, _, more = losses.RUNS[args.mesh]
  words = end_to_end.COMMON | losses.MODELS[args.model] | losses.REDUCED | more | REPEATABLE | dict(steps=args.steps)
  os.environ["XLA_FLAGS"] = FLAGS
  results = {"model": args.model, "steps": args.steps, "words": [f"{key}={value}" for key, value in words.items()], "runs": {}}
  first, wrong = {}, []
  for name in args.only:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
      outputs, rows = end_to_end.run_ranks(module, words | RUNS[name], ranks, pathlib.Path(folder), args.timeout, share_memory=True)
    found = [row["learning/loss"] for row in rows]
    reference = first.setdefault(str(RUNS[name]), found)
    same = next((step for step, (a, b) in enumerate(zip(found, reference)) if a != b), min(len(found), len(reference)))
    if outputs.statuses != [0] * ranks or same < args.steps:
      wrong.append(name)
    results["runs"][name] = {
      "words": RUNS[name],
      "seconds": round(time.monotonic() - start, 1),
      "exit_statuses": outputs.statuses,
      "steps_done": len(found),
      "loss": found[:: max(1, args.steps // 10)] + found[-1:],
      "steps_equal_to_the_first_run": same,
    } | ({} if outputs.statuses == [0] * ranks else {"said": outputs.tail()})
    print(name, json.dumps(results["runs"][name]), flush=True)
  if args.out:  # at the end: it starts JAX here, which takes its memory
    record.write(args.out, results)
  for name in wrong:
    print("WRONG:", name)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
