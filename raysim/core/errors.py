"""The errors that a user can cause, told apart from faults of the program."""

from collections.abc import Sequence

from raysim.core.secrets import without_secrets


class UserError(Exception):
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


class RunError(Exception):
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
