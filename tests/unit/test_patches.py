"""`maxtext-moe-te patch` on a small package: all or nothing, reverted to identical bytes, and every damaged tree is seen."""

import difflib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from maxtext_moe_te import cli
from maxtext_moe_te.errors import PatchError
from maxtext_moe_te.tools import patches

LONG = "".join(f"# line {i}\n" for i in range(40))
RELEASED = {
  "1.0": {"victim/version.py": "VERSION = '1.0'\n", "victim/a.py": LONG, "victim/deep/b.py": "x = 1\ny = 2\n"},
  "1.1": {"victim/version.py": "VERSION = '1.1'\n", "victim/a.py": LONG, "victim/deep/b.py": "x = 1\ny = 2\nz = 3\n"},
}
CHANGES = {  # patch to path to (old, new), in order; the second builds on the first
  "first.patch": {
    "victim/a.py": [("# line 3\n", "# line three\n# and a half\n"), ("# line 30\n", "")],
    "victim/deep/b.py": [("x = 1\n", "x = 10\n")],
  },
  "second.patch": {"victim/a.py": [("# and a half\n", "# and more\n"), ("# line 39\n", "# line 39\n# last\n")]},
}
PATCHED = ("victim/a.py", "victim/deep/b.py")


def sha256(text):
  return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def series(tmp_path, monkeypatch):
  """A patches/ folder for the two releases, in place of ours."""
  where = tmp_path / "patches"
  where.mkdir()
  lines = []
  for version, files in RELEASED.items():
    contents = dict(files)
    lines += ["[[series]]", 'package = "victim"', f'version = "{version}"', 'prefix = "src/"']
    for name, changes in CHANGES.items():
      text = "From 0 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] change\n\nwhy\n---\n"
      for path, pairs in changes.items():
        old = contents[path]
        for before, after in pairs:
          assert old.count(before) >= 1
          contents[path] = contents[path].replace(before, after)
        text += f"diff --git a/src/{path} b/src/{path}\nindex 000..111 100644\n"
        text += "".join(difflib.unified_diff(old.splitlines(True), contents[path].splitlines(True), f"a/src/{path}", f"b/src/{path}"))
      (where / f"{version}-{name}").write_text(text + "-- \n2.40\n")
      lines += ["[[series.patch]]", f'file = "{version}-{name}"', f'sha256 = "{sha256(text + "-- " + chr(10) + "2.40" + chr(10))}"']
      lines += ['kind = "upstream bug"', 'upstream = "none"', 'reason = "test"', 'remove_when = "never"']
    for path in files:
      lines += [f'[series.files."{path}"]', f'before = "{sha256(files[path])}"']
      lines += [f'after = "{sha256(contents[path])}"'] * (path in PATCHED)
  (where / "series.toml").write_text("\n".join(lines))
  monkeypatch.setattr(patches, "folder", lambda: where)
  return where


@pytest.fixture(params=["site-packages", "git"])
def tree(request, tmp_path, series):
  """The root to give to --root, in both layouts, release 1.0."""
  root = tmp_path / "tree"
  write_release(root / "src" if request.param == "git" else root, "1.0")
  if request.param == "git":
    subprocess.run(["git", "init", "-q", root], check=True)
  return root


def write_release(root, version):
  for path, text in {**RELEASED[version], "victim/other.py": "untouched\n"}.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def bytes_of(root):
  return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def package(root):
  return (root / "src" if (root / "src").is_dir() else root) / "victim"


def run(*words, status=0):
  assert cli.main(["patch", *map(str, words)]) == status


def refused(capsys, *words):
  capsys.readouterr()
  run(*words, status=2)
  return capsys.readouterr().err


def test_apply_and_revert_are_exact(tree, capsys):
  before = bytes_of(tree)
  os.chmod(package(tree) / "a.py", 0o640)
  run("check", "--root", tree)
  run("apply", "--root", tree)
  assert (package(tree) / "a.py").read_text().splitlines()[3:6] == ["# line three", "# and more", "# line 4"]
  assert (package(tree) / "a.py").read_text().endswith("# line 39\n# last\n")
  assert (package(tree) / "deep/b.py").read_text() == "x = 10\ny = 2\n"
  assert stat.S_IMODE((package(tree) / "a.py").stat().st_mode) == 0o640
  patched = bytes_of(tree)
  assert patched.keys() == before.keys()
  run("apply", "--root", tree)  # once more changes nothing
  assert bytes_of(tree) == patched
  assert "applied" in capsys.readouterr().out
  run("revert", "--root", tree)
  run("revert", "--root", tree)
  assert bytes_of(tree) == before


