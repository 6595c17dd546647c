"""Options are checked when they are made, all of them at once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from rollbridge.config import ClientOptions
from rollbridge.errors import ConfigError


def test_the_defaults_are_valid_and_say_a_day() -> None:
    options = ClientOptions()
    assert options.lease == timedelta(hours=24)
    assert options.lease_max == timedelta(days=7)
    assert options.codec == 0


@pytest.mark.parametrize("name", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_codecs_are_named_as_kafka_names_them(name: str) -> None:
    assert ClientOptions(compression=name).codec.name.lower() == name


def test_every_fault_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        ClientOptions(
            compression="rar",
            frame_bytes=1,
            linger_s=0,
            buffer_bytes=1,
            backpressure_timeout_s=-1,
            lease=timedelta(days=8),
            open_transactions_max=0,
        )
    for name in (
        "compression",
        "frame_bytes",
        "linger_s",
        "buffer_bytes",
        "backpressure_timeout_s",
        "lease",
        "open_transactions_max",
    ):
        assert f"{name}:" in str(refused.value)
