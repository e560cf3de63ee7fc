"""What follows --router: built-in names and keys, rules from a user's own file or module, and every refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from curves import context, curves
from hypothesis import given, settings
from hypothesis import strategies as st

import minimoe
from minimoe.errors import InputError
from minimoe.routers import ROUTERS, Router
from minimoe.routers.elbow import Elbow
from minimoe.routers.min_p import MinP
from minimoe.routers.spec import parameters, parse_router
from minimoe.routers.threshold import Threshold
from minimoe.routers.top_k import TopK
from minimoe.routers.top_p import TopP
from minimoe.routing import Routing

DATACLASS_RULE = """
    from __future__ import annotations

    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Literal

    import torch

    from minimoe.routers import PrefixRouter

    if TYPE_CHECKING:
        from minimoe.routers import RouterContext

    Mode = Literal["few", "many"]

    @dataclass(frozen=True, kw_only=True)
    class Alternate(PrefixRouter):
        first: int
        share: float | None = None
        mode: Mode = "few"
        loud: bool = False

        def count(self, sorted_probs_TE: torch.Tensor, context: RouterContext) -> torch.Tensor:
            return self.first + torch.arange(len(sorted_probs_TE)) % 2
"""

PLAIN_RULE = """
    from __future__ import annotations

    import torch

    from minimoe.routers import Router, rank
    from minimoe.routing import Routing

    class Fixed(Router):
        def __init__(self, k: int, scale: float = 1.0, **unused: int) -> None:
            self.k = k
            self.scale = scale

        def route(self, logits_TE, context):
            probs_TE, experts_TE = rank(logits_TE)
            T, E = logits_TE.shape
            k_T = torch.full((T,), self.k)
            return Routing(experts_TE[:, : self.k], probs_TE[:, : self.k] * self.scale, k_T, E)
"""

# Knows nothing of minimoe's classes but the plain data it must return.
DUCK_RULE = """
    import torch

    from minimoe.routing import Routing

    class First:
        def route(self, logits_TE, context):
            T, E = logits_TE.shape
            return Routing(torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), torch.ones(T, dtype=torch.int64), E)
