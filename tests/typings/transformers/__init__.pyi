# For the type checker alone: to read the package as it is, with all its models, takes it 10 of 34 seconds.
from typing import Any

def __getattr__(name: str) -> Any: ...
