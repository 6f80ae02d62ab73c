"""Signatures read from source are those that Python has: re-exports, conditions, classes, and what cannot be known."""

import importlib
import inspect
import sys

import pytest

from maxtext_moe_te.signatures import Call, Package

FILES = {
  "__init__.py": """
from sample.inner import *
from ._private import first as renamed, Sized
from os import path
""",
  "_private.py": """
import typing
@typing.overload
def first(x): ...
def first(x, /, y, *rest, z=1, **more): ...
class Sized:
  LIMIT = 3
  def __init__(self, size, unit='b'): ...
  def method(self, a, *, b): ...
  @staticmethod
  def free(a): ...
""",
  "inner/__init__.py": """
from .deep import second
try:
  from missing import third
except ImportError:
  def third(a, b): ...
""",
  "inner/deep.py": """
import dataclasses
if True:
  def second(one, two=2): ...
else:
  def second(): ...
@dataclasses.dataclass(frozen=True)
class Record:
  left: int
  right: int = 0
FOUR = 4
FIVE, SIX = 5, 6
""",
  "cyclic.py": "from .cyclic import again\nfrom .gone import nothing\n",
  "broken.py": "def (",
}


@pytest.fixture
def sample(tmp_path, monkeypatch):
  for name, text in FILES.items():
    file = tmp_path / "sample" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield tmp_path / "sample"
  for name in [name for name in sys.modules if name.partition(".")[0] == "sample"]:
    del sys.modules[name]


FOUND = [
  ("", "second", "(one, two=Ellipsis)"),
  ("inner", "second", "(one, two=Ellipsis)"),
  ("", "renamed", "(x, /, y, *rest, z=Ellipsis, **more)"),
  ("", "Sized", "(size, unit=Ellipsis)"),
  ("_private", "Sized.method", "(a, *, b)"),
  ("_private", "Sized.free", "(a)"),
  ("", "Sized.LIMIT", True),
  ("inner.deep", "Record", "(left, right=Ellipsis)"),
  ("inner.deep", "FOUR", True),
  ("inner.deep", "SIX", True),
  ("", "path", True),
  ("inner", "third", True),
  ("cyclic", "nothing", None),
  ("cyclic", "again", None),
  ("", "Sized.absent", None),
  ("inner.deep", "absent", None),
  ("absent", "x", None),
  ("broken", "x", None),
]


@pytest.mark.parametrize(("module", "name", "expected"), FOUND)
def test_what_the_source_says(sample, module, name, expected):
  found = Package(sample).find(module, name)
  assert (found if found in (None, True) else str(found)) == expected


def test_it_is_what_python_has(sample):
  (sample / "__init__.py").write_text("from .inner.deep import *\nfrom ._private import *\n")
  package = importlib.import_module("sample")
  for name in ("first", "Sized", "Sized.free", "second", "Record"):
    value = package
    for part in name.split("."):
      value = getattr(value, part)
    shape = lambda signature: [(p.name, p.kind, p.default is p.empty) for p in signature.parameters.values()]
    assert shape(Package(sample).find("", name)) == shape(inspect.signature(value))
    assert shape(Package.installed("sample").find("", name)) == shape(inspect.signature(value))


def test_what_is_imported_is_asked_instead_of_its_source(sample):
  installed = Package.installed("sample")
  assert installed.folder == sample and installed.has("inner.deep", "FOUR")
  del importlib.import_module("sample.inner.deep").FOUR
  assert not installed.has("inner.deep", "FOUR") and Package(sample).has("inner.deep", "FOUR")


def test_constants(sample):
  package = Package(sample)
  assert package.constant("inner.deep", "FOUR") == 4
  assert package.constant("inner.deep", "FIVE") is package.constant("inner.deep", "second") is package.constant("gone", "x") is None


@pytest.mark.parametrize(
  ("call", "problem"),
  [
    (Call("_private", "first", ("x", "y", "*rest"), ("z",)), ""),
    (Call("_private", "first", ("x",), ("y", "z")), ""),
    (Call("_private", "first", ("x",), ("z",)), "has _private.first with a parameter y, which is not passed"),
    (Call("_private", "first", ("y", "x")), "has _private.first(x, y, *rest), and (y, x) are passed"),
    (Call("_private", "first", ("x", "y"), ("w",)), "has _private.first without a parameter w"),
    (Call("_private", "first", (), ("x", "y")), "has _private.first without a parameter x"),
    (Call("", "path"), ""),
    (Call("", "path", ()), "has path, whose parameters cannot be read"),
    (Call("inner", "nowhere"), "has no inner.nowhere"),
  ],
)
def test_calls_are_held_to_it(sample, call, problem):
  assert Package(sample).problem(call) == problem


def test_no_package():
  assert Package.installed("no_such_package") is None
  assert Package.installed("this") is None, "a module without a folder"
