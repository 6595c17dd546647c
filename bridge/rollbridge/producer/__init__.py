"""A producer with confluent-kafka's names: code written for that client moves by changing an import.

==============  =================================================================================
``producer``    the public object of the user
``settings``    confluent-kafka's settings: those accepted, and their effect
``messages``    arguments of delivery callbacks, the calls that are due, and errors as confluent-kafka's
==============  =================================================================================
"""

from rollbridge.producer.messages import ProducedMessage
from rollbridge.producer.producer import Producer

__all__ = ["ProducedMessage", "Producer"]
