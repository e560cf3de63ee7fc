"""The exceptions that a person is meant to read: one plain sentence each, no traceback on the command line."""


class InputError(ValueError):
    """Bad input, said in one plain sentence: what is wrong, and what to do about it.

    The command line prints the sentence and exits with code 2. Anything else that escapes is a bug.
    """


class NumericalError(ArithmeticError):
    """The model produced a number that is not finite; the message names where. Exit code 1 on the command line."""
