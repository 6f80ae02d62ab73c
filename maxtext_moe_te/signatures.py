"""What another package has, by name and signature: of the module that is imported, else read from its source, which imports nothing.

A package that cannot be imported here (no driver, no GPU) or should not be yet is judged like one that runs.
"""

import ast
import functools
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path

_KINDS_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Call:
  """One thing we use of a package.

  Args:
    module: below the package, "jax.ep".
    name: of a function, class or constant in it, "MeshResource" or "GroupedGemmPrimitive.abstract".
    positional: the parameters that get arguments by position, as the package calls them; "*name" takes what is left. None: the name
      must be there, and nothing is known of how it is called.
    named: the parameters that get arguments by name.
  """

  module: str
  name: str
  positional: tuple[str, ...] | None = None
  named: tuple[str, ...] = ()

  def __str__(self):
    return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(frozen=True)
class Package:
  """A package's source.

  Args:
    folder: the package's own.
    imported: whether modules of it that this process has imported are asked instead. Not for a tree that lies somewhere else.
  """

  folder: Path
  imported: bool = False

  @classmethod
  def installed(cls, name: str) -> "Package | None":
    """The package that `import name` would find or has found, or None. A module without a place, as tests make them, is none."""
    try:
      spec = importlib.util.find_spec(name)
    except ValueError:
      return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return cls(Path(folders[0]), imported=True) if folders else None

  def constant(self, module: str, name: str):
    """The value of a constant that the source writes out, or None. Always of the source."""
    read = _module(self.folder, module)
    node = read[0].get(name) if read else None
    named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    return ast.literal_eval(node.value) if named and _is_literal(node.value) else None

  def has(self, module: str, name: str) -> bool:
    """Whether a module has a name, "Class.attribute" among them."""
    return self.find(module, name) is not None

  def problem(self, call: Call) -> str:
    """Why a call would fail or mean something else, or nothing. Names the parameter."""
    found = self.find(call.module, call.name)
    if found is None:
      return f"has no {call}"
    if call.positional is None:
      return ""
    if not isinstance(found, Signature):
      return f"has {call}, whose parameters cannot be read"
    return _problem(call, found)

  def find(self, module: str, name: str) -> "Signature | bool | None":
    """The signature of a function or class of a module; True for what is there and has none; None for what is not there."""
    loaded = sys.modules.get(".".join(filter(None, (self.folder.name, module)))) if self.imported else None
    return _of_source(self.folder, module, name) if loaded is None else _of_object(loaded, name)


def _is_literal(node):
  return all(isinstance(part, ast.Constant | ast.Tuple | ast.Load) for part in ast.walk(node))


def _problem(call, signature):
  parameters = list(signature.parameters.values())
  by_position = [p.name for p in parameters if p.kind in _KINDS_BY_POSITION]
  by_position += [f"*{p.name}" for p in parameters if p.kind is Parameter.VAR_POSITIONAL]
  if tuple(by_position[: len(call.positional)]) != call.positional:
    return f"has {call}({', '.join(by_position)}), and ({', '.join(call.positional)}) are passed"
  # Not what **kwargs would swallow: a parameter that was renamed must not go unnoticed.
  by_name = {p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)} - set(call.positional)
  for name in call.named:
    if name not in by_name:
      return f"has {call} without a parameter {name}"
  for p in parameters:
    optional = p.default is not Parameter.empty or p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    if not optional and p.name not in (*call.positional, *call.named):
      return f"has {call} with a parameter {p.name}, which is not passed"
  return ""


def _of_object(module, name):
  value = module
  for part in name.split("."):
    try:
      value = getattr(value, part)
    except AttributeError:
      return None
  try:
    return inspect.signature(value)
  except (TypeError, ValueError):  # no callable, or one of C
    return True


def _of_source(folder: Path, module: str | None, name: str, seen=()):
  """What `Package.find` gives, from the source below the package's folder. Attributes that a class inherits are not found."""
  read = _module(folder, module) if module is not None and (module, name) not in seen else None
  if read is None:
    return None
  names, stars, is_package = read
  head, *rest = name.split(".")
  node, seen = names.get(head), (*seen, (module, name))
  if node is None:
    found = (_of_source(folder, _target(folder, module, star, is_package), name, seen) for star in stars)
    return next((one for one in found if one is not None), None)
  if isinstance(node, tuple):  # imported from elsewhere under its first name
    origin, original = node
    target = _target(folder, module, origin, is_package)
    return True if target is None else _of_source(folder, target, ".".join((original, *rest)), seen)
  in_class = False
  for part in rest:
    node = _bindings(node.body).get(part) if isinstance(node, ast.ClassDef) else None
    in_class = True
  return _signature(node, in_class)


@functools.cache
def _module(folder: Path, module: str):
  """(bindings, imports of everything, whether it is a package) of a module; None where there is none or it cannot be read."""
  path = folder.joinpath(*filter(None, module.split(".")))
  is_package = (path / "__init__.py").is_file()
  file = path / "__init__.py" if is_package else path.with_suffix(".py")
  try:
    body = ast.parse(file.read_bytes()).body
    stars = [node for node in body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return _bindings(body), stars, is_package
  except (OSError, SyntaxError, ValueError):
    return None


def _bindings(body):
  """Name to definition, the last one of each; (origin, name) for what is imported."""
  names = {}
  for node in body:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      names[node.name] = node
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        names |= {name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)}
    elif isinstance(node, ast.ImportFrom):
      names |= {alias.asname or alias.name: (node, alias.name) for alias in node.names if alias.name != "*"}
    elif isinstance(node, ast.If | ast.Try | ast.With):
      handlers = [handler.body for handler in getattr(node, "handlers", ())]
      # What is tried first counts, and the first branch of an `if`.
      for block in (getattr(node, "finalbody", []), getattr(node, "orelse", []), *handlers, node.body):
        names |= _bindings(block)
  return names


def _target(folder, module, origin, is_package):
  """The module below the package that an `import from` names; None if it is in another package."""
  if origin.level == 0:
    first, _, rest = (origin.module or "").partition(".")
    return rest if first == folder.name else None
  here = module.split(".") if module else []
  above = origin.level - 1 if is_package else origin.level
  return ".".join([*here[: len(here) - above], *filter(None, [origin.module])])


def _signature(node, in_class):
  if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    return _of_arguments(node.args, skip_first=in_class and not static)
  if isinstance(node, ast.ClassDef):
    members = _bindings(node.body)
    if "__init__" in members:
      return _signature(members["__init__"], True)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
      fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)]
      kind = Parameter.POSITIONAL_OR_KEYWORD
      return Signature([Parameter(f.target.id, kind, default=Parameter.empty if f.value is None else ...) for f in fields])
  return True if node is not None else None


def _of_arguments(arguments, skip_first):
  positional = [(a, Parameter.POSITIONAL_ONLY) for a in arguments.posonlyargs]
  positional += [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in arguments.args]
  required = len(positional) - len(arguments.defaults)
  defaults = [Parameter.empty] * required + [...] * len(arguments.defaults)
  parameters = [Parameter(a.arg, kind, default=default) for (a, kind), default in zip(positional, defaults)]
  if arguments.vararg:
    parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
  for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
    parameters.append(Parameter(a.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...))
  if arguments.kwarg:
    parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
  return Signature(parameters[1:] if skip_first else parameters)
