"""The lines of README that name one's own cluster, run against servers that ``rollbridge up`` has not started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from integration_tests.backends.choice import new_cluster
from integration_tests.clients import read_committed
from integration_tests.kafka_tools import create_topic, produce
from integration_tests.patience import PATIENCE_S

README = Path(__file__).parents[1] / "README.md"
SECTION = re.compile(r"^## Next to your Kafka\n.*?^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_lines_of_readme_bring_a_first_transaction_into_a_topic_of_ones_own(tmp_path: Path) -> None:
    found = SECTION.search(README.read_text(encoding="utf-8"))
    assert found is not None
    lines = "\n".join(line.removeprefix("$ ") for line in found[1].splitlines())
    assert len(lines.splitlines()) <= 8
    with new_cluster() as cluster:
        create_topic(cluster.bootstrap_servers, "shop.orders", 3)
        produce(cluster.bootstrap_servers, "shop.orders", [b"before"])
        for named, real in (("kafka-1:9092", cluster.bootstrap_servers), ("zookeeper-1:2181", cluster.zookeeper)):
            assert named in lines
            lines = lines.replace(named, real)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p); wait' EXIT\n{lines}"],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("ROLLBRIDGE_")},
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        messages = read_committed(cluster.bootstrap_servers, ["shop.orders"], partitions=3)
    assert "Stream topics/shop_orders is topic shop.orders with its 3 partitions." in done.stdout
    assert "Traceback" not in done.stderr
    values = [message.value() for message in messages]
    assert (values.count(b"before"), values.count(b"imported"), len(values)) == (1, 1_000, 1_001)