def test_the_other_release_is_told_apart(tmp_path, series, capsys):
  write_release(tmp_path / "tree", "1.1")
  run("apply", "--root", tmp_path / "tree", "--json")
  (state,) = json.loads(capsys.readouterr().out)
  assert (state["version"], state["state"], state["problems"]) == ("1.1", "applied", [])
  assert (tmp_path / "tree/victim/deep/b.py").read_text() == "x = 10\ny = 2\nz = 3\n"


def test_git_agrees_with_what_is_applied_here(tmp_path, series):
  """The patches are git's own format: `git apply` comes to the same bytes."""
  for name in ("ours", "gits"):
    write_release(tmp_path / name / "src", "1.0")
  run("apply", "--root", tmp_path / "ours")
  subprocess.run(["git", "init", "-q", tmp_path / "gits"], check=True)
  for name in CHANGES:
    subprocess.run(["git", "apply", series / f"1.0-{name}"], cwd=tmp_path / "gits", check=True)
  assert bytes_of(tmp_path / "gits/src") == bytes_of(tmp_path / "ours/src")


def edit(path, change):
  path.write_bytes(change(path.read_bytes()))


def patch_only(name):
  """Leaves one file patched and the other as released."""

  def damage(source):
    old = (source / name).read_bytes()
    run("apply", "--root", source)
    new = (source / name).read_bytes()
    run("revert", "--root", source)
    assert old != new
    (source / name).write_bytes(new)

  return damage


def applied_then(change):
  def damage(source):
    run("apply", "--root", source)
    change(source)

  return damage


def one_patch_only(source):
  git_like = source.parent / "one"
  shutil.copytree(source, git_like / "src/victim")
  subprocess.run(["git", "init", "-q", git_like], check=True)
  subprocess.run(["git", "apply", patches.folder() / "1.0-first.patch"], cwd=git_like, check=True)
  shutil.rmtree(source)
  shutil.move(git_like / "src/victim", source)


def to_link(path):
  path.rename(path.with_name("elsewhere.py"))
  path.symlink_to("elsewhere.py")


def to_folder(path):
  path.unlink()
  path.mkdir()


def unchecked_bytecode(source):
  code = "import py_compile, sys; py_compile.compile(sys.argv[1], invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
  subprocess.run([sys.executable, "-c", code, source / "a.py"], check=True)


def other_release(source):
  (source / "deep/b.py").write_text(RELEASED["1.1"]["victim/deep/b.py"])


