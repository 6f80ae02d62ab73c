"""MaxText's source as text: what makes two texts one, which lines a function has, and whose version it is."""

import ast
import os
import subprocess
import sys

import pytest

from maxtext_moe_te.errors import VersionError
from maxtext_moe_te.host import source

TEXT = '''"""A module."""
import functools


def first(x):
  return x


class Layer(
  object,
):
  """A layer."""

  size = 3

  @functools.cache
  @staticmethod
  def still(x, y=(1,
                  2)):
    """What it is."""
    # A comment.
    def inner(z):

      return z + x  # another

    async def later():
      """Nothing."""
      return 1

    return inner(y)

  async def wait(self): return await self.other()

  def call(self, x):
    if x:
      text = """a
  def not_a_function(): pass
"""
      return text; y = 2
    return x


def first(x):
  return 2 * x
'''


def digests(text):
  return {path: function.digest for path, function in source._parse(text, None, "m").items()}


def test_every_function_is_found_by_its_path():
  found = source._parse(TEXT, None, "m")
  assert list(found) == ["first", "Layer.still.inner", "Layer.still.later", "Layer.still", "Layer.wait", "Layer.call", "Layer"]
  assert found["first"].text == "def first(x):\nreturn 2 * x", "of several with one name the last"
  still = found["Layer.still"]
  assert still.target == "m:Layer.still" and [line.text for line in still.lines][:3] == [
    "@functools.cache",
    "@staticmethod",
    "def still(x, y=(1, 2)):",
  ]
  assert [line.number for line in still.lines] == [16, 17, 18, 22, 24, 26, 28, 30], (
    "decorators are its own, comments and docstrings no lines"
  )
  assert [line.text for line in found["Layer.wait"].lines] == ["async def wait(self): return await self.other()"]
  assert len(found["Layer.call"].lines) == 5 and "def not_a_function" in found["Layer.call"].text


SAME = {
  "a comment": ("# A comment.", "# Another one."),
  "no comment": ("  # another\n", "\n"),
  "a docstring": ('"""What it is."""', '"""What it was,\n\n    in lines."""'),
  "no docstring": ('    """What it is."""\n', ""),
  "line breaks": ("y=(1,\n                  2)", "y=(1, 2)"),
  "spaces": ("y=(1,\n                  2)", "y = ( 1,2 )"),
  "blank lines": ("      return z + x", "      return z + x\n\n\n"),
  "its place": ("import functools", "import functools\nimport os\n\nx = 1"),
}
OTHER = {
  "a number": ("y=(1,", "y=(3,"),
  "a name": ("return z + x", "return z + y"),
  "an inner function": ("async def later", "def later"),
  "a decorator": ("  @functools.cache\n", ""),
  "another decorator": ("@functools.cache", "@functools.lru_cache"),
  "a line more": ("    return inner(y)", "    y = 2\n    return inner(y)"),
  "a line less": ("    return inner(y)\n", ""),
  "a default": ("def still(x, y", "def still(x, u=None, y"),
  "what is inside what": ("    return inner(y)", "      return inner(y)"),
}


@pytest.mark.parametrize("change", SAME)
def test_texts_that_compute_the_same(change):
  changed = TEXT.replace(*SAME[change])
  assert changed != TEXT and digests(changed) == digests(TEXT)
  assert digests(TEXT.replace("  ", "    ")) != digests(TEXT), "the text in three quotes is one of its tokens"
  assert digests(TEXT.partition("  def call")[0].replace("  ", "    "))["Layer.still"] == digests(TEXT)["Layer.still"], "indentation"


@pytest.mark.parametrize("change", OTHER)
def test_texts_that_do_not(change):
  changed = TEXT.replace(*OTHER[change])
  before, after = digests(TEXT), digests(changed)
  assert changed != TEXT and after["Layer.still"] != before["Layer.still"] and after["Layer"] != before["Layer"]
  assert after["first"] == before["first"] and after["Layer.call"] == before["Layer.call"]


def test_text_that_is_no_python_has_no_functions():
  assert source._parse("def f(:\n  return (", None, "m") == {}
  assert source._parse("def f():\n    return 1\n  return 2\n", None, "m") == {}


