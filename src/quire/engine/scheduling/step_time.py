"""How long a step takes for its number of tokens, learned from earlier steps. This module does not import torch."""

_CLIP = 3.0  # A step counts as at most this many times its prediction.
_NUM_TRUSTED = 8  # Steps that are counted before predictions limit others.
_MIN_SLOPE = 1e-4  # Smallest slope, as a share of the mean seconds per token.
_MIN_S = 1e-9  # Shortest step: a clock may be too coarse to measure it.
_MAX_TOKENS = 2**31  # No step is larger. Floats represent each whole number only up to 2**53.


class StepTimeModel:
    """Seconds of a step as a line over its number of tokens, fitted while it runs.

    The fit is by least squares, where each new step multiplies the weights of the older ones by `decay`, so that the
    line follows a machine whose speed changes; with 0.98 about 50 steps count. The line goes through the weighted
    means. Its slope is the most likely one given the steps and the prior expectation that time is proportional to
    tokens, with a standard deviation as large as the expected slope. If all steps have the same number of tokens, or
    noise hides the slope, the expectation remains. The slope is positive, and small enough that the line predicts no
    negative time for a step without tokens. A step that something else prolonged counts as at most three times its
    prediction. Memory and time are constant.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._num_steps = 0
        self._most_tokens = 0
        self._weight = 0.0
        self._mean_tokens = 0.0
        self._mean_s = 0.0
        self._tokens_tokens = 0.0  # Weighted sums of products of deviations from the means.
        self._tokens_s = 0.0
        self._s_s = 0.0
        self.seconds_per_token = 0.0
        """The time of one more token; 0 before the first step, then positive."""
        self.fixed_seconds = 0.0
        """The time of a step apart from its tokens; never negative."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that a step of `num_tokens` took `seconds`. A step without tokens is ignored."""
        if num_tokens < 1:
            return
        seconds = seconds if seconds > _MIN_S else _MIN_S
        most_s = _CLIP * (self.fixed_seconds + self.seconds_per_token * num_tokens)
        if self._num_steps >= _NUM_TRUSTED and seconds > most_s:
            seconds = most_s
        self._num_steps += 1
        if num_tokens > self._most_tokens:
            self._most_tokens = num_tokens
        decay = self._decay
        faded = decay * self._weight
        self._weight = weight = faded + 1.0
        tokens_off, s_off = num_tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += tokens_off / weight
        self._mean_s += s_off / weight
        share = faded / weight
        self._tokens_tokens = decay * self._tokens_tokens + share * tokens_off * tokens_off
        self._tokens_s = decay * self._tokens_s + share * tokens_off * s_off
        self._s_s = decay * self._s_s + share * s_off * s_off
        # The slope is the mode under a normal prior, with the mean seconds per token as mean and deviation.
        prior = self._mean_s / self._mean_tokens
        explained = self._tokens_s**2 / self._tokens_tokens if self._tokens_tokens else 0.0
        unexplained = self._s_s - explained
        noise = unexplained / weight if unexplained > 0 else 0.0  # Variance of a step around the line.
        pull = noise / prior**2
        evidence = self._tokens_tokens + pull
        slope = (self._tokens_s + pull * prior) / evidence if evidence else prior
        least = _MIN_SLOPE * prior
        self.seconds_per_token = slope = least if slope < least else prior if slope > prior else slope
        fixed_s = self._mean_s - slope * self._mean_tokens
        self.fixed_seconds = fixed_s if fixed_s > 0 else 0.0

    def predict(self, num_tokens: int) -> float:
        """Return the expected seconds of a step of `num_tokens`; 0 before the first step."""
        return self.fixed_seconds + self.seconds_per_token * num_tokens

    def max_tokens(self, target_s: float) -> int | None:
        """Return the most tokens whose step takes at most `target_s`; 0 if there are none, None before the first step.

        The result is at most twice the largest step so far, since the times of small steps may say little about large
        ones.
        """
        if not self._num_steps:
            return None
        num_tokens = max(
            0, int(min((target_s - self.fixed_seconds) / self.seconds_per_token, 2 * self._most_tokens, _MAX_TOKENS))
        )
        return num_tokens - 1 if num_tokens and self.predict(num_tokens) > target_s else num_tokens  # rounding
