"""Writes `known.json` from proofs: `python -m tests.hosts.record TREES PROOF [PROOF …]`.

TREES is a folder of source trees, PROOF a file of lines that `tests.hosts.prove` printed for some of them. A group of places is proven
in a tree if all that was compared there was equal, or in another tree with the same texts. The places that configure a run are recorded
without a proof: their texts are named where they are unknown, and each run checks that what the plugin adds arrives.
"""

import argparse
import json
import sys
from pathlib import Path

from maxtext_moe_te.host import known
from tests.hosts import trees

WORDS = {known.LAYER: "layer ", known.STEP: "step "}


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.hosts.record")
  parser.add_argument("trees", type=Path)
  parser.add_argument("proofs", type=Path, nargs="+")
  arguments = parser.parse_args()
  # Releases last: of two trees that fit equally well, the later is named.
  folders = sorted((path for path in arguments.trees.iterdir() if path.is_dir()), key=lambda path: (path.name[0].isdigit(), path.name))
  functions = {path.name: trees.functions(path) for path in folders}
  proofs = [json.loads(line) for file in arguments.proofs for line in file.read_text().splitlines() if line.startswith("{")]
  state = {name: {group: digest(group, found) for group in known.GROUPS} for name, found in functions.items()}
  proven = {(group, state[proof["tree"]][group]) for proof in proofs for group in WORDS if shows(proof, group)}
  proven -= {(group, state[proof["tree"]][group]) for proof in proofs for group in WORDS if differs(proof, group)}
  of_tree = lambda name, group: (group, state[name][group]) in proven
  kept = {name: found for name, found in functions.items() if any(of_tree(name, group) for group in WORDS)}
  known.KNOWN.write_text(known.record(kept, lambda name, group: group not in WORDS or of_tree(name, group)), encoding="utf-8")
  for name in functions:
    print(f"{name:40s} {', '.join(group for group in WORDS if of_tree(name, group)) or 'not proven'}")
  return 0


def shows(proof: dict, group: str) -> bool:
  """Whether a proof compared something of a group, and found it equal."""
  compared = [over for name, (_, _, over) in proof.get("worst", {}).items() if name.startswith(WORDS[group])]
  return bool(compared) and max(compared) <= 1


def differs(proof: dict, group: str) -> bool:
  """Whether a proof found something of a group to differ."""
  return any(over > 1 for name, (_, _, over) in proof.get("worst", {}).items() if name.startswith(WORDS[group]))


def digest(group: str, functions: dict) -> str:
  """Of the texts of a group."""
  return " ".join(function.digest if function else known.ABSENT for function in (functions[target] for target in known.GROUPS[group]))


if __name__ == "__main__":
  sys.exit(main())
