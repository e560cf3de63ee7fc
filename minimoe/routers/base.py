"""What a routing rule is given, and what the rules that keep a prefix of the ranking share.

Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from minimoe.config import ModelConfig
from minimoe.errors import InputError, shown
from minimoe.native import kernels_for
from minimoe.prefix_rule import Count, Mass, PrefixRule
from minimoe.probe import Phase
from minimoe.routing import Routing

Renorm = Literal["model", "none", "kept", "topk"]
Sees = Literal["itself", "other tokens", "other tokens, also later ones"]
Needs = Literal["nothing", "calibration", "a recording"]


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a rule may know about the tokens it routes, besides their logits.

    Attributes:
        layer: index of the layer, from 0.
        phase: "prefill" or "decode"; a one-token prompt is a prefill.
        ids_T, positions_T, sequence_T: int64; token id, position in its own sequence, and which
            sequence of the batch the token belongs to.
        top_k: the model's own number of experts per token.
        norm_topk_prob: whether the model's own rule makes the kept weights sum to 1.
        generator: seeded randomness for rules that draw, or None.
        num_layers: how many layers the model has, or None where that is not known.
        checkpoint: gives the fingerprint of the model's router weights, see Olmoe.fingerprint; or None.
    """

    layer: int
    phase: Phase
    ids_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    top_k: int
    norm_topk_prob: bool
    generator: torch.Generator | None = None
    num_layers: int | None = None
    checkpoint: Callable[[], str] | None = None


def layer_contexts(
    config: ModelConfig,
    phase: Phase,
    ids_T: Tensor,
    positions_T: Tensor,
    sequence_T: Tensor,
    *,
    generator: torch.Generator | None = None,
    checkpoint: Callable[[], str] | None = None,
) -> list[RouterContext]:
    """What a rule may know of the same tokens in each layer of a model; see RouterContext."""
    return [
        RouterContext(
            layer=layer,
            phase=phase,
            ids_T=ids_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            top_k=config.top_k,
            norm_topk_prob=config.norm_topk_prob,
            generator=generator,
            num_layers=config.num_layers,
            checkpoint=checkpoint,
        )
        for layer in range(config.num_layers)
    ]


class Router(ABC):
    """A routing rule: sees router logits and a context, and nothing of the backend that will run the experts.

    Attributes:
        sees: which tokens decide about a token's experts: it alone, or others of the pass as well. A rule that sees
            tokens after it in its sequence decides otherwise in decode, where they are not there yet.
        needs: what the rule has to be given before it can run; nothing by default.
        example: keys that show the rule at work where its defaults do not.
    """

    sees: ClassVar[Sees] = "itself"
    needs: ClassVar[Needs] = "nothing"
    example: ClassVar[str] = ""

    @abstractmethod
    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Choose experts and weights for each of T tokens.

        Args:
            logits_TE: the gate's output in the model's dtype; finite.
            context: see RouterContext.
        """


def rank(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax in float32 and the experts in descending order of probability; ties go to the lowest id.

    Returns:
        (sorted_probs_TE float32, experts_TE int64). A stable sort settles ties alike on every device, which torch.topk
        does not. By the native kernels probabilities may differ from torch's in their last bit.
    """
    if kernels := kernels_for(logits_TE):
        return kernels.rank(logits_TE)
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return torch.sort(probs_TE, dim=-1, descending=True, stable=True)


def keep(sorted_probs_TE: Tensor, experts_TE: Tensor, k_T: Tensor, slots: int) -> Routing:
    """The Routing of each token's k_T best experts, as ranked by `rank`, in so many slots."""
    if kernels := kernels_for(sorted_probs_TE):
        return Routing(*kernels.keep(sorted_probs_TE, experts_TE, k_T, slots), k_T, experts_TE.shape[1])
    return Routing.from_ranking(experts_TE[:, :slots], sorted_probs_TE[:, :slots], k_T, experts_TE.shape[1])


def decide(router: Router, logits_TE: Tensor, context: RouterContext) -> Routing:
    """What a rule decides; tested where somebody else than minimoe wrote its `route`.

    Raises:
        InputError: it returned no Routing, a broken one, or one for other tokens or experts.
    """
    if _is_ours(router.route):
        return router.route(logits_TE, context)
    routing = router.route(logits_TE.clone(), context)
    check_routing(routing, logits_TE, f"router {type(router).__name__}")
    return routing


def _is_ours(code: Callable[..., Any]) -> bool:
    """Whether a method or a class is minimoe's own."""
    return getattr(code, "__module__", "").partition(".")[0] == "minimoe"


