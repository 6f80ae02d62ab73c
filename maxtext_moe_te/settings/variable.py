"""The environment variable that names an overlay for MaxText's unchanged command, and the .pth file through which Python sees it.

Also whether it still decides: a program that activates the plugin itself, or runs our command line, chooses the overlay itself.
"""

VARIABLE = "MAXTEXT_MOE_TE_OVERLAY"

# `site` runs single lines. Whatever is wrong with the package, Python starts; but who set the variable must not train without it unaware.
PTH = "maxtext_moe_te.pth"
PTH_LINE = (
  "import os; exec('try:\\n  from maxtext_moe_te import hook\\n  hook.install()\\nexcept Exception as e:\\n  import sys\\n"
  f'  print("maxtext-moe-te: error: {VARIABLE} is set, but the plugin is NOT active:", e, file=sys.stderr)\') '
  f'if os.environ.get("{VARIABLE}") else None\n'
)

_taken_over = False


def take_over() -> None:
  """From now on, and for good, the import hook does nothing in this process: who calls this decides on the overlay."""
  global _taken_over
  _taken_over = True


def taken_over() -> bool:
  return _taken_over
