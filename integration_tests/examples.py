"""The small programs of ``spark_examples``, which README and docs show as they stand, and how a newcomer runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "spark_examples"
PROGRAMS: Final = sorted(path for path in FOLDER.iterdir() if path.suffix in (".py", ".sh") and path.stem != "__init__")
ON_SPARK: Final = [path for path in PROGRAMS if path.name.startswith("spark_")]
PLAIN: Final = [path for path in PROGRAMS if path not in ON_SPARK]
_PATIENCE_S: Final = 300


def run_program(path: Path, environment: Mapping[str, str], folder: Path) -> str:
    """Run a program to its end in a folder of its own; return what it said on standard output.

    Raises:
        AssertionError: it failed; names it, with all that it said.
    """
    command = [sys.executable, str(path)] if path.suffix == ".py" else ["bash", "-euo", "pipefail", str(path)]
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={**os.environ, **environment, "PATH": search},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{path.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def run_all(programs: Sequence[Path], environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Run each program once; return what each said, by its name."""
    return {path.name: run_program(path, environment, folder) for path in programs}