"""


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("elbow", Elbow()),
        (" elbow ", Elbow()),
        ("elbow:", Elbow()),
        ("elbow:cap=16,floor=2,renorm=kept,reading=printed", Elbow(cap=16, floor=2, renorm="kept", reading="printed")),
        ("top_k", TopK()),
        ("top-k:k=4", TopK(k=4)),
        ("top_k:k=none", TopK()),
        ("top_p:p=0.6,cap=16", TopP(p=0.6, cap=16)),
        ("top-p: p = 0.6 , cap = 16 ,", TopP(p=0.6, cap=16)),
        ("min-p:p=1e-1", MinP(p=0.1)),
        ("threshold:p=0", Threshold(p=0.0)),
        ("threshold:p=None,floor=0", Threshold(floor=0)),
    ],
)
def test_a_spec_builds_the_rule_that_it_names(spec: str, rule: Router) -> None:
    assert parse_router(spec) == rule


@pytest.mark.parametrize("name", [name for name, rule in ROUTERS.items() if rule.needs == "nothing"])
def test_every_registered_name_works_alone_and_with_dashes(name: str) -> None:
    assert parse_router(name) == ROUTERS[name]() == parse_router(name.replace("_", "-"))


def test_built_rules_pass_through_whether_or_not_they_inherit() -> None:
    class Duck:
        def route(self, logits_TE: Any, context: Any) -> Any: ...

    rule, duck = Elbow(cap=3), Duck()
    assert parse_router(rule) is rule
    assert parse_router(duck) is duck  # type: ignore[arg-type]
    for unbuilt in (Duck, Elbow, None, 8, ["elbow"]):
        with pytest.raises(InputError, match=r"a text such as 'elbow' or an object with a route method"):
            parse_router(unbuilt)  # type: ignore[arg-type]


NAMES = re.escape(", ".join(ROUTERS))
REFUSED = {
    "": f"unknown router ''; choose one of {NAMES}",
    "elbw": f"unknown router 'elbw'; choose one of {NAMES}",
    "Elbow": f"unknown router 'Elbow'; choose one of {NAMES}",
    ":p=1": f"unknown router ''; choose one of {NAMES}",
    "elbow:p=0.5": "router elbow has no key 'p'; its keys are cap, floor, renorm, reading",
    "top_p:q=0.5": "router top_p has no key 'q'; its keys are cap, floor, renorm, p",
    "top_p:p": "router top_p: write key=value, not 'p'",
    "top_p:p=0.5,p=0.6": "router top_p: p is given twice",
    "top_p:p=half": "router top_p: p must be a number, not 'half'",
    "top_p:p=": "router top_p: p must be a number, not ''",
    "top_p:p=1.5": "router top_p: p must be a number from 0 to 1, not 1.5",
    "top_p:p=nan": "router top_p: p must be a number from 0 to 1, not nan",
    "top_p:p=none": "router top_p: p must be a number, not 'none'",
    f"top_k:k={'9' * 5000}": r"router top_k: k must be a whole number, not '9{50,60}\.\.\.\.",
    f"mask:forbid={'9' * 5000}": r"router mask: forbid takes whole numbers .* not '9{50,60}\.\.\.\.",
    "mixed_k:k=1e400": "router mixed_k: k must be a number above 0, not inf",
    "top_k:k=2.5": "router top_k: k must be a whole number, not '2.5'",
    "top_k:k=0": "router top_k: k must be a whole number of at least 1, not 0",
    "elbow:renorm=sum": "router elbow: renorm must be one of model, none, kept, topk, not 'sum'",
    "elbow:reading=": "router elbow: reading must be one of program, printed, not ''",
    "elbow:floor=3,cap=2": "router elbow: floor 3 is above cap 2",
    "./absent.py:Rule": r"there is no file absent\.py",
    "folder.py:Rule": r"there is no file folder\.py",
    "absent_package.rules:Rule": "absent_package.rules could not be imported: ModuleNotFoundError",
    "./no_suffix:Rule": r"write \./no_suffix\.py:Class",
    "rules.py": r"say which class of rules\.py is the router, as in rules\.py:MyRule",
    "rules.py:": r"say which class of rules\.py is the router",
    "rules.py:Absent": r"rules\.py has no class 'Absent'; it has Picky, NoRoute, NoCount, NotARule, Broken",
    "rules.py:function": r"rules\.py has no class 'function'; it has Picky",
    "rules.py:constant": r"rules\.py has no class 'constant'; it has Picky",
    "rules.py:NoRoute": r"rules\.py:NoRoute is unfinished: it lacks route",
    "rules.py:NoCount": r"rules\.py:NoCount is unfinished: it lacks count",
    "rules.py:PrefixRouter": r"rules\.py:PrefixRouter is unfinished: it lacks count",
    "rules.py:NotARule": r"router rules\.py:NotARule is not a rule: it has no route method",
    "rules.py:Picky": r"router rules\.py:Picky needs a value for k, size, as in rules\.py:Picky:k=VALUE",
    "rules.py:Picky:size=4": r"router rules\.py:Picky needs a value for k, as in",
    "rules.py:Picky:k=3,size=4,colour=red": r"router rules\.py:Picky has no key 'colour'; its keys are k, size, deep",
    "rules.py:Picky:k=3,size=3": r"router rules\.py:Picky: size must be one of 4, 8, not '3'",
    "rules.py:Picky:k=x,size=4": r"router rules\.py:Picky: k must be a whole number, not 'x'",
    "rules.py:Picky:k=3,size=4,deep=maybe": r"router rules\.py:Picky: deep must be true or false, not 'maybe'",
    "rules.py:Broken": r"router rules\.py:Broken could not be built: ZeroDivisionError: division by zero",
    "rules.py:Broken:k=1": r"router rules\.py:Broken has no key 'k'; its keys are \(none\)",
    "raises.py:Rule": r"raises\.py could not be imported: KeyError: 'gone'",
    "syntax.py:Rule": r"syntax\.py could not be imported: SyntaxError",
    "exits.py:Rule": r"exits\.py could not be imported: SystemExit: 3",
    "empty.py:Rule": r"empty\.py has no class 'Rule'; it has no class",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the faulty files that REFUSED names."""
    write(
        tmp_path / "rules.py",
        """
        from typing import Literal

        from minimoe.routers import PrefixRouter, Router

        class Picky(Router):
            def __init__(self, k: int, size: Literal[4, 8], deep: bool = False) -> None:
                self.arguments = (k, size, deep)

            def route(self, logits_TE, context): ...

        class NoRoute(Router): ...

        class NoCount(PrefixRouter): ...

        class NotARule: ...

        class Broken(Picky):
            def __init__(self):
                1 / 0

        def function(): ...

        constant = 3
        """,
    )
    write(tmp_path / "raises.py", "{}['gone']")
    write(tmp_path / "syntax.py", "class Rule(:")
    write(tmp_path / "exits.py", "raise SystemExit(3)")
    write(tmp_path / "empty.py", "")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spec", REFUSED)