def check_routing(routing: object, logits_TE: Tensor, what: str, *, values: bool = True) -> None:
    """Refuse what is no sound Routing for these logits; a backend would read past its weights, or quietly do wrong.

    Args:
        values: test ids, weights and k as well, which takes longer than many a rule.

    Raises:
        InputError: names the rule (`what`) and what is wrong.
    """
    if not isinstance(routing, Routing):
        raise InputError(f"{what} must return a Routing, not {type(routing).__name__}.")
    try:
        routing.check() if values else routing.check_parts()
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"{what} returned a broken Routing: {error}.") from error
    if (routing.num_tokens, routing.num_experts) != tuple(logits_TE.shape):
        raise InputError(
            f"{what} was given logits {list(logits_TE.shape)} and returned experts "
            f"{list(routing.experts_TK.shape)} for a model of {routing.num_experts} experts."
        )


@dataclass(frozen=True, kw_only=True)
class PrefixRouter(Router):
    """A rule that keeps the k best experts of each token, and only has to say how many: `count`.

    Attributes:
        cap: the most experts a token may use; by default the model's own top-k.
        floor: the fewest, 1 by default.
        renorm: what the kept weights sum to. "none": they stay the raw softmax probabilities and pruned
            mass is lost; "kept": 1; "topk": the mass of the model's own top-k; "model" (default): "kept"
            where the model's config sets norm_topk_prob, else "none".
    """

    cap: int | None = None
    floor: int = 1
    renorm: Renorm = "model"

    def __post_init__(self) -> None:
        if self.cap is not None:
            check_count("cap", self.cap, 1)
        check_count("floor", self.floor, 0)
        if self.cap is not None and self.floor > self.cap:
            raise InputError(f"floor {shown(self.floor)} is above cap {shown(self.cap)}.")
        check_choice("renorm", self.renorm, Renorm)

    @abstractmethod
    def count(self, sorted_probs_TE: Tensor, context: RouterContext) -> Tensor:
        """How many of the best experts each token wants, int64 [T]; `route` applies floor and cap.

        Args:
            sorted_probs_TE: float32 softmax probabilities, each row in descending order.
        """

    def counted_by(self, context: RouterContext, num_experts: int) -> tuple[Count, float] | None:
        """What kernels know `count` by, and its number, in the context's layer; None: it has to be asked.

        It speaks for the `count` of the class that it stands in, and for no other.
        """
        return None

    def limit(self, context: RouterContext) -> int:
        """The most experts that this rule gives a token: the width of its Routing."""
        return context.top_k if self.cap is None else self.cap

    def prefix_rule(self, context: RouterContext, num_experts: int) -> PrefixRule | None:
        """What kernels follow in the context's layer, or None: `count` has to be asked."""
        counted = self.counted_by(context, num_experts) if _same_class(type(self), "count", "counted_by") else None
        if counted is None:
            return None
        return PrefixRule(*counted, self.floor, self.limit(context), self._mass(context), context.top_k)

    def route(self, logits_TE: Tensor, context: RouterContext) -> Routing:
        """Rank, count, cut.

        Raises:
            InputError: the cap is above the model's number of experts, the floor above the cap, or `count` did not
                return one whole number for each token.
        """
        num_experts = logits_TE.shape[-1]
        limit = self.limit(context)
        check_width(limit, num_experts)
        if self.floor > limit:
            raise InputError(f"the router's floor {shown(self.floor)} is above its cap of {limit} experts a token.")
        kernels = kernels_for(logits_TE)
        rule = self.prefix_rule(context, num_experts) if kernels else None
        if kernels and rule:
            return Routing(*kernels.prefix(logits_TE, rule), num_experts)
        sorted_probs_TE, experts_TE = rank(logits_TE)
        # A copy to count on: what a rule of somebody's own writes into it must not become weights.
        counted_TE = sorted_probs_TE if _is_ours(self.count) else sorted_probs_TE.clone()
        k_T = self._checked(self.count(counted_TE, context), logits_TE.shape[0]).clamp(self.floor, limit)
        routing = keep(sorted_probs_TE, experts_TE, k_T, limit)
        mass = self._mass(context)
        if mass == "none":
            return routing
        # float64, in which a sum hangs hardly on its order.
        kept_T = routing.weights_TK.double().sum(dim=-1)
        ones_T = torch.ones_like(kept_T)
        wanted_T = ones_T if mass == "kept" else sorted_probs_TE[:, : context.top_k].double().sum(dim=-1)
        # A token without experts has no mass to share out; its factor must not be 0 / 0.
        factor_T = torch.where(kept_T > 0, wanted_T / kept_T, ones_T).float()
        return Routing(routing.experts_TK, routing.weights_TK * factor_T[:, None], routing.k_T, num_experts)

    def _checked(self, k_T: Tensor, tokens: int) -> Tensor:
        """What `count` returned, as int64; anything but one whole number a token would quietly route wrong."""
        if isinstance(k_T, Tensor) and k_T.shape == (tokens,) and k_T.dtype in (torch.int64, torch.int32):
            return k_T.to(torch.int64)
        told = f"{k_T.dtype} {list(k_T.shape)}" if isinstance(k_T, Tensor) else type(k_T).__name__
        raise InputError(
            f"{type(self).__name__}.count must return one whole number for each token, int64 [{tokens}], not {told}."
        )

    def _mass(self, context: RouterContext) -> Mass:
        return ("kept" if context.norm_topk_prob else "none") if self.renorm == "model" else self.renorm


