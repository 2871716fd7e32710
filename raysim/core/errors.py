"""The errors that a user can cause, told apart from faults of the program."""

from collections.abc import Sequence

from raysim.core.secrets import without_secrets

MOST_TEXT = 2_000  # characters of what a plug-in or a library raised that are shown


def described(error: BaseException) -> str:
    """`ValueError: its message`, in at most MOST_TEXT characters, also where the message cannot be had."""
    try:
        text = str(error)
    except Exception as cause:  # noqa: BLE001 - an exception of a user's own may raise anything when it is asked
        text = f"(its message raises {type(cause).__name__})"
    return f"{type(error).__name__}: {shortened(text)}"


def shortened(text: str) -> str:
    """The beginning and the end of a text that is longer than MOST_TEXT characters."""
    half = MOST_TEXT // 2
    left_out = f" ... ({len(text) - MOST_TEXT:,} characters) ... "
    return text if len(text) <= MOST_TEXT else f"{text[:half]}{left_out}{text[-half:]}"


class WithoutTrace:
    """An exception whose message is all that a notebook shows of it, as the command line does."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UserError(WithoutTrace, Exception):
    """Something the user can put right; the command line prints it without a stack trace and exits with code 2.

    Secrets in the message are masked, as in that of RunError.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


class ConfigError(UserError):
    """Every problem of a configuration at once, each naming its key, its value and the remedy."""

    def __init__(self, problems: Sequence[str], source: str = "configuration") -> None:
        self.problems = [without_secrets(problem) for problem in problems]
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__("\n".join([f"{len(self.problems)} {noun} in {source}:", *(f"  - {p}" for p in self.problems)]))


class RunError(WithoutTrace, Exception):
    """A run that started could not go on; exit code 1."""

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


class DiskError(RunError):
    """A file could not be written; names the file, the cause and the remedy."""


class RayLost(RunError):
    """The Ray that the run was on has died: no later run of this process can use it."""


class ClientError(RunError):
    """A client's work has failed and is not tried again; names the client, the round and the cause."""

    def __init__(self, client: int, round_: int, cause: str) -> None:
        self.client = client
        self.round = round_
        self.cause = cause
        super().__init__(f"client {client} failed in round {round_}: {cause}")

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        return type(self), (self.client, self.round, self.cause)


class DivergenceError(ClientError):
    """A loss, an update or a weight is not finite, or leaves the range in which sums are exact."""


class ServerDivergenceError(RunError):
    """The server's step gave values that are not finite; names the server, the round and the cause."""

    def __init__(self, round_: int, cause: str) -> None:
        self.round = round_
        self.cause = cause
        super().__init__(
            f"the server's step of round {round_} diverged: {cause}; lower server.lr or local.lr, or set update.clip"
        )

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.round, self.cause)
