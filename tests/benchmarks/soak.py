"""A thousand steps on two ranks of NCCL EP, several times over: every run ends, and equal runs have equal losses to the last bit.

    python -m tests.benchmarks.soak --steps 1000 --out tests/benchmarks/results/soak-h200x2.json

The runs start together and share the GPUs, which also shakes their timing.
"""

import argparse
import concurrent.futures
import json
import pathlib
import tempfile

from tests.benchmarks import end_to_end, record
from tests.gpu import test_training

RUNS = {"first": {}, "again": {}, "multistream": {"moe_te.xla_profile": "multistream-domain"}}


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", choices=test_training.MODELS, default="deepseek3")
  parser.add_argument("--steps", type=int, default=1000)
  parser.add_argument("--timeout", type=int, default=300, help="seconds for all runs")
  parser.add_argument("--out", help="JSON file for the results")
  args = parser.parse_args(argv)
  module, ranks, more = test_training.RUNS["te-mesh"]
  words = end_to_end.COMMON | test_training.MODELS[args.model] | test_training.REDUCED | more | dict(steps=args.steps)

  def train(name, folder):
    outputs, rows = end_to_end.run_ranks(
      module, words | RUNS[name], ranks, pathlib.Path(folder) / name, args.timeout, share_memory=True
    )
    return outputs, [row["learning/loss"] for row in rows]

  with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(len(RUNS)) as pool:
    runs = dict(zip(RUNS, pool.map(lambda name: train(name, folder), RUNS)))
  first = runs["first"][1]
  results = {"model": args.model, "steps": args.steps, "words": [f"{key}={value}" for key, value in words.items()]}
  for name, (outputs, losses) in runs.items():
    results[name] = {
      "words": RUNS[name],
      "exit_statuses": outputs.statuses,
      "steps_done": len(losses),
      "loss": losses[:: max(1, args.steps // 10)] + losses[-1:],
      "losses_equal_first": losses == first and len(losses) == args.steps,
    } | ({} if outputs.statuses == [0] * ranks else {"said": outputs.tail()})
    print(name, json.dumps(results[name]), flush=True)
  if args.out:
    record.write(args.out, results)


if __name__ == "__main__":
  main()