def _same_class(cls: type, *methods: str) -> bool:
    """Whether methods of a class all stand in the same one of those that it is derived from."""
    return len({next(base for base in cls.__mro__ if method in vars(base)) for method in methods}) == 1


def layer_rules(
    router: Router, config: ModelConfig, checkpoint: Callable[[], str] | None = None
) -> list[PrefixRule] | None:
    """What kernels follow in each layer of a model; None if the rule has to be asked about its tokens.

    That is what rules of somebody's own are, also if they are derived from minimoe's.

    Args:
        checkpoint: see RouterContext.

    Raises:
        InputError: the rule is for another model.
    """
    if not isinstance(router, PrefixRouter) or not _is_ours(type(router)):
        return None
    nobody_T, rules = torch.empty(0, dtype=torch.int64), []
    for context in layer_contexts(config, "decode", nobody_T, nobody_T, nobody_T, checkpoint=checkpoint):
        rule = router.prefix_rule(context, config.num_experts)
        if rule is None or not rule.fits(config.num_experts):
            return None  # what does not fit, the rule itself refuses when it is asked, with a sentence
        rules.append(rule)
    return rules


def check_fraction(name: str, value: float) -> None:
    """Refuse what is not a number from 0 to 1 (NaN included).

    Raises:
        InputError: names the key and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a number from 0 to 1, not {shown(value)}.")


def check_count(name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number of at least `least`.

    Raises:
        InputError: names the key and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {shown(value)}.")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Refuse what is not one of the values of a Literal type.

    Raises:
        InputError: names the key, the valid values and the value.
    """
    if value not in get_args(choices):
        raise InputError(f"{name} must be one of {', '.join(get_args(choices))}, not {shown(value)}.")


def draw(count: int, context: RouterContext) -> Tensor:
    """Uniform float64 numbers from 0 to 1, on the CPU so that every device draws the same; seeded by the context."""
    generator = torch.Generator().manual_seed(0) if context.generator is None else context.generator
    return torch.rand(count, generator=generator, dtype=torch.float64)


def split_mean(mean: float, tokens: int, uniform_T1: Tensor) -> Tensor:
    """Whole numbers for T tokens whose mean is as wanted: floor(mean) or one more, int64 [T].

    Systematic sampling: T times the fraction get one more, and a lone draw decides about the rest of a token, so that
    the mean is met to 1/T in every pass and exactly in expectation, even in passes of one token.

    Args:
        uniform_T1: T + 1 draws, see `draw`; the first T decide who gets more.
    """
    least = int(mean // 1)
    more = int((mean - least) * tokens + uniform_T1[-1].item())
    number_T = torch.full((tokens,), least, dtype=torch.int64)
    number_T[uniform_T1[:tokens].argsort()[:more]] += 1
    return number_T


def check_width(wanted: int, num_experts: int) -> None:
    """Refuse more experts per token than the model has.

    Raises:
        InputError: names both numbers.
    """
    if wanted > num_experts:
        raise InputError(f"the router asks for up to {shown(wanted)} experts a token, but the model has {num_experts}.")


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above 0.

    Raises:
        InputError: names the key and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InputError(f"{name} must be a number above 0, not {shown(value)}.")


def numbers(name: str, value: str | int | None) -> list[int]:
    """The whole numbers of a key that takes several: 3/17/40, or one alone.

    Raises:
        InputError: anything else.
    """
    if value is None:
        return []
    parts = [part.strip() for part in str(value).split("/")]
    # Python itself reads no number of thousands of digits.
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise InputError(f"{name} takes whole numbers with / between them, as in {name}=3/17, not {shown(value)}.")
    return [int(part) for part in parts]
