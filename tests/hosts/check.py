"""The plugin in sources of MaxText that people have: `python -m tests.hosts.check --repository CLONE`, behind `make test-hosts`.

Commits of MaxText's main branch, releases, copies in which one line computes something else, and mixes of two sources: in each the verdict,
how long it took, and how far the gradients of 3 steps are from plain MaxText's. Fails if a run trains with other gradients, or if a spoiled
copy is not refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maxtext_moe_te.host import source
from tests.hosts import trees

COMMITS = (
  "575b31067a", "842a5792a6", "45b0f2bee7", "48ac2bf9a3", "f67a8a30f5", "b149d60a3a", "593891d0c9", "44627cc28c", "8fcc9e133d",
  "5e89a48939", "9cb34e8198", "f9d53d4840",
)  # fmt: skip
_MOE = "maxtext.layers.moe:"
# Copies of the imported release in which one line computes something else: place, what stands there, what takes its place.
SPOILED = {
  "spoiled-permute": (f"{_MOE}RoutedMoE.permute", "jnp.ravel(selected_experts)", "jnp.ravel(selected_experts[..., ::-1])"),
  "spoiled-get_topk": (
    f"{_MOE}RoutedMoE.get_topk", "top_k_weights, top_k_indices = self.deepseek_routing(gate_logits, pre_bias_logits)",
    "top_k_weights, top_k_indices = self.deepseek_routing(gate_logits, gate_logits)",
  ),
  "spoiled-load_balance_loss": (f"{_MOE}RoutedMoE.load_balance_loss", "(self.num_experts**2)", "self.num_experts"),
}  # fmt: skip
HARMLESS = {
  "renamed-variable": (f"{_MOE}RoutedMoE.load_balance_loss", "summed_expert_mask", "mask_sum", 2),
  "defaulted-argument": (f"{_MOE}RoutedMoE.load_balance_loss", "density_prob=None", "density_prob=None, unused=None", 1),
  "other-order": (f"{_MOE}RoutedMoE.load_balance_loss", "jnp.mean(density * density_prob)", "jnp.mean(density_prob * density)", 1),
}
# The imported release with one function of the newest commit.
MIXED = {
  "mix-apply_ffn_activation": f"{_MOE}RoutedMoE.apply_ffn_activation",
  "mix-expert_group_mask": f"{_MOE}RoutedMoE.expert_group_mask",
  "mix-load_balance_loss": f"{_MOE}RoutedMoE.load_balance_loss",
}
MUST_BE_REFUSED = tuple(SPOILED)


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.hosts.check", description=__doc__.split("\n")[0])
  parser.add_argument("--repository", type=Path, required=True, help="a clone of MaxText's repository")
  parser.add_argument("--releases", type=Path, nargs="*", default=[], help="folders that hold `maxtext`, besides the one that is imported")
  parser.add_argument("--workers", type=int, default=1)
  parser.add_argument("--json", type=Path)
  parser.add_argument("names", nargs="*", help="only these")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    made = make(arguments.repository, arguments.releases, Path(folder))
    chosen = {name: tree for name, tree in made.items() if not arguments.names or name in arguments.names}
    with ThreadPoolExecutor(arguments.workers) as pool:
      answers = []
      for answer in pool.map(lambda item: tried(*item), chosen.items()):
        answers.append(answer)
        print(line(answer), flush=True)
  if arguments.json:
    arguments.json.write_text(json.dumps(answers, indent=1))
  return 0 if all(map(right, answers)) else 1


def make(repository: Path, releases: list[Path], folder: Path) -> dict[str, Path]:
  """The trees by name."""
  here = source.root().parent
  made = {f"release {source.version()}": here}
  made |= {f"release {path.name}": path for path in releases}
  made |= {f"main {commit}": trees.extract(repository, commit, folder / commit) for commit in COMMITS}
  for name, (target, old, new) in SPOILED.items():
    made[name] = trees.edit(trees.copy(here, folder / name), target, old, new)
  for name, (target, old, new, times) in HARMLESS.items():
    made[name] = trees.copy(here, folder / name)
    for _ in range(times):
      trees.edit(made[name], target, old, new)
  for name, target in MIXED.items():
    made[name] = trees.transplant(trees.copy(here, folder / name), made[f"main {COMMITS[-1]}"], target)
  return made


def tried(name: str, tree: Path) -> dict:
  """The answer of `try_one`."""
  done = subprocess.run([sys.executable, "-m", "tests.hosts.try_one", str(tree)], capture_output=True, text=True)
  answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
  found = json.loads(answer) if answer else {"verdict": "failed", "failed": done.stderr[-300:]}
  return found | {"name": name}


def right(answer: dict) -> bool:
  """Whether a run trains as plain MaxText, or is refused."""
  if answer["name"] in MUST_BE_REFUSED:
    return answer["verdict"] == "refused"
  return answer["verdict"] == "refused" or bool(answer.get("equal"))


def line(answer: dict) -> str:
  """For a table."""
  worst = answer.get("worst")
  outcome = f"3 steps, gradients within {worst[1]:.1e}" if worst else answer.get("refused") or answer.get("failed", "")
  mark = "" if right(answer) else "WRONG "
  return f"{mark}{answer['name']:26s} {answer['verdict']:17s} {answer.get('seconds', 0):4d} s  {outcome}"


if __name__ == "__main__":
  sys.exit(main())
