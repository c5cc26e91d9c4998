"""Errors that end a command with one line on standard error."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import click

from overlay.errors import IsthmusError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def run_async(
    command: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Result]:
    """Let click call a coroutine function."""

    @functools.wraps(command)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        return asyncio.run(command(*arguments, **options))

    return wrapper


def explain_errors(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Turn our errors into one line and exit status 1; bugs keep their traceback."""

    @functools.wraps(command)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return command(*arguments, **options)
        except IsthmusError as error:
            raise click.ClickException(str(error)) from error

    return wrapper
