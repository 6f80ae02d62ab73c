"""Tries the plugin in one source tree of MaxText, as a run meets it: `python -m tests.hosts.try_one TREE`, a line of JSON.

The verdict on the tree is taken as a run takes it. If the run would go on, a small model trains 3 steps with the plugin and without it, by
sgd in float32 and with accumulation 2, and the gradients of each step are compared.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts import prove

STEPS = 3


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.hosts.try_one")
  parser.add_argument("tree", type=Path)
  parser.add_argument("--model", default="deepseek3-671b")
  arguments = parser.parse_args()
  prove.stand_in(arguments.tree)
  with tempfile.TemporaryDirectory() as cache:
    os.environ["MAXTEXT_MOE_TE_CACHE"] = cache
    answer = tried(arguments.model)
  print(json.dumps({"tree": arguments.tree.name, **answer}), flush=True)
  return 0


def tried(model: str) -> dict:
  """{version, verdict, seconds of it, and either worst (quantity, error) or refused}."""
  from maxtext_moe_te.errors import MoeTeError
  from maxtext_moe_te.host import compared, known, selfcheck, source
  from maxtext_moe_te.settings.config import MoeTeOptions

  unknown = known.unknown((known.LAYER, known.STEP))
  answer = {"version": source.version(), "changed": [change.name for judgement in unknown for change in judgement.changed]}
  start = time.monotonic()
  try:
    config = prove.configuration(model)
    line = selfcheck.settle(config, MoeTeOptions())
    answer |= {"verdict": "equal by numbers" if line else "known", "line": line}
    answer["seconds"] = round(time.monotonic() - start)
    with selfcheck.comparing():
      request = selfcheck.request_of(config, MoeTeOptions(), (known.STEP,)) | {"mesh": prove.MESH}
      errors = compared.of_steps(request, 2, STEPS)
  except MoeTeError as error:
    return answer | {"verdict": "refused", "seconds": round(time.monotonic() - start), "refused": str(error)}
  except Exception as error:  # MaxText's own
    return answer | {"verdict": answer.get("verdict", "failed"), "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
  share = lambda name: float("inf") if errors[name] is None else errors[name] / selfcheck.bound(name)
  worst = max(errors, key=share)
  return answer | {"worst": [worst, errors[worst]], "equal": share(worst) <= 1}


if __name__ == "__main__":
  sys.exit(main())
