"""Finding a Java that is new enough, among impostors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbridge.errors import LocalEnvironmentError
from rollbridge_devcluster.java import find_java


def fake(directory: Path, banner: str, code: int = 0) -> Path:
    """A ``java`` that says ``banner``."""
    directory.mkdir(parents=True, exist_ok=True)
    java = directory / "java"
    java.write_text(f"#!/bin/sh\necho '{banner}' >&2\nexit {code}\n", encoding="utf-8")
    java.chmod(0o755)
    return java


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))


@pytest.mark.parametrize(
    ("banner", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
    ],
)
def test_new_enough(banner: str, major: int, tmp_path: Path) -> None:
    java = fake(tmp_path / "path", banner)
    found = find_java()
    assert (found.executable, found.major, found.banner.strip()) == (str(java), major, banner)


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "path", 'openjdk version "17.0.1"')
    chosen = fake(tmp_path / "home" / "bin", 'openjdk version "21.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java().executable == str(chosen)


def test_an_old_java_home_does_not_hide_a_new_java_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = fake(tmp_path / "path", 'openjdk version "17.0.1"')
    fake(tmp_path / "home" / "bin", 'openjdk version "11.0.2"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java().executable == str(on_path)


@pytest.mark.parametrize(
    ("banner", "code", "expected"),
    [
        ('openjdk version "11.0.2" 2019-01-15', 0, "is Java 11"),
        ('java version "1.8.0_292"', 0, "is Java 8"),
        ("what?", 0, "of unknown version"),
        ("broken", 1, "does not run"),
    ],
)
def test_unusable_ones_are_named(banner: str, code: int, expected: str, tmp_path: Path) -> None:
    fake(tmp_path / "path", banner, code)
    with pytest.raises(LocalEnvironmentError, match=rf"Java 17 or newer is needed.*{expected}"):
        find_java()


def test_none_at_all() -> None:
    with pytest.raises(LocalEnvironmentError, match=r"no java on PATH and JAVA_HOME is not set.*install one"):
        find_java()


def test_a_java_home_without_java_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    with pytest.raises(LocalEnvironmentError, match=r"/nonexistent/bin/java .JAVA_HOME. does not run"):
        find_java()
