"""A gateway with other limits of time: ``python hasty_gateway.py ARGUMENTS``.

``CONSTANT_REQUEST_S=1`` in its environment is a number in place of that constant, likewise of the others.
"""

from __future__ import annotations

import os
from typing import Final

from rollbridge_gateway.__main__ import main
from rollbridge_gateway.server import connection, framing, server

CONSTANTS: Final = {f"CONSTANT_{name}": name for name in ("FIRST_S", "IDLE_S", "REQUEST_S")}

if __name__ == "__main__":
    found = {name: float(os.environ[variable]) for variable, name in CONSTANTS.items() if variable in os.environ}
    for module in (connection, framing, server):
        vars(module).update(found)
    main()
