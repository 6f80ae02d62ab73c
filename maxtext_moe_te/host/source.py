"""MaxText's source as text: where it is, which version it says it is, and each function of it, without importing any.

A function is compared by its logical lines, comments, docstrings, blank lines and line breaks left out, each hashed: enough to recognize
a text, and to say which lines of an unknown one are new, without a copy of MaxText in this package.
"""

import functools
import hashlib
import importlib.machinery
import importlib.util
import io
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

from maxtext_moe_te.errors import VersionError

PACKAGE = "maxtext"
LINE_DIGITS = 6  # hexadecimal digits kept of a line's hash: they show what changed, the function's own hash decides
_HASH_DIGITS = 16
MISSING = {
  "found": f"{PACKAGE} cannot be imported",
  "needed": "MaxText's container, or MaxText in this environment",
  "fix": f"pip install {PACKAGE}",
}
_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True)
class Line:
  """One logical line: its place in the file, from 1, its text as it stands there, and its hash."""

  number: int
  text: str
  digest: str


@dataclass(frozen=True)
class Function:
  """The source of one function or class.

  Attributes:
    target: "package.module:Attr.path".
    path: of its file.
    lines: its logical lines.
  """

  target: str
  path: Path
  lines: tuple[Line, ...]

  @functools.cached_property
  def digest(self) -> str:
    """A hash of what it computes."""
    return hashlib.sha256("".join(line.digest for line in self.lines).encode()).hexdigest()[:_HASH_DIGITS]

  @functools.cached_property
  def text(self) -> str:
    """Its code, without comments and docstrings."""
    return "\n".join(line.text for line in self.lines)


def root(package: str = PACKAGE) -> Path:
  """The folder of the package that `import` would take, or has taken.

  Raises:
    VersionError: there is none.
  """
  module = sys.modules.get(package)
  places = getattr(module, "__path__", None)
  if not places:
    # PathFinder first: the import hook's finder acts on this name.
    spec = importlib.machinery.PathFinder.find_spec(package) or importlib.util.find_spec(package)
    # Without an origin it is a folder of that name that happens to stand on the path.
    places = spec.submodule_search_locations if spec and spec.origin else None
  if not places:
    raise VersionError(**MISSING)
  return Path(next(iter(places)))


def version(package: str = PACKAGE) -> str:
  """What the source says its version is; metadata may belong to another copy. "unknown" where it says nothing."""
  for path in (root(package) / "version.py", root(package) / "__init__.py"):
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if found := re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.M):
      return found.group(1)
  return "unknown"


def function(target: str) -> Function | None:
  """The source behind a target, or None where there is no such function or class."""
  module, _, path = target.partition(":")
  package, _, inner = module.partition(".")
  file = root(package) / f"{inner.replace('.', '/')}.py"
  if not file.is_file():
    file = root(package) / inner.replace(".", "/") / "__init__.py"
  return functions(file, module).get(path) if file.is_file() else None


def functions(file: Path, module: str) -> dict[str, Function]:
  """Every function and class of a file, by its path in the module; of several with one name the last, as Python has it."""
  stat = file.stat()
  return _functions(file, module, stat.st_mtime_ns, stat.st_size)


def of_text(text: str, target: str) -> Function | None:
  """The source behind a target whose module has this text."""
  module, _, path = target.partition(":")
  return _parse(text, Path(module), module).get(path)


@functools.lru_cache(maxsize=256)
def _functions(file, module, *state):
  del state  # a file that changes is read again
  return _parse(file.read_text(encoding="utf-8"), file, module)


def _parse(text, file, module):
  try:
    logical = list(_logical_lines(text))
  except (tokenize.TokenError, SyntaxError):  # Python itself will say so
    return {}
  found, stack = {}, []  # stack of (depth, name, index of its first line, decorators included)
  decorators = None  # index of the first of those above the next definition

  def close(depth, end):
    while stack and stack[-1][0] >= depth:
      _, name, start = stack.pop()
      base = logical[start][1]
      lines = tuple(_line(number, indent - base, words, raw) for number, indent, words, raw in logical[start:end])
      path = ".".join([*(above[1] for above in stack), name])
      found[path] = Function(f"{module}:{path}", file, lines)

  for index, (_, indent, words, _) in enumerate(logical):
    start = index if decorators is None else decorators
    close(indent, start)
    if words[0] == "@":
      decorators = start
    else:
      if name := _defined(words):
        stack.append((indent, name, start))
      decorators = None
  close(0, len(logical))
  return found


def _defined(words):
  """The name that a logical line defines a function or class by, or None."""
  place = next((i for i, word in enumerate(words[:2]) if word in ("def", "class")), None)
  return words[place + 1] if place is not None and (place == 0 or words[0] == "async") else None


def _line(number, indent, words, raw):
  digest = hashlib.sha256(f"{indent} {' '.join(words)}".encode()).hexdigest()
  return Line(number, raw, digest)


def _logical_lines(text):
  """Yields (line number, indentation depth, tokens, text) of each logical line that is not only a string."""
  source = text.splitlines()
  depth, words, kinds, first, last = 0, [], [], 0, 0
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.INDENT:
      depth += 1
    elif token.type == tokenize.DEDENT:
      depth -= 1
    elif token.type == tokenize.NEWLINE:
      if words and kinds != [tokenize.STRING]:
        yield first, depth, words, " ".join(line.strip() for line in source[first - 1 : last])
      words, kinds = [], []
    elif token.type not in _NOT_CODE:
      if not words:
        first = token.start[0]
      words.append(token.string)
      kinds.append(token.type)
      last = token.end[0]
