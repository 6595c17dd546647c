"""Kafka's command-line tools at a gateway."""

from __future__ import annotations

from typing import Final

TOOLS: Final = "org.apache.kafka.tools"


TOPICS: Final = f"{TOOLS}.TopicCommand"


CONFIGS: Final = "kafka.admin.ConfigCommand"


OFFSETS: Final = f"{TOOLS}.GetOffsetShell"


TRANSACTIONS: Final = f"{TOOLS}.TransactionsCommand"


GROUPS: Final = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
