"""Source trees of MaxText to try the plugin in: commits of its git history, releases, copies with a line changed, and mixes of two.

Needs a clone of MaxText's repository (`--repository`); only what Python reads is written.
"""

import shutil
import subprocess
from pathlib import Path

from maxtext_moe_te.host import known, source

PREFIX = "src/maxtext/"
SUFFIXES = (".py", ".yml", ".json", ".txt")


def extract(repository: Path, commit: str, folder: Path) -> Path:
  """Writes MaxText's package as of a commit; returns the folder to put on PYTHONPATH."""
  listed = _git(repository, "ls-tree", "-r", commit, PREFIX).decode().splitlines()
  entries = [(line.split()[2], line.partition("\t")[2]) for line in listed if line.split()[1] == "blob"]
  entries = [(blob, path) for blob, path in entries if path.endswith(SUFFIXES) and "/assets/" not in path]
  contents = _git(repository, "cat-file", "--batch", given="".join(f"{blob}\n" for blob, _ in entries).encode())
  at = 0
  for _, path in entries:
    end = contents.index(b"\n", at)
    size = int(contents[at:end].split()[2])
    target = folder / path.removeprefix("src/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(contents[end + 1 : end + 1 + size])
    at = end + 1 + size + 1
  return folder


def changes(repository: Path, since: str, until: str = "HEAD") -> list[tuple[str, str]]:
  """(commit, date) of those on the main branch since a date at which the text of a place in `known.GROUPS` changed; and the one before."""
  words = ("log", "--first-parent", "--reverse", f"--since={since}", "--format=%H %cs", until)
  before = _git(repository, "log", "-1", "--first-parent", f"--before={since}", "--format=%H %cs", until)
  commits = [line.split() for line in (before + _git(repository, *words)).decode().splitlines()]
  found, last, texts = [], None, {}
  for commit, date in commits:
    state = tuple(_digest(repository, commit, target, texts) for group in known.GROUPS.values() for target in group)
    if state != last:
      found.append((commit, date))
    last = state
  return found


def _digest(repository, commit, target, texts):
  module = target.partition(":")[0]
  path = f"src/{module.replace('.', '/')}.py"
  blob = _git(repository, "ls-tree", commit, path).split()[2:3]
  if not blob:
    return known.ABSENT
  if blob[0] not in texts:
    texts[blob[0]] = _git(repository, "cat-file", "blob", blob[0].decode()).decode()
  if (blob[0], target) not in texts:
    function = source.of_text(texts[blob[0]], target)
    texts[blob[0], target] = function.digest if function else known.ABSENT
  return texts[blob[0], target]


def copy(tree: Path, folder: Path) -> Path:
  """A copy of a tree's package, without what Python compiled."""
  shutil.copytree(tree / "maxtext", folder / "maxtext", ignore=shutil.ignore_patterns("__pycache__", "assets"))
  return folder


def edit(tree: Path, target: str, old: str, new: str) -> Path:
  """Replaces text inside one function of a tree; the text must stand there."""
  path, function = _place(tree, target)
  lines = path.read_text().splitlines(keepends=True)
  first, last = function.lines[0].number - 1, function.lines[-1].number
  body = "".join(lines[first:last])
  assert old in body, f"{old!r} does not stand in {target}"
  path.write_text("".join(lines[:first]) + body.replace(old, new, 1) + "".join(lines[last:]))
  return tree


def transplant(tree: Path, other: Path, target: str) -> Path:
  """Gives a tree another tree's text of one function."""
  path, function = _place(tree, target)
  theirs, their_function = _place(other, target)
  body = theirs.read_text().splitlines(keepends=True)[their_function.lines[0].number - 1 : their_function.lines[-1].number]
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[: function.lines[0].number - 1], *body, *lines[function.lines[-1].number :]]))
  return tree


def functions(tree: Path) -> dict[str, source.Function | None]:
  """A tree's text of every place in `known.GROUPS`."""
  found = {}
  for group in known.GROUPS.values():
    for target in group:
      path = _file(tree, target)
      found[target] = source.functions(path, target.partition(":")[0]).get(target.partition(":")[2]) if path.is_file() else None
  return found


def _place(tree, target):
  path = _file(tree, target)
  return path, source.functions(path, target.partition(":")[0])[target.partition(":")[2]]


def _file(tree, target):
  return tree / f"{target.partition(':')[0].replace('.', '/')}.py"


def _git(repository, *words, given=None):
  return subprocess.run(["git", "-C", str(repository), *words], input=given, capture_output=True, check=True).stdout
