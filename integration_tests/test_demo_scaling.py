"""What ``make demo-scaling`` shows, with less load: a stream splits and merges, and every record is read once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration_tests.backends.interface import AnyCluster
from integration_tests.clients import Site
from spark_examples.demo.scaling import SECONDS, play


@pytest.fixture
def site(cluster: AnyCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(cluster, "/demo-scaling", tmp_path_factory.mktemp("coordinators"), **SECONDS) as site:
        yield site


def test_a_stream_follows_its_load(site: Site, scope: str, capsys: pytest.CaptureFixture[str]) -> None:
    with site.connect("demo") as b:
        assert play(b, f"{scope}/clicks", [(400, 10)])
    told = capsys.readouterr().out
    assert "cut at quantiles of" in told
    assert "once each and in order: yes" in told
