"""``python -m trtllm_workshop`` is the ``workshop`` command, also where its script is not on PATH."""

import sys

from trtllm_workshop.cli import main

if __name__ == "__main__":
    sys.exit(main())
