"""``python -m rollbridge`` is the ``rollbridge`` command."""

import sys

from rollbridge.cli.main import main

sys.exit(main())
