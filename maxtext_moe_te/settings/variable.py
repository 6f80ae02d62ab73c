"""The environment variable that names an overlay for MaxText's unchanged command, and the .pth file through which Python sees it.

Also whether it still decides: a program that activates the plugin itself, or runs our command line, chooses the overlay itself.
"""

VARIABLE = "MAXTEXT_MOE_TE_OVERLAY"

# `site` runs single lines. Whatever is wrong with the package, Python starts and other programs run; but who set the variable must not
# train without the plugin, so MaxText cannot be imported then.
_IF_BROKEN = f"""try:
  from maxtext_moe_te import hook
  hook.install()
except Exception as e:
  import sys
  why = " ".join(f"{{type(e).__name__}}: {{e}}".split())
  def find_spec(name, path=None, target=None, why=why):
    if name == "maxtext":
      raise ImportError(f"maxtext-moe-te: error: {VARIABLE} is set, and the plugin cannot be loaded ({{why}}); needed: "
        "a whole installation. Fix: pip install --force-reinstall --no-deps maxtext-moe-te.")
  sys.meta_path.insert(0, type("PluginIsBroken", (), {{"find_spec": staticmethod(find_spec)}}))
"""
PTH = "maxtext_moe_te.pth"
PTH_LINE = f'import os; exec({_IF_BROKEN!r}) if os.environ.get("{VARIABLE}") else None\n'

_taken_over = False


def take_over() -> None:
  """From now on, and for good, the import hook does nothing in this process: who calls this decides on the overlay."""
  global _taken_over
  _taken_over = True


def taken_over() -> bool:
  return _taken_over
