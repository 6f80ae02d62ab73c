"""`python -m maxtext_moe_te.train ARGS`: MaxText's trainer with the plugin active. Owns nothing: see `cli`."""

import sys

from maxtext_moe_te.cli import main

if __name__ == "__main__":
  sys.exit(main(["train", *sys.argv[1:]]))