A = "victim/a.py is neither that of victim 1.0 nor its patched form"
B = A.replace("a.py", "deep/b.py")
DAMAGE = {  # what is done to the package's folder, and what is said
  "a byte changed": (lambda p: edit(p / "a.py", lambda b: b.replace(b"line 20", b"line 2O")), A),
  "a line added": (lambda p: edit(p / "a.py", lambda b: b + b"more\n"), A),
  "last newline lost": (lambda p: edit(p / "deep/b.py", lambda b: b[:-1]), B),
  "cut off": (lambda p: edit(p / "a.py", lambda b: b[:50]), A),
  "emptied": (lambda p: edit(p / "deep/b.py", lambda b: b""), B),
  "CRLF": (lambda p: edit(p / "a.py", lambda b: b.replace(b"\n", b"\r\n")), A),
  "byte order mark": (lambda p: edit(p / "a.py", lambda b: b"\xef\xbb\xbf" + b), A),
  "missing": (lambda p: (p / "a.py").unlink(), "victim/a.py is missing"),
  "symbolic link": (lambda p: to_link(p / "a.py"), "victim/a.py is a symbolic link"),
  "link to nothing": (lambda p: [(p / "a.py").unlink(), (p / "a.py").symlink_to("gone")], "victim/a.py is a symbolic link"),
  "a folder": (lambda p: to_folder(p / "a.py"), "victim/a.py is a folder"),
  "all of it gone": (lambda p: [shutil.rmtree(p), p.mkdir()], "victim/deep/b.py is missing"),
  "another version": (lambda p: edit(p / "version.py", lambda b: b.replace(b"1.0", b"1.2")), A.replace("a.py", "version.py")),
  "a file of another release": (other_release, B),
  "one of two patches": (one_patch_only, A),
  "edited after patching": (applied_then(lambda p: edit(p / "a.py", lambda b: b + b"more\n")), A),
  "cut off after patching": (applied_then(lambda p: edit(p / "deep/b.py", lambda b: b[:-3])), B),
  "gone after patching": (applied_then(lambda p: (p / "deep/b.py").unlink()), "victim/deep/b.py is missing"),
  "bytecode that hides the source": (unchecked_bytecode, "victim/a.py is not what runs: Python takes __pycache__/a."),
}
INTERRUPTED = {
  "only the first file": (patch_only("a.py"), "victim/a.py applied, victim/deep/b.py clean"),
  "only the last file": (patch_only("deep/b.py"), "victim/a.py clean, victim/deep/b.py applied"),
  "a staged file": (lambda p: (p / ".a.py.moe-te-staged").write_text("half"), "victim/a.py has .a.py.moe-te-staged beside it"),
  "a staged file when patched": (
    applied_then(lambda p: (p / "deep/.b.py.moe-te-staged").write_text("")),
    "victim/deep/b.py has .b.py.moe-te-staged beside it, left by an interrupted change",
  ),
}


@pytest.mark.parametrize("case", [*DAMAGE, *INTERRUPTED])
def test_damage_is_seen_and_nothing_is_changed(tree, case, capsys):
  damage, said = {**DAMAGE, **INTERRUPTED}[case]
  damage(package(tree))
  before = bytes_of(tree)
  for action in ("check", "apply", *(("revert",) if case in DAMAGE else ())):
    error = refused(capsys, action, "--root", tree)
    assert said in error, error
    assert error.count("\n") == 1 and "Traceback" not in error
    assert bytes_of(tree) == before
  assert error.endswith("Fix: maxtext-moe-te patch revert.\n") == (case in INTERRUPTED)


@pytest.mark.parametrize("case", INTERRUPTED)
def test_revert_takes_back_an_interrupted_change(tree, case):
  before = bytes_of(tree)
  INTERRUPTED[case][0](package(tree))
  run("revert", "--root", tree)
  assert bytes_of(tree) == before


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("what", ["fsync", "replace", "chmod"])
def test_a_failure_while_writing_leaves_the_tree_as_it_was(tree, what, call, monkeypatch, capsys):
  before, calls, real = bytes_of(tree), [], getattr(os, what)

  def failing(*arguments, **options):
    calls.append(arguments)
    if len(calls) == call:
      raise OSError(28, "No space left on device", "some/file")
    return real(*arguments, **options)

  monkeypatch.setattr(os, what, failing)
  if call <= 2:
    assert "some/file cannot be written (No space left on device)" in refused(capsys, "apply", "--root", tree)
    assert bytes_of(tree) == before
  else:  # there are two files: nothing fails any more
    run("apply", "--root", tree)
    assert len(calls) == 2


def test_two_packages_are_patched_or_none(tmp_path, series, capsys):
  """A second package, damaged, keeps the first from being touched."""
  text = (series / "series.toml").read_text()
  other = text[: text.index('version = "1.1"')].rpartition("[[series]]")[0].replace('"victim"', '"second"').replace("victim/", "second/")
  for name in CHANGES:
    content = (series / f"1.0-{name}").read_text().replace("victim", "second")
    (series / f"second-{name}").write_text(content)
    other = other.replace(sha256((series / f"1.0-{name}").read_text()), sha256(content))
  (series / "series.toml").write_text(text + "\n" + other.replace("1.0-", "second-"))
  root = tmp_path / "tree"
  write_release(root, "1.0")
  shutil.copytree(root / "victim", root / "second")
  edit(root / "second/a.py", lambda b: b + b"#\n")
  before = bytes_of(root)
  assert "second/a.py is neither" in refused(capsys, "apply", "--root", root)
  assert bytes_of(root) == before
  run("apply", "victim", "--root", root)
  assert bytes_of(root / "second") == {path.relative_to("second"): data for path, data in before.items() if path.parts[0] == "second"}
  assert bytes_of(root / "victim")[Path("deep/b.py")] == b"x = 10\ny = 2\n"


