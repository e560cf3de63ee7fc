"""The exceptions that a person is meant to read: one plain sentence each, no traceback on the command line."""


class InputError(ValueError):
    """Bad input, said in one plain sentence: what is wrong, and what to do about it.

    The command line prints the sentence and exits with code 2. Anything else that escapes is a bug.
    """


class NumericalError(ArithmeticError):
    """The model produced a number that is not finite; the message names where. Exit code 1 on the command line."""


def router_error(layer: int) -> NumericalError:
    """What is raised for router logits that are not finite."""
    causes = "the weights, the inputs or what the rule made of a layer before it are" if layer else "the weights are"
    return NumericalError(f"layer {layer}: the router logits are not finite; {causes} broken.")


def described(error: BaseException) -> str:
    """What somebody else's code raised, for the end of a sentence: its type and, if it says something, that."""
    return f"{type(error).__name__}: {error}".removesuffix(".").removesuffix(": ")


def shown(value: object, longest: int = 60) -> str:
    """A value as it stands in a sentence: its repr, cut where it is long; never an error of its own."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or lists within lists
        return f"something too long to show ({type(value).__name__})"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
