"""How long a step of so many tokens takes, learned from the steps that ran. No torch here."""

_CLIP = 3.0  # a step counts as at most this many times its prediction
_NUM_TRUSTED = 8  # steps before predictions may clip
_MIN_SLOPE = 1e-4  # of the mean seconds per token
_MIN_S = 1e-9  # a clock may be too coarse to see the step
_MAX_TOKENS = 2**31  # no step is larger, and beyond 2**53 floats no longer tell token counts apart


class StepTimeModel:
    """Seconds of a step as a line over its number of tokens, fitted while it runs.

    Least squares in which each new step fades the older ones by `decay`, so the line follows a machine that changes;
    0.98 remembers about 50 steps. The line goes through the faded means. Its slope is the most likely one given the
    steps and the expectation that time is proportional to tokens, give or take as much again: where all steps have
    the same number of tokens or noise hides the slope, that expectation is what remains. It is above zero, and never
    so steep that no tokens would take less than no time. A step stretched by something else counts as at most three
    times its prediction. Constant memory and time.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._num_steps = 0
        self._most_tokens = 0
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_s = 0.0
        self._tokens_tokens = 0.0  # faded sums of products of deviations from the means
        self._tokens_s = 0.0
        self._s_s = 0.0
        self._slope = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took so long. One without tokens says nothing about the line and is left out."""
        if num_tokens < 1:
            return
        seconds = max(seconds, _MIN_S)
        if self._num_steps >= _NUM_TRUSTED:
            seconds = min(seconds, _CLIP * self.predict(num_tokens))
        self._num_steps += 1
        self._most_tokens = max(self._most_tokens, num_tokens)
        faded = self._decay * self._weight
        self._weight = faded + 1.0
        tokens_off, s_off = num_tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += tokens_off / self._weight
        self._mean_s += s_off / self._weight
        share = faded / self._weight
        self._tokens_tokens = self._decay * self._tokens_tokens + share * tokens_off * tokens_off
        self._tokens_s = self._decay * self._tokens_s + share * tokens_off * s_off
        self._s_s = self._decay * self._s_s + share * s_off * s_off
        self._slope = self._fit()

    def predict(self, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens`; 0 while nothing is known."""
        return self.fixed_seconds + self._slope * num_tokens

    def max_tokens(self, target_s: float) -> int | None:
        """The most tokens whose step stays within `target_s`; 0 if none does, None while nothing is known.

        At most twice as many as any step had so far: small steps may cost the same whatever they hold, large ones not.
        """
        if not self._num_steps:
            return None
        num_tokens = max(0, int(min((target_s - self.fixed_seconds) / self._slope, 2 * self._most_tokens, _MAX_TOKENS)))
        return num_tokens - 1 if num_tokens and self.predict(num_tokens) > target_s else num_tokens  # rounding

    @property
    def seconds_per_token(self) -> float:
        """What one more token costs; 0 while nothing is known, else above."""
        return self._slope

    @property
    def fixed_seconds(self) -> float:
        """What a step costs whatever it holds; never negative."""
        return max(0.0, self._mean_s - self._slope * self._mean_tokens)

    def _fit(self) -> float:
        """Mode of the slope under a normal prior around the mean seconds per token, as wide as it is large."""
        prior = self._mean_s / self._mean_tokens
        explained = self._tokens_s**2 / self._tokens_tokens if self._tokens_tokens else 0.0
        noise = max(0.0, self._s_s - explained) / self._weight  # variance of a step around the line
        pull = noise / prior**2
        evidence = self._tokens_tokens + pull
        slope = (self._tokens_s + pull * prior) / evidence if evidence else prior
        return min(max(slope, _MIN_SLOPE * prior), prior)