@pytest.mark.parametrize(
  "damage,said",
  [
    (lambda w: edit(w / "1.0-first.patch", lambda b: b.replace(b"three", b"3")), "1.0-first.patch is not the one recorded"),
    (lambda w: (w / "1.1-second.patch").unlink(), "1.1-second.patch is missing"),
  ],
  ids=["changed", "missing"],
)
def test_a_patch_file_that_is_not_the_recorded_one(tree, series, damage, said, capsys):
  damage(series)
  assert said in refused(capsys, "apply", "--root", tree)


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_series_that_does_not_belong_to_its_patches(tree, series, which, capsys):
  """A wrong `before` is an unknown tree; a wrong `after` is found before anything is written."""
  text = (series / "series.toml").read_text()
  place = text.index(f'{which} = "', text.index('[series.files."victim/a.py"]')) + len(which) + 4
  (series / "series.toml").write_text(text[:place] + "0" * 64 + text[place + 64 :])
  before = bytes_of(tree)
  error = refused(capsys, "apply", "--root", tree)
  assert ("do not lead from the recorded victim/a.py to the recorded result" if which == "after" else A) in error
  assert bytes_of(tree) == before


def test_nothing_to_patch(tmp_path, series, capsys):
  error = refused(capsys, "check", "--root", tmp_path)
  assert error.startswith(f"maxtext-moe-te: error: no victim in {tmp_path}; needed: a git checkout or a site-packages folder")
  assert "there are no patches for victom; needed: one of victim. Fix: write victim." in refused(capsys, "check", "victom")


def test_a_root_that_is_none(tmp_path, series, capsys, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  for root, said in (("", "''"), ("x" * 5000, "xxx"), ("~", "~"), ("no\nsuch", "no such")):
    assert f"no victim in {said}" in refused(capsys, "check", "--root", root)
  write_release(tmp_path, "1.0")
  run("check", "--root", "~")
  assert "list with --root; needed: an action that looks at a tree." in refused(capsys, "list", "--root", tmp_path)


def test_a_package_named_twice_counts_once(tree, capsys):
  run("check", "victim", "victim", "--root", tree)
  assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_file_that_cannot_be_read(tree, capsys, monkeypatch):
  def unreadable(path):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(patches.Path, "read_bytes", lambda path: unreadable(path) if path.name == "a.py" else path.open("rb").read())
  assert "victim/a.py cannot be read (Permission denied)" in refused(capsys, "check", "--root", tree)


def test_the_root_may_be_the_package_itself(tree):
  assert patches.find("victim", str(package(tree))) == package(tree).parent


def test_our_own_series(capsys):
  """Every patch file belongs to a series and says why it exists; every change alters the size, which is what makes Python recompile."""
  known = patches.load()
  listed = {patch.file for series in known for patch in series.patches}
  files = {str(path.relative_to(patches.folder())) for path in patches.folder().rglob("*.patch")}
  assert files == listed
  for series in known:
    for patch in series.patches:
      assert patch.kind in ("upstream bug", "only way in") and patch.reason and patch.remove_when and patch.upstream
    for path, hunks in series.hunks.items():
      assert bool(hunks) == (series.before[path] != series.after[path])
      grown = sum(len(b"".join(new)) - len(b"".join(old)) for _, old, new in hunks)
      assert grown or not hunks
  run("list")
  printed = capsys.readouterr().out
  assert all(file in printed for file in files)
  run("list", "--json")
  assert [entry["version"] for entry in json.loads(capsys.readouterr().out)] == [series.version for series in known]


def test_the_readme_names_every_patch():
  readme = (Path(__file__).parents[2] / "patches/README.md").read_text()
  for series in patches.load():
    for patch in series.patches:
      assert f"`{patch.file}`" in readme


def test_errors_are_ours():
  with pytest.raises(PatchError, match="there are no patches for numpy"):
    patches.main(["check", "numpy"])
