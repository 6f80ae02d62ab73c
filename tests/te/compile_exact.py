"""Compiles a train step of MaxText for one described H200, with and without a second program for steps that overflow: compile_exact.

Prints the bytes that the fusions around the loops write, of the step alone and of the step that keeps its state where it overflows, and
the peak of memory of both: what is selected must not be written first.
"""

import json
import pathlib
import re
import tempfile

from maxtext_moe_te.tools import described
from tests import helpers
from tests.te.compile_cast import WORDS

BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "u8": 1}


def written(text: str) -> int:
  """Bytes of the results of fusions and copies in a program's entry."""
  entry = text[text.index("\nENTRY") :].split("\n}", 1)[0]
  total = 0
  for shape in re.findall(r"= (.*?) (?:fusion|copy)\(", entry):
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
      size = BYTES[dtype]
      for dim in filter(None, dims.split(",")):
        size *= int(dim)
      total += size
  return total


def main() -> dict:
  devices, _ = described.devices("H200", "1x1x1")
  from maxtext_moe_te.host import step as steps
  from maxtext_moe_te.settings.config import MoeTeOptions

  found = {}
  with tempfile.TemporaryDirectory() as folder:
    words = helpers.tiny_run(pathlib.Path(folder), [*WORDS, "opt_type=adamw"])
    for name, more in (("alone", {}), ("exact", {"capacity_factor": 2.0, "on_overflow": "exact"})):
      step = steps.build(words, options=MoeTeOptions(experts="te", **more), devices=devices[:1])
      compiled = step.compile(described.COMPILER_OPTIONS)
      found[name] = {"written": written(compiled.as_text()), "peak": compiled.memory_analysis().peak_memory_in_bytes}
  return found


if __name__ == "__main__":
  print("RESULT", json.dumps(main()))