def test_a_bad_spec_is_refused_in_one_plain_sentence(spec: str, folder: Path) -> None:
    with pytest.raises(InputError, match=REFUSED[spec]) as caught:
        parse_router(spec)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


@given(st.sampled_from(sorted(ROUTERS)), st.text(alphabet="pkcaflornm=,:-_ 0123.5e\n\0é", max_size=30))
@settings(deadline=None)
def test_whatever_follows_a_name_is_a_rule_or_a_refusal(name: str, text: str) -> None:
    try:
        rule = parse_router(f"{name}:{text}")
    except InputError:
        return
    assert type(rule) is ROUTERS[name]


def test_a_dataclass_in_a_file_with_postponed_annotations(tmp_path: Path) -> None:
    path = write(tmp_path / "my-rules.py", DATACLASS_RULE)
    rule: Any = parse_router(f"{path}:Alternate:first=2,share=0.5,mode=many,loud=TRUE,cap=4,renorm=kept")
    assert (rule.first, rule.share, rule.mode, rule.loud, rule.cap) == (2, 0.5, "many", True, 4)
    routing = rule.route(curves(8, T=4), context(4))
    routing.check()
    assert routing.k_T.tolist() == [2, 3, 2, 3]
    assert routing.weights_TK.sum(1).tolist() == pytest.approx([1] * 4)
    assert [p.annotation for p in parameters(type(rule)).values()][:2] == [int | None, int]
    with pytest.raises(InputError, match="mode must be one of few, many, not 'most'"):
        parse_router(f"{path}:Alternate:first=2,mode=most")


def test_a_plain_class_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rules" / "fixed.py", PLAIN_RULE)
    monkeypatch.chdir(tmp_path)
    for path in ("rules/fixed.py", "./rules/fixed.py"):
        rule: Any = parse_router(f"{path}:Fixed:k=3,scale=2")
        assert (rule.k, rule.scale, type(rule.scale)) == (3, 2.0, float)
        routing = rule.route(curves(8, T=5), context(5))
        routing.check()
        assert routing.k_T.tolist() == [3] * 5
    with pytest.raises(InputError, match="has no key 'unused'"):
        parse_router("rules/fixed.py:Fixed:k=3,unused=1")


def test_values_reach_the_class_in_the_types_that_it_declares(folder: Path) -> None:
    rule: Any = parse_router("rules.py:Picky:k=3,size=8,deep=true")
    assert rule.arguments == (3, 8, True)
    assert [type(value) for value in rule.arguments] == [int, int, bool]


