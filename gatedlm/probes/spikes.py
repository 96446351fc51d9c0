"""Where a training loss leaves its trend: points far above the trailing median, and the events they form."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

LEAST = 20
MAD_OF_NORMAL = 1.4826  # times the MAD of normal noise is its standard deviation


@dataclass(frozen=True)
class SpikeSpec:
    """The loss x_s spikes where x_s - m > rise and x_s - m > sigmas * 1.4826 * MAD; defaults are for full-size runs.

    m is the median of the finite losses at steps in [s - window, s), MAD the median of their |x - m|. With fewer than
    20 of them there is no verdict. A loss that is not finite spikes without one, by an infinite rise.

    window  steps that a point is compared with
    skip    the first steps of a run, up to this one, which get no verdict but count in later windows
    rise    nats
    sigmas  standard deviations of the noise around the median
    merge   steps between two spiking points that still belong to one event
    """

    window: int = 2000
    skip: int = 5000
    rise: float = 0.2
    sigmas: float = 6.0
    merge: int = 200

    def __post_init__(self) -> None:
        for key, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{key}={value}: must be a number from 0 up")


class Event(NamedTuple):
    """Spiking points that follow each other within ``merge`` steps.

    start is the first one's step, peak the step of the largest loss, rise how far that stood above its median, in nats.
    """

    start: int
    peak: int
    rise: float


class Spikes(NamedTuple):
    """The steps that spike, the events they form, and the first step that got a verdict, None if none did."""

    points: list[int]
    events: list[Event]
    since: int | None


class SpikeWatch:
    """The rule of ``spec`` for one point after the other, so that a run can be watched as it goes."""

    def __init__(self, spec: SpikeSpec) -> None:
        self.spec = spec
        self.since: int | None = None
        self._last = -math.inf
        self._points: deque[tuple[int, float]] = deque()
        self._losses = array("d")  # of the same points, sorted

    def see(self, step: int, loss: float) -> float:
        """How far the loss stands above the median, in nats, if it spikes; else 0.

        Raises ValueError for a step that does not come after the last one seen: points may be any distance apart, but
        sorting them or dropping repeated steps is the caller's choice.
        """
        if step <= self._last:
            raise ValueError(f"step {step} comes after step {self._last}: put the steps in order, each of them once")
        self._last = step
        self._forget(step - self.spec.window)
        rise = self._rise(loss) if step > self.spec.skip else None
        if rise is not None and self.since is None:
            self.since = step
        if math.isfinite(loss):
            self._points.append((step, loss))
            insort(self._losses, loss)
        return rise or 0.0

    def _forget(self, before: int) -> None:
        while self._points and self._points[0][0] < before:
            del self._losses[bisect_left(self._losses, self._points.popleft()[1])]

    def _rise(self, loss: float) -> float | None:
        """What ``see`` returns, or None without a verdict."""
        if not math.isfinite(loss):
            return math.inf
        count = len(self._losses)
        if count < LEAST:
            return None
        median = (self._losses[(count - 1) // 2] + self._losses[count // 2]) / 2
        rise = loss - median
        if rise <= self.spec.rise:  # most points end here, and what follows is slow
            return 0.0
        mad = float(np.median(np.abs(np.frombuffer(self._losses) - median)))
        return rise if rise > self.spec.sigmas * MAD_OF_NORMAL * mad else 0.0


def find_spikes(steps: Sequence[int], losses: Sequence[float | None], spec: SpikeSpec) -> Spikes:
    """All spikes of a curve in nats, its steps rising at any spacing; a loss of None is one that was not finite.

    Raises ValueError for steps out of order or repeated.
    """
    watch = SpikeWatch(spec)
    spiked: list[tuple[int, float, float]] = []
    for step, loss in zip(steps, losses, strict=True):
        loss = math.inf if loss is None or not math.isfinite(loss) else loss
        if rise := watch.see(step, loss):
            spiked.append((step, loss, rise))
    return Spikes([step for step, _, _ in spiked], _events(spiked, spec.merge), watch.since)


def _events(spiked: list[tuple[int, float, float]], merge: int) -> list[Event]:
    groups: list[list[tuple[int, float, float]]] = []
    for point in spiked:
        if groups and point[0] - groups[-1][-1][0] <= merge:
            groups[-1].append(point)
        else:
            groups.append([point])
    peaks = [max(group, key=lambda point: point[1]) for group in groups]
    return [Event(group[0][0], step, rise) for group, (step, _, rise) in zip(groups, peaks, strict=True)]
