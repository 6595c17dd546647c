from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")

class ForceRetryError(Exception): ...
class RetryFailedError(Exception): ...
class InterruptedError(RetryFailedError): ...

class KazooRetry:
    def __init__(
        self,
        max_tries: int = ...,
        delay: float = ...,
        backoff: float = ...,
        max_jitter: float = ...,
        max_delay: float = ...,
        ignore_expire: bool = ...,
        sleep_func: Callable[[float], object] = ...,
        deadline: float | None = ...,
        interrupt: Callable[[], bool] | None = ...,
    ) -> None: ...
    def copy(self) -> KazooRetry: ...
    def reset(self) -> None: ...
    def __call__(self, func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T: ...
