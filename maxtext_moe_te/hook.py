"""The plugin under MaxText's unchanged command: what happens when `MAXTEXT_MOE_TE_OVERLAY` names an overlay.

`install` is called by the .pth file that `maxtext-moe-te enable` writes, or by the patched MaxText, and only if the variable is set.
It puts a finder before Python's own, which

- runs `python -m maxtext.…` as our own command line does: both commands show errors and end in the same way;
- in any other program sets the overlay's environment when MaxText is imported, and activates the plugin when MaxText first resolves
  a configuration. A program that has started jax before is too early for XLA flags.

Worker processes of `multiprocessing` are left alone: they get their configuration from the process that made them. Imported at every
start of Python while the variable is set, so it loads nothing before it is needed.
"""

import os
import re
import sys
from importlib.machinery import PathFinder

from maxtext_moe_te.settings.variable import VARIABLE, take_over, taken_over

_HOST, _CONFIGURATION = "maxtext", "maxtext.configs.pyconfig"
_finder = None


def install() -> None:
  """Puts the finder in place: once per process, and never after somebody took over."""
  global _finder
  if _finder is not None or taken_over() or any(word.startswith("from multiprocessing.") for word in sys.orig_argv):
    return
  _finder = _Finder()
  sys.meta_path.insert(0, _finder)
  if _HOST in sys.modules:  # called by the patched MaxText
    _finder.host_starts()


class _Finder:
  def __init__(self):
    self._settled = None  # what our command line made of the variable, for a program that is not run by it

  def find_spec(self, name, path=None, target=None):
    del target
    if taken_over():
      return None
    if name == _HOST:
      self.host_starts()
    elif name in (_module_to_run(), f"{_module_to_run()}.__main__"):
      return _with_loader(_CommandLine, name, path)
    elif name == _CONFIGURATION:
      return _with_loader(lambda loader: _Activating(loader, self.activate), name, path)
    return None

  def host_starts(self):
    if _module_to_run() is None:
      from maxtext_moe_te import session

      _refuse_script()
      self._settled = session.settle([])

  def activate(self):
    if not taken_over():
      from maxtext_moe_te import session

      _, overlay, options = self._settled
      session.activate(overlay, options)


def _module_to_run():
  """The module of MaxText that `python -m` is looking for, or None: not `-m`, another package's, or already running."""
  if sys.argv[:1] != ["-m"]:
    return None
  word = sys.orig_argv[-len(sys.argv)]  # NAME, or -mNAME with other options before the m
  name = re.sub(r"^-\w*?m", "", word)
  return name if name.startswith(f"{_HOST}.") else None


def _refuse_script():
  """Ends a process that runs a file of MaxText's as a script: nothing can be put before what that file imports."""
  host = PathFinder.find_spec(_HOST)
  folder = os.path.join(os.path.realpath(next(iter(host.submodule_search_locations or ("",)))), "") if host else ""
  script = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
  if folder and script.startswith(folder):
    module = f"{_HOST}.{script.removeprefix(folder).removesuffix('.py').replace(os.sep, '.')}"
    print(
      f"maxtext-moe-te: error: {VARIABLE} is set and {script} was started as a script; needed: `python -m` and the module's name. "
      f"Fix: write python -m {module}.",
      file=sys.stderr,
    )
    sys.exit(2)


def _with_loader(loader, name, path):
  spec = PathFinder.find_spec(name, path)
  if spec is not None and spec.submodule_search_locations is None:
    spec.loader = loader(spec.loader)
  return spec


class _CommandLine:
  """The loader of the module to run, which has `session` run it instead."""

  def __init__(self, loader):
    del loader

  def get_code(self, name):
    return compile("from maxtext_moe_te import hook\nhook.run_command_line()", name, "exec")


def run_command_line() -> None:
  """Ends the process as `maxtext-moe-te run MODULE ARGS` does, for the MODULE and ARGS of this process."""
  from maxtext_moe_te import session

  take_over()
  module = sys.modules["__main__"].__spec__.name.removesuffix(".__main__")
  sys.exit(session.status_of(lambda: session.run(module, sys.argv[1:])))


class _Activating:
  """The loader of `pyconfig`: the first configuration that is resolved activates the plugin, and is then resolved under it."""

  def __init__(self, loader, activate):
    self._loader, self._activate = loader, activate

  def __getattr__(self, name):
    return getattr(self._loader, name)

  def exec_module(self, module):
    module.__loader__ = module.__spec__.loader = self._loader
    self._loader.exec_module(module)
    originals = {name: getattr(module, name) for name in ("initialize", "initialize_pydantic")}

    def first(name):
      def initialize(*args, **kwargs):
        vars(module).update(originals)
        self._activate()
        return getattr(module, name)(*args, **kwargs)

      return initialize

    # Not at once: what is just being imported may be what the plugin replaces.
    vars(module).update({name: first(name) for name in originals})