@pytest.fixture
def package(tmp_path, monkeypatch):
  """Makes a package of these files, on Python's path without metadata."""

  def make(**files):
    for name, text in files.items():
      path = tmp_path / "sample" / f"{name.replace('__dot__', '/')}.py"
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "sample"

  return make


def test_the_version_is_the_sources_own(package, monkeypatch):
  folder = package(__init__="", a="def f(): return 1\n")
  assert source.root("sample") == folder and source.version("sample") == "unknown"
  (folder / "__init__.py").write_text("'''x'''\n__version__ = \"0.2.4\"\n")
  assert source.version("sample") == "0.2.4"
  (folder / "version.py").write_text("import os\n__version__ = '0.2.5.dev3'  # next\n")
  assert source.version("sample") == "0.2.5.dev3"
  info = folder.parent / "sample-9.dist-info"
  info.mkdir()
  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 9\n")
  assert source.version("sample") == "0.2.5.dev3", "metadata may be of another copy"
  assert "sample" not in sys.modules


def test_functions_of_an_imported_source(package):
  folder = package(__init__="def here(): return 0\n", deep__dot____init__="def g(): return 2\n", deep__dot__a="def f(): return 1\n")
  assert source.function("sample.deep.a:f").text == "def f(): return 1"
  assert source.function("sample.deep:g").path == folder / "deep" / "__init__.py"
  assert source.function("sample.deep.a:nope") is None and source.function("sample.nope:f") is None
  (folder / "deep" / "a.py").write_text("def f(): return 1000\n")
  assert source.function("sample.deep.a:f").text == "def f(): return 1000", "a file that changes is read again"


def test_what_cannot_be_imported(tmp_path, monkeypatch):
  (tmp_path / "sample").mkdir()
  monkeypatch.syspath_prepend(tmp_path)
  for name in ("sample", "no_such_package"):  # a folder that happens to have the name is no package
    with pytest.raises(VersionError, match=r"^maxtext cannot be imported; needed: MaxText's container.*\. Fix: pip install maxtext\.$"):
      source.root(name)


@pytest.mark.host
def test_maxtext_without_metadata(tmp_path):
  """Its tree alone on Python's path, beside that of the environment, is what counts."""
  (tmp_path / "maxtext").symlink_to(source.root())
  code = (
    "import sys; from maxtext_moe_te.host import known, source; print(source.root(), source.version(), known.standing())\n"
    "assert 'maxtext' not in sys.modules"
  )
  environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
  done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment)
  # -S: without the environment's packages there is no dist-info of any.
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(f"{tmp_path}/maxtext {source.version()} source {source.version()} in {tmp_path}/maxtext, ")


@pytest.mark.host
@pytest.mark.parametrize("module", ["layers.moe", "layers.linears", "configs.pyconfig", "trainers.pre_train.train", "utils.max_utils"])
def test_functions_of_maxtext_are_those_that_python_sees(module):
  """First and last line of every one, decorators included, against Python's own parser."""
  path = source.root() / f"{module.replace('.', '/')}.py"
  expected = {}

  def walk(node, names):
    for child in ast.iter_child_nodes(node):
      if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        last = child.body[-1]
        docstring = isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and isinstance(last.value.value, str)
        first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
        expected[".".join([*names, child.name])] = (first, None if docstring else child.end_lineno)
        walk(child, [*names, child.name])
      else:
        walk(child, names)

  tree = ast.parse(path.read_text())
  walk(tree, [])
  ends = {}  # of the statements that begin in a line
  for node in ast.walk(tree):
    if isinstance(node, ast.stmt):
      ends[node.lineno] = max(node.end_lineno, ends.get(node.lineno, 0))
  found = source.functions(path, f"maxtext.{module}")
  assert found.keys() == expected.keys() and len(found) > 3
  for name, function in found.items():
    first, last = expected[name]
    assert function.lines[0].number == first, name
    assert last is None or ends[function.lines[-1].number] == last, name  # a logical line may go over several of the file
