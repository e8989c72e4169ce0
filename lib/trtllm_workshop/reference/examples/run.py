"""examples/run.py of the reference toolchain."""

import sys

from trtllm_workshop.reference.run_cli import main, make_parser

__all__ = ["make_parser"]

if __name__ == "__main__":
    sys.exit(main())
