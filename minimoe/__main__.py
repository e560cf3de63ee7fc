"""`python -m minimoe`."""

import sys

from minimoe.cli import main

sys.exit(main())
