"""``python -m memlab``: the command ``memlab``, where it is not installed."""

import sys

from memlab.cli import main

sys.exit(main())
