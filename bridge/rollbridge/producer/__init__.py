"""A producer with confluent-kafka's names: code that was written for it moves by changing an import.

==============  =================================================================================
``producer``    what the user calls
``settings``    confluent-kafka's settings, those that are taken, and what becomes of them
``message``     what delivery callbacks are given
``reports``     the calls of callbacks that are due
``faults``      our errors as confluent-kafka's
==============  =================================================================================
"""

from rollbridge.producer.messages import ProducedMessage
from rollbridge.producer.producer import Producer

__all__ = ["ProducedMessage", "Producer"]
