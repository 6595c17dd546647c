"""``python -m bridge`` is the ``rollbridge`` command."""

import sys

from bridge.cli.main import main

sys.exit(main())
