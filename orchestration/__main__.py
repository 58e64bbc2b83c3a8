"""`python -m orchestration` is `penumbra`."""

import sys

from orchestration.cli import main

if __name__ == "__main__":
    sys.exit(main())