def test_a_class_by_module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "spec_package" / "__init__.py", "")
    write(tmp_path / "spec_package" / "rules.py", PLAIN_RULE)
    monkeypatch.syspath_prepend(tmp_path)
    rule: Any = parse_router("spec_package.rules:Fixed:k=2")
    assert rule.k == 2
    assert parse_router("minimoe.routers:Elbow:cap=3") == Elbow(cap=3)
    with pytest.raises(InputError, match=r"spec_package\.rules has no class 'Elbow'; it has Fixed"):
        parse_router("spec_package.rules:Elbow")


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    first = write(tmp_path / "a" / "rule.py", DATACLASS_RULE)
    second = write(tmp_path / "b" / "rule.py", DATACLASS_RULE.replace('"few", "many"', '"many", "most"'))
    a = parse_router(f"{first}:Alternate:first=1,mode=few")
    b = parse_router(f"{second}:Alternate:first=1,mode=most")
    assert type(a) is not type(b)
    assert type(a).__module__ != type(b).__module__
    for rule, modes in ((a, ("few", "many")), (b, ("many", "most"))):
        assert parameters(type(rule))["mode"].annotation.__args__ == modes


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rule.py", DUCK_RULE)
    assert not hasattr(parse_router(f"{path}:First"), "version")
    write(path, DUCK_RULE.replace("class First:", "class First:\n        version = 'the second'\n"))
    assert hasattr(parse_router(f"{path}:First"), "version")


@pytest.mark.parametrize("built", [False, True])
def test_a_users_own_rule_runs_in_the_engine(built: bool, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """A class that inherits nothing: minimoe needs no change for a rule that it has never heard of."""
    spec = f"{write(tmp_path / 'rule.py', DUCK_RULE)}:First"
    engine = minimoe.load(checkpoint("base"), router=parse_router(spec) if built else spec)
    result: Any = engine.generate([5, 6, 7], max_new_tokens=3, temperature=0)
    assert len(result.routing) == engine.config.num_layers
    for routing in result.routing:
        routing.check()
        assert torch.equal(routing.experts_TK, torch.zeros(5, 1, dtype=torch.int64))


def test_a_key_of_several_types_takes_the_first_that_fits(tmp_path: Path) -> None:
    (tmp_path / "either.py").write_text(
        "class Either:\n"
        "    def __init__(self, x: int | float | None = None):\n"
        "        self.x = x\n"
        "    def route(self, logits_TE, context): ...\n"
    )
    values = [parse_router(f"{tmp_path}/either.py:Either:x={text}").x for text in ("3", "0.5", "none")]  # type: ignore[attr-defined]
    assert [repr(value) for value in values] == ["3", "0.5", "None"]
    with pytest.raises(InputError, match="x must be a number"):
        parse_router(f"{tmp_path}/either.py:Either:x=many")


class Misrouted:
    """A rule built in Python that returns whatever it was given."""

    def __init__(self, routing: Any) -> None:
        self.routing = routing

    def route(self, logits_TE: Any, context: Any) -> Any:
        return self.routing


@pytest.mark.parametrize(
    ("routing", "says"),
    [
        (None, "must return a Routing, not NoneType"),
        (Routing.empty(8), r"was given logits \[2, 8\]"),
        (Routing(torch.full((2, 1), 70), torch.ones(2, 1), torch.ones(2, dtype=torch.int64), 8), "broken Routing"),
        (
            Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), torch.ones(2, dtype=torch.int64), 64),
            "logits",
        ),
    ],
)
def test_what_a_rule_built_in_python_returns_is_tested(
    routing: Any, says: str, checkpoint: Callable[..., Path]
) -> None:
    rule: Any = Misrouted(routing)
    with pytest.raises(InputError, match=f"router Misrouted .*{says}"):
        minimoe.load(checkpoint(), router=rule).generate([5, 6], max_new_tokens=1)
