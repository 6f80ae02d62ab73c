"""A thousand steps with NCCL EP, several times over: every run ends, and equal runs have equal losses to the last bit.

    python -m tests.benchmarks.soak --steps 1000 --out tests/benchmarks/results/soak-h200x2.json

One run after the other, each with the GPUs to itself.
"""

import argparse
import json
import pathlib
import tempfile
import time

from tests.benchmarks import end_to_end, losses, record

RUNS = {"first": {}, "again": {}, "multistream": {"moe_te.xla_profile": "multistream-domain"}}


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", choices=losses.MODELS, default="deepseek3")
  parser.add_argument("--mesh", choices=[run for run in losses.RUNS if run.startswith("te-mesh")], default="te-mesh")
  parser.add_argument("--steps", type=int, default=1000)
  parser.add_argument("--timeout", type=int, default=150, help="seconds for one run")
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  module, ranks, _, more = losses.RUNS[args.mesh]
  words = end_to_end.COMMON | losses.MODELS[args.model] | losses.REDUCED | more | dict(steps=args.steps)
  results = {"model": args.model, "steps": args.steps, "words": [f"{key}={value}" for key, value in words.items()], "runs": {}}
  first = None
  for name, own in RUNS.items():
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
      outputs, rows = end_to_end.run_ranks(module, words | own, ranks, pathlib.Path(folder), args.timeout, share_memory=True)
    found = [row["learning/loss"] for row in rows]
    first = first or found
    results["runs"][name] = {
      "words": own,
      "seconds": round(time.monotonic() - start, 1),
      "exit_statuses": outputs.statuses,
      "steps_done": len(found),
      "loss": found[:: max(1, args.steps // 10)] + found[-1:],
      "losses_equal_first": found == first and len(found) == args.steps,
    } | ({} if outputs.statuses == [0] * ranks else {"said": outputs.tail()})
    print(name, json.dumps(results["runs"][name]), flush=True)
    if args.out:
      record.write(args.out, results)


if __name__ == "__main__":
  main()
