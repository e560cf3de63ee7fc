"""A rule that the user wrote: whatever goes wrong in it is told as a sentence, since the user can mend it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from typing import Any

from torch import Tensor

from minimoe.errors import InputError, described
from minimoe.probe import Phase
from minimoe.routers import Router, RouterContext
from minimoe.routers.base import check_routing
from minimoe.routers.spec import parse_router
from minimoe.routing import Routing


def read_router(spec: str, *, every_pass: bool = True) -> Router:
    """The rule of a SPEC; one that is not minimoe's own is watched.

    Args:
        spec: see minimoe.routers.spec.parse_router.
        every_pass: see OwnRule.

    Raises:
        InputError: as parse_router does.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what a user's file prints when it is imported
        rule = parse_router(spec)
    if type(rule).__module__.partition(".")[0] == "minimoe":
        return rule
    return OwnRule(rule, spec, every_pass=every_pass)


class OwnRule(Router):
    """Passes everything on to a rule, and names the rule and the line where it fails.

    Args:
        rule: any object with a `route` method.
        spec: what the user called it.
        every_pass: test each Routing against all that it promises. That takes a little time; without it, of what comes
            after the first of each layer and phase only types and shapes are.
    """

    def __init__(self, rule: Any, spec: str, *, every_pass: bool) -> None:
        self.rule = rule
        self.sees = getattr(rule, "sees", "itself")  # type: ignore[misc] # of the rule, not of this class
        self.spec = spec
        self._every_pass = every_pass
        self._tested: set[tuple[int, Phase]] = set()

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """What the rule says.

        Raises:
            InputError: the rule raised something, or what it returned is no valid Routing for these tokens.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the text, or for the one JSON document
                routing = self.rule.route(logits_TE.clone(), context)  # which it may write to
        except (InputError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a script may well call sys.exit
            raise InputError(f"router {self.spec} failed{self._line(error)}: {described(error)}.") from error
        values = self._every_pass or (context.layer, context.phase) not in self._tested
        check_routing(routing, logits_TE, f"router {self.spec}", values=values)
        self._tested.add((context.layer, context.phase))
        return routing

    def _line(self, error: BaseException) -> str:
        """The last line of the user's own file that ran."""
        path = inspect.getsourcefile(type(self.rule))
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        return f" in line {lines[-1]} of {path}" if lines else ""
