"""What repeats of one measurement say: an interval for the mean, and whether two settings differ by more than noise."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ENOUGH = 3  # no claim rests on fewer
# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond them the normal one is near enough.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """A mean and where it lies with 95 % confidence. Of a change, all three are shares: 0.05 is 5 % more."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def has_zero(self) -> bool:
        """Of a change: whether the repeats leave open which of the two is larger."""
        return self.low <= 0 <= self.high

    def show(self, unit: str = "", digits: int = 0) -> str:
        """The mean and the interval as text, such as ``2,046 (1,990 to 2,102) tokens/s``."""
        mean, low, high = (f"{value:,.{digits}f}" for value in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high}) {unit}".strip()

    def show_change(self) -> str:
        """A change as text, such as ``+5.1 % (+3.0 to +7.2 %)``."""
        mean, low, high = (f"{100 * value:+.1f}".replace("-", "−") for value in (self.mean, self.low, self.high))
        return f"{mean} % ({low} to {high} %)"


def t95(degrees: float) -> float:
    """The two-sided 95 % quantile of Student's t; a fraction of a degree does not count."""
    whole = max(1, math.floor(degrees))
    return _T95[whole - 1] if whole <= len(_T95) else 1.96 + 2.5 / whole


def interval(values: Sequence[float]) -> Interval:
    """The mean of repeats with its interval (Student's t).

    Raises:
        ValueError: for fewer than two values.
    """
    _need(values)
    mean = statistics.fmean(values)
    half = t95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def change(before: Sequence[float], after: Sequence[float]) -> Interval:
    """By which share ``after`` is above ``before``: the ratio of geometric means less one (Welch's t on logarithms).

    Raises:
        ValueError: for fewer than two values of either, or one that is not above zero.
    """
    _need(before)
    _need(after)
    if min(*before, *after) <= 0:
        raise ValueError("a ratio needs values above zero")
    logs = [[math.log(value) for value in values] for values in (before, after)]
    parts = [statistics.variance(each) / len(each) for each in logs]
    mean = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    half = 0.0
    if sum(parts) > 0:
        degrees = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, logs, strict=True))
        half = t95(degrees) * math.sqrt(sum(parts))
    return Interval(*(math.expm1(log) for log in (mean, mean - half, mean + half)))


def paired_change(before: Sequence[float], after: Sequence[float]) -> Interval:
    """The same of values that belong together one by one, such as loads of the same requests sent to two servers: what
    differs from pair to pair does not count as noise (Student's t on the logarithms of the ratios).

    Raises:
        ValueError: for fewer than two pairs, lengths that differ, or a value that is not above zero.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} values and {len(after)} are no pairs")
    _need(before)
    if min(*before, *after) <= 0:
        raise ValueError("a ratio needs values above zero")
    found = interval([math.log(second / first) for first, second in zip(before, after, strict=True)])
    return Interval(*(math.expm1(log) for log in (found.mean, found.low, found.high)))


def smallest_visible(before: Sequence[float], after: Sequence[float]) -> float:
    """The smallest change, as a share, that repeats which scatter like these could tell from none."""
    return change(before, after).half_width


def _need(values: Sequence[float]) -> None:
    if len(values) < 2:
        raise ValueError(f"{len(values)} value gives no interval: repeat the load")
