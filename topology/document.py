"""A YAML document whose every value knows its line, so that an error can say where to look.

Readers raise at the first thing they cannot use; `Problems` lets the next one go on all the same, so
that a file with three mistakes is mended in one go.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import yaml

from overlay.errors import show
from topology.errors import InvalidTopologyError

DOCUMENT_MAX_BYTES: Final = 1024 * 1024
PROBLEMS_SHOWN_MAX: Final = 20

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Value:
    """One value of the document. The reading methods raise InvalidTopologyError with line and remedy."""

    def __init__(self, source: str, path: str, node: yaml.Node) -> None:
        self._source = source
        self._node = node
        self.path = path
        """Where it is in the document, for example `lans.plant.edges`."""

    def error(self, message: str) -> InvalidTopologyError:
        """An error about this value: the message names what is wrong and what would do."""
        where = f"{self.path} " if self.path else ""
        line: int = self._node.start_mark.line + 1
        return InvalidTopologyError(f"{self._source}, line {line}: {where}{message}", line=line)

    @property
    def is_list(self) -> bool:
        """Whether it is a sequence."""
        return isinstance(self._node, yaml.SequenceNode)

    @property
    def is_map(self) -> bool:
        """Whether it is a mapping."""
        return isinstance(self._node, yaml.MappingNode)

    def entries(self) -> dict[str, "Value"]:
        """A mapping with any keys; a key that is given twice is an error."""
        if not isinstance(self._node, yaml.MappingNode):
            raise self.error(f"is {self._shown()}: give a mapping, `name: value` on lines of their own")
        found: dict[str, Value] = {}
        for key_node, value_node in self._node.value:
            key = Value(self._source, self.path, key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise key.error("has a key that is no text: use a plain name as key")
            name = key_node.value
            if name in found:
                raise key.error(f"has {name!r} twice: keep one of them")
            found[name] = Value(self._source, f"{self.path}.{name}" if self.path else name, value_node)
        return found

    def fields(self, known: Sequence[str]) -> dict[str, "Value"]:
        """A mapping with these keys at most."""
        found = self.entries()
        for name, value in found.items():
            if name not in known:
                raise value.error(f"is unknown: known are {', '.join(known)}")
        return found

    def items(self) -> Iterator["Value"]:
        """A sequence."""
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.error(f"is {self._shown()}: give a list, `- ...` on lines of their own")
        for index, node in enumerate(self._node.value):
            yield Value(self._source, f"{self.path}[{index}]", node)

    @property
    def is_null(self) -> bool:
        """Whether it is `null` or nothing at all."""
        return isinstance(self._node, yaml.ScalarNode) and self.plain() is None

    def text(self) -> str:
        """Text."""
        value = self.plain()
        if not isinstance(value, str):
            raise self.error(f"is {self._shown()}: give text")
        return value

    def integer(self, least: int, most: int) -> int:
        """A whole number between two limits."""
        value = self.plain()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"is {self._shown()}: give a whole number from {least} to {most}")
        if not least <= value <= most:
            raise self.error(f"is {value}: it must be from {least} to {most}")
        return value

    def number(self, least: float, most: float) -> float:
        """A number between two limits."""
        value = self.plain()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"is {self._shown()}: give a number from {least:g} to {most:g}")
        if not least <= value <= most:
            raise self.error(f"is {value:g}: it must be from {least:g} to {most:g}")
        return float(value)

    def plain(self) -> Any:
        """A scalar as Python has it; raises for anything else."""
        if not isinstance(self._node, yaml.ScalarNode):
            raise self.error(f"is {self._shown()}: give a single value")
        try:
            return yaml.constructor.SafeConstructor().construct_document(self._node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.error(f"is {show(self._node.value)}, which cannot be read: {error}") from error

    def _shown(self) -> str:
        if isinstance(self._node, yaml.ScalarNode):
            return show(self._node.value) if self._node.value else "empty"
        return "a list" if self.is_list else "a mapping"


class Problems:
    """Everything that is wrong with a document."""

    def __init__(self) -> None:
        self._found: list[InvalidTopologyError] = []

    def read(
        self,
        reader: Callable[Concatenate[Value, Parameters], Result],
        value: Value | None,
        default: Result,
        *arguments: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """What a reader makes of a value; the default if there is no value or the reader refuses it."""
        if value is None:
            return default
        try:
            return reader(value, *arguments, **options)
        except InvalidTopologyError as error:
            self._found.append(error)
            return default

    def add(self, error: InvalidTopologyError) -> None:
        """Note an error and go on."""
        self._found.append(error)

    def raise_if_any(self) -> None:
        """Raise all that was found as one error, in the order of the file."""
        if not self._found:
            return
        self._found.sort(key=lambda error: error.line)
        lines = [str(error) for error in self._found[:PROBLEMS_SHOWN_MAX]]
        if len(self._found) > PROBLEMS_SHOWN_MAX:
            lines.append(f"and {len(self._found) - PROBLEMS_SHOWN_MAX} more")
        raise InvalidTopologyError("\n".join(lines), line=self._found[0].line)


def read_document(source: str, text: str) -> Value:
    """The root of a YAML document; `source` names it in errors."""
    if len(text) > DOCUMENT_MAX_BYTES:
        raise InvalidTopologyError(
            f"{source} has {len(text)} characters, at most {DOCUMENT_MAX_BYTES} are read"
        )
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise InvalidTopologyError(f"{source}{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidTopologyError(f"{source}: not YAML: {str(error) or 'nested too deeply'}") from error
    if node is None:
        raise InvalidTopologyError(f"{source} is empty: see `topology/library/two-lans.yaml` for an example")
    return Value(source, "", node)
