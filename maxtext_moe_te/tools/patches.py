"""`maxtext-moe-te patch`: the source patches in patches/, listed, checked, applied and reverted.

A tree is recognized by the sha256 of every file that a series touches, before and after; nothing else is believed, neither a
version number nor that a hunk happens to fit. The diffs are read here and not by `git apply`: containers may lack git, and a diff
whose result is known by its hash needs no fuzz. Imports neither jax nor MaxText.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tomllib
from pathlib import Path

from maxtext_moe_te.errors import PatchError, VersionError, nearest
from maxtext_moe_te.host import known as known_texts
from maxtext_moe_te.host import source

CLEAN, APPLIED, DAMAGED, ABSENT = "clean", "applied", "damaged", "absent"  # of a tree; the first two of a file as well
_UNPATCHED = "as released"  # of a file that no patch touches
_KNOWN = (CLEAN, APPLIED, _UNPATCHED)
_STAGED = ".moe-te-staged"  # ending of a file that is written but not yet in its place
_REINSTALL = "pip install --force-reinstall --no-deps maxtext-moe-te"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
  """One git-format patch and why it exists.

  Args:
    file: its path in patches/.
    sha256: of that file.
    kind: "upstream bug", or "only way in" where no attribute of a module can be replaced instead.
    upstream: where it was reported or sent, or that it was not.
    reason: what goes wrong without it.
    remove_when: the condition under which it is deleted.
  """

  file: str
  sha256: str
  kind: str
  upstream: str
  reason: str
  remove_when: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Series:
  """The patches for one version of one package.

  Args:
    package: the import package, which is the name of its folder.
    version: the release.
    prefix: what precedes that folder in the package's git repository, as "src/".
    patches: in the order of application.
    before: path, from the folder that holds the package's, to the sha256 of the released file.
    after: the same once all patches are applied; equal for a file that only tells the release from others.
    hunks: path to what changes in it, in order: (line in the result, from 0; old lines; new lines).
  """

  package: str
  version: str
  prefix: str
  patches: tuple[Patch, ...]
  before: dict[str, str]
  after: dict[str, str]
  hunks: dict[str, list]

  def patched(self, path: str, content: bytes) -> bytes:
    """The released file with all patches applied."""
    return self._changed(path, content, self.hunks[path], self.after)

  def unpatched(self, path: str, content: bytes) -> bytes:
    """The reverse of `patched`."""
    # From the last hunk up, so that the lines above each are still those that its line number counts.
    return self._changed(path, content, [(start, new, old) for start, old, new in reversed(self.hunks[path])], self.before)

  def _changed(self, path, content, hunks, sums):
    lines = content.splitlines(keepends=True)
    for start, old, new in hunks:
      if lines[start : start + len(old)] != old:
        raise self._unfit(path)
      lines[start : start + len(old)] = new
    content = b"".join(lines)
    if _sha256(content) != sums[path]:
      raise self._unfit(path)
    return content

  def _unfit(self, path):
    return PatchError(
      found=f"the patches for {self.package} {self.version} do not lead from the recorded {path} to the recorded result",
      needed="a series.toml made with these patches",
      fix=_REINSTALL,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """What the tree of one package is.

  Args:
    package: the import package.
    version: the release it is closest to; None if no file of it is known.
    root: the folder that holds the package's folder; None if the package is absent.
    state: clean, applied, damaged or absent.
    problems: if damaged, what is wrong with which file.
    interrupted: damaged only by a change that was interrupted: `revert` takes it back.
    source: of the MaxText that this Python would import, what the plugin knows of its source.
  """

  package: str
  version: str | None = None
  root: str | None = None
  state: str = ABSENT
  problems: tuple[str, ...] = ()
  interrupted: bool = False
  source: str = ""


def main(words: list[str]) -> int:
  """Runs `maxtext-moe-te patch WORDS`.

  Returns:
    int: 0: every tree is clean or applied, and after apply and revert all are what was asked for.

  Raises:
    PatchError: a tree is damaged, or there is nothing to patch. Nothing was changed.
  """
  parser = argparse.ArgumentParser(prog="maxtext-moe-te patch", description="Patches for MaxText and Transformer Engine.")
  parser.add_argument("action", choices=("list", "check", "apply", "revert"))
  parser.add_argument("package", nargs="*", help="only these, for example maxtext; default: all that are there")
  parser.add_argument("--root", help="a git checkout or a site-packages folder; default: what this Python would import")
  parser.add_argument("--json", action="store_true", help="as JSON")
  arguments = parser.parse_args(words)
  if arguments.action == "list" and arguments.root is not None:
    raise PatchError(found="list with --root", needed="an action that looks at a tree", fix="write check, or remove --root")
  known = load()
  packages = list(dict.fromkeys(series.package for series in known))
  for name in arguments.package:
    if name not in packages:
      near = nearest(name, packages) or packages[0]
      raise PatchError(found=f"there are no patches for {name}", needed=f"one of {', '.join(packages)}", fix=f"write {near}")
  chosen = list(dict.fromkeys(arguments.package)) or packages
  if arguments.action == "list":
    print(_as_json([series for series in known if series.package in chosen]) if arguments.json else _listed(known, chosen))
    return 0

  def look():
    return [_with_source(inspect(known, package, find(package, arguments.root))) for package in chosen]

  states = look()
  if all(state.state == ABSENT for state in states):
    place = "this Python environment" if arguments.root is None else arguments.root or "''"
    raise PatchError(
      found=f"no {' or '.join(chosen)} in {place}",
      needed="a git checkout or a site-packages folder that holds one",
      fix="give its path with --root",
    )
  if arguments.action == "apply":
    apply(known, states)
  elif arguments.action == "revert":
    revert(known, states)
  states = look()
  print(_as_json(states) if arguments.json else "\n".join(map(_line, states)))
  _refuse([state for state in states if state.state == DAMAGED])
  return 0


def _with_source(state):
  """The state of a MaxText, with what a run would say of it. One that this Python does not import is judged by its patches alone."""
  imported = state.package == source.PACKAGE and state.root is not None and find(state.package) == Path(state.root)
  return dataclasses.replace(state, source=known_texts.standing()) if imported else state


def _as_json(records):
  table = [dataclasses.asdict(record) for record in records]
  for row in table:
    row.pop("hunks", None)
  return json.dumps(table, indent=2)


def _line(state):
  if state.root is None:
    return f"{state.package}: not here"
  line = f"{state.package} {state.version or '(unknown version)'} in {state.root}: {state.state}"
  return f"{line}\n{state.package}: {state.source}" if state.source else line


def _listed(known, packages):
  lines = []
  for series in known:
    if series.package in packages:
      lines.append(f"{series.package} {series.version}")
      for patch in series.patches:
        lines += [
          f"  {patch.file} ({patch.kind}, {patch.upstream})",
          f"    {patch.reason}",
          f"    remove when {patch.remove_when}",
        ]
  return "\n".join(lines)


def folder() -> Path:
  """Where series.toml and the patches lie: in the installed package, or at the top of a checkout."""
  inside = Path(__file__).parents[1] / "patches"
  return inside if inside.is_dir() else Path(__file__).parents[2] / "patches"


def load(where: Path | None = None) -> tuple[Series, ...]:
  """All series.

  Args:
    where: the folder of series.toml and the patches; None for ours.

  Raises:
    PatchError: a patch file is missing, changed, or more than a change to the lines of recorded files.
  """
  where = where or folder()
  known = []
  for entry in tomllib.loads((where / "series.toml").read_text(encoding="utf-8"))["series"]:
    patches = tuple(Patch(**patch) for patch in entry["patch"])
    files, prefix = entry["files"], entry.get("prefix", "")
    hunks = {path: [] for path in files}
    for patch in patches:
      for path, changes in _parse(_verified(where / patch.file, patch.sha256)):
        hunks[path.removeprefix(prefix)] += changes
    known.append(
      Series(
        package=entry["package"],
        version=entry["version"],
        prefix=prefix,
        patches=patches,
        before={path: sums["before"] for path, sums in files.items()},
        after={path: sums.get("after", sums["before"]) for path, sums in files.items()},
        hunks=hunks,
      )
    )
  return tuple(known)


def _verified(path, sha256):
  content = path.read_bytes() if path.is_file() else None
  if content is None or _sha256(content) != sha256:
    raise PatchError(
      found=f"the patch file {path} is {'missing' if content is None else 'not the one recorded in series.toml'}",
      needed="the file that came with this package",
      fix=_REINSTALL,
    )
  return content


def _parse(text):
  """[(path in the repository, hunks as in `Series`)] of a git-format patch that changes lines and nothing else."""
  lines, files, at = text.splitlines(keepends=True), [], 0
  while at < len(lines):
    line, at = lines[at], at + 1
    if line.startswith(b"+++ "):
      files.append((line[len(b"+++ b/") :].decode().rstrip("\n"), []))
    head = re.match(rb"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)
    if head is None:
      continue
    old_count, start, new_count = (1 if part is None else int(part) for part in head.groups())
    old, new = [], []
    while len(old) < old_count or len(new) < new_count:
      sign, content, at = lines[at][:1], lines[at][1:], at + 1
      if sign in b" -":
        old.append(content)
      if sign in b" +":
        new.append(content)
    files[-1][1].append((start - 1, old, new))
  return files


def find(package: str, given: str | None = None) -> Path | None:
  """The folder that holds the package's folder, or None.

  Args:
    package: the import package.
    given: a git checkout, a site-packages folder or the package's own; None for what this Python would import.
  """
  if given is None:
    try:
      return source.root(package).parent
    except VersionError:
      return None
  top = Path(os.path.expanduser(given)).absolute()
  places = [top, top / "src", *([top.parent] if top.name == package else [])]
  return next((place for place in places if os.path.isdir(place / package)), None) if given else None


def inspect(known: tuple[Series, ...], package: str, root: Path | None) -> State:
  """What the tree of a package is, judged by the series whose files it has most of."""
  if root is None:
    return State(package=package)
  judged = {series: _contents(series, root) for series in known if series.package == package}
  share = lambda series: sum(what in _KNOWN for what in judged[series].values()) / len(series.before)
  series = max(judged, key=share)
  found = judged[series]
  unknown = {path: what for path, what in found.items() if what not in _KNOWN}
  changing = {path: what for path, what in found.items() if what != _UNPATCHED}
  problems = [f"{path} {what}" for path, what in (unknown or (changing if len({*changing.values()}) > 1 else {})).items()]
  interrupted = bool(problems) and not unknown
  for path in series.before:
    staged = _staged(root / path)
    if os.path.lexists(staged):
      problems.append(f"{path} has {staged.name} beside it, left by an interrupted change")
      interrupted = not unknown
  for path in series.before:
    if cached := _unchecked_bytecode(root / path):
      problems.append(f"{path} is not what runs: Python takes __pycache__/{cached} without comparing the two")
      interrupted = False
  return State(
    package=package,
    version=series.version if share(series) else None,
    root=str(root),
    state=DAMAGED if problems else next(iter(changing.values())),
    problems=tuple(problems),
    interrupted=interrupted,
  )


def _contents(series, root):
  """Path to clean, applied or, in words, what else is there."""
  found = {}
  for path in series.before:
    file = root / path
    if file.is_symlink():  # replacing it would leave a file in its place, and the one it points to may serve others
      found[path] = "is a symbolic link"
    elif not file.is_file():
      found[path] = "is a folder" if file.is_dir() else "is missing"
    else:
      other = f"is neither that of {series.package} {series.version} nor its patched form"
      sums = {series.before[path]: CLEAN, series.after[path]: APPLIED}
      try:
        found[path] = sums.get(_sha256(file.read_bytes()), other)
      except OSError as error:
        found[path] = f"cannot be read ({error.strerror})"
      if found[path] in _KNOWN and series.before[path] == series.after[path]:
        found[path] = _UNPATCHED
  return found


def _unchecked_bytecode(path):
  """The name of a compiled form of the file that Python uses whatever the file has become (PEP 552), or None."""
  for cached in sorted((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc")):
    try:
      with cached.open("rb") as file:
        flags = int.from_bytes(file.read(8)[4:], "little")
    except OSError:
      continue  # nor does Python take it
    if flags & 0b11 == 0b01:
      return cached.name
  return None


def apply(known: tuple[Series, ...], states: list[State]) -> None:
  """Patches every clean tree, or none. What is patched or absent stays as it is.

  Raises:
    PatchError: a tree is damaged or cannot be written. Nothing was changed.
  """
  _refuse([state for state in states if state.state == DAMAGED])
  contents = {}
  for state in states:
    if state.state == CLEAN:
      series = _series_of(known, state)
      for path in filter(series.hunks.get, series.before):
        file = Path(state.root, path)
        contents[file] = series.patched(path, file.read_bytes())
  _write(contents)


def revert(known: tuple[Series, ...], states: list[State]) -> None:
  """Takes the patches out of every tree, or of none; also what an interrupted change left.

  Raises:
    PatchError: a tree is damaged otherwise, or cannot be written. Nothing was changed.
  """
  _refuse([state for state in states if state.state == DAMAGED and not state.interrupted])
  contents, staged = {}, []
  for state in states:
    if state.state in (APPLIED, DAMAGED):
      series, root = _series_of(known, state), Path(state.root)
      for path, what in _contents(series, root).items():
        staged.append(_staged(root / path))
        if what == APPLIED:
          contents[root / path] = series.unpatched(path, (root / path).read_bytes())
  for path in staged:
    path.unlink(missing_ok=True)
  _write(contents)


def _series_of(known, state):
  return next(series for series in known if (series.package, series.version) == (state.package, state.version))


def _refuse(states):
  if states:
    trees = "; ".join(f"{state.root}: {', '.join(state.problems)}" for state in states)
    interrupted = all(state.interrupted for state in states)
    raise PatchError(
      found=trees,
      needed="every file as released, or every file as patched",
      fix="maxtext-moe-te patch revert" if interrupted else "install the package anew, or take back your own changes to these files",
    )


def _write(contents):
  """Replaces files, all or none. Each gets a new inode: installers that link into a cache share the old one with it."""
  old = {path: path.read_bytes() for path in contents}
  staged, replaced = [], []
  try:
    for path, content in contents.items():
      _stage(path, content, staged)
    for path in contents:
      os.replace(_staged(path), path)
      replaced.append(path)
  except BaseException as error:
    for path in replaced:
      _stage(path, old[path], [])
      os.replace(_staged(path), path)
    for path in staged:
      _staged(path).unlink(missing_ok=True)
    if isinstance(error, OSError):
      raise PatchError(
        found=f"{error.filename} cannot be written ({error.strerror})",
        needed="write access to the folders of the package",
        fix="run it as the user who installed the package",
      ) from error
    raise


def _stage(path, content, staged):
  """Writes the new content beside the file, with its owner and permissions; notes the path once there is something to remove."""
  place, owner = _staged(path), path.stat()
  with place.open("xb") as file:
    staged.append(path)
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  shutil.copymode(path, place)
  if (owner.st_uid, owner.st_gid) != (place.stat().st_uid, place.stat().st_gid):
    os.chown(place, owner.st_uid, owner.st_gid)


def _staged(path):
  return path.with_name(f".{path.name}{_STAGED}")


def _sha256(content):
  return hashlib.sha256(content).hexdigest()
