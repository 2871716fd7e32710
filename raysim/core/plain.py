"""Names for data without a type of their own: what YAML and JSON hold."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Plain: TypeAlias = Any
"""Null, text, numbers, truth values, and lists and dictionaries of such, as YAML or JSON gave them."""
PlainDict: TypeAlias = dict[str, Any]
"""A YAML or JSON mapping that may be changed."""
PlainMapping: TypeAlias = Mapping[str, Any]
"""A YAML or JSON mapping to read, such as the checked keys of a plug-in or a summary."""
