"""The section `update` of a configuration: what is done to a client's update before it is sent; all off by default."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

RESIDUAL = "update_residual"  # what a client remembers of what it did not send, beside its algorithm's own state

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Update(BaseModel):
    """What a client does to its update before sending it, and the noise that hides it; everything is off by default."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=())

    top_k: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Fraction of the coordinates that is sent, the largest; the rest is remembered and added to the next update."""
    quantise: Annotated[int, Field(ge=2, le=16)] | None = None
    """Bits of each coordinate sent, rounded at random to a level above or below, right on average; null: float32."""
    clip: Positive | None = None
    """Largest Euclidean norm of a client's update; longer ones are scaled down to it."""
    noise_multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of Gaussian noise in units of what one client can change (`clip`); 0: none."""
    noise_at: Literal["server", "client"] = "server"
    """Who adds the noise: the server once to the weighted sum, or every client to its own update."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """The delta of (epsilon, delta)-differential privacy for which epsilon is worked out."""

    @property
    def private(self) -> bool:
        """Whether noise is added, and so an epsilon exists."""
        return self.noise_multiplier > 0

    @property
    def changes_updates(self) -> bool:
        """Whether clients send anything but the plain update."""
        return any((self.top_k, self.quantise, self.clip, self.private and self.noise_at == "client"))

    def problems(self) -> list[str]:
        """What does not go together, one line a problem."""
        found = []
        if self.private and self.clip is None:
            found.append(
                f"update.noise_multiplier = {self.noise_multiplier:g}: noise hides a client only if its update is "
                "bounded; set update.clip"
            )
        if self.private and self.noise_at == "client" and (self.top_k or self.quantise):
            found.append(
                "update.noise_at = client: noise on every coordinate undoes update.top_k and update.quantise; use "
                "update.noise_at=server, or leave them out"
            )
        return found

    def bytes_up(self, parameters: int) -> int:
        """Bytes of one client's update of this many parameters as it is sent.

        Dense: float32, or `quantise` bits each and one float32 scale.  Sparse: a 4-byte index with each value.
        """
        sent = kept(self.top_k, parameters)
        bits = self.quantise or 32
        scale = 4 if self.quantise else 0
        return -(-sent * bits // 8) + scale + (4 * sent if self.top_k else 0)


def kept(top_k: float | None, parameters: int) -> int:
    """How many coordinates are sent: round(top_k P), at least one."""
    return parameters if top_k is None else max(1, round(top_k * parameters))
