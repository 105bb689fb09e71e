"""`python -m threefold`."""

import sys

from threefold.cli.main import main

sys.exit(main())
