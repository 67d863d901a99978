"""``python -m moefuse``."""

import sys

from moefuse.cli.main import main

sys.exit(main())
