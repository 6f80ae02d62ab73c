"""`python -m maxtext_moe_te …` is `maxtext-moe-te …`."""

import sys

from maxtext_moe_te.cli import main

if __name__ == "__main__":
  sys.exit(main())
