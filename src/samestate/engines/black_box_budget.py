"""What may be asked of somebody else's server: requests and tokens, counted before they are sent."""

from __future__ import annotations

from samestate.engines.base import EngineError


class BudgetSpent(EngineError):
    """The next request would go beyond the budget, so it was not sent."""


class Budget:
    """Requests for completions and resets, and tokens of prompts and answers together."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.requests, self.tokens = requests, tokens
        self.requests_spent = 0
        self.tokens_spent = 0

    @property
    def requests_left(self) -> int:
        return self.requests - self.requests_spent

    @property
    def tokens_left(self) -> int:
        """From 0, though more may have been spent than was foreseen."""
        return max(0, self.tokens - self.tokens_spent)

    def allows(self, requests: int, tokens: int) -> bool:
        """Whether so many more are within it."""
        return requests <= self.requests_left and tokens <= self.tokens_left

    def take(self, tokens: int) -> None:
        """One request of at most `tokens`. Raises `BudgetSpent`, and takes nothing, where that is too much."""
        if self.requests_left < 1:
            raise BudgetSpent(f"--budget-requests: all {self.requests} are spent; allow more")
        if tokens > self.tokens_left:
            raise BudgetSpent(
                f"--budget-tokens: {self.tokens_left:,} of {self.tokens:,} are left, and the next request may take "
                f"{tokens:,}; allow more"
            )
        self.requests_spent += 1
        self.tokens_spent += tokens

    def correct(self, taken: int, used: int) -> None:
        """The server counted `used` tokens where `taken` were foreseen: more of them leave less for the next."""
        self.tokens_spent += used - taken
