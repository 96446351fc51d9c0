"""Loss spikes: those of known size are found and nothing else, and each limit of the rule stands where it says."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest

from gatedlm.probes import Event, Spikes, SpikeSpec, SpikeWatch, find_spikes

SHORT = SpikeSpec(window=150, skip=200, merge=20)
AT_ONCE = SpikeSpec(skip=0)
POINTS = 800


def reference(steps: list[int], losses: list[float | None], spec: SpikeSpec) -> Spikes:
    """The rule as it is worded, each window gathered anew."""
    curve = [(s, math.inf if x is None or not math.isfinite(x) else x) for s, x in zip(steps, losses, strict=True)]
    judged, rises = [], {}
    for step, loss in curve:
        before = [x for s, x in curve if step - spec.window <= s < step and x < math.inf]
        if step > spec.skip and (len(before) >= 20 or loss == math.inf):
            judged.append(step)
            middle = median(before) if loss < math.inf else 0
            mad = median(abs(x - middle) for x in before) if loss < math.inf else 0
            if loss - middle > spec.rise and loss - middle > spec.sigmas * 1.4826 * mad:
                rises[step] = loss - middle
    events, left = [], list(rises)
    while left:
        end = next((i for i in range(1, len(left)) if left[i] - left[i - 1] > spec.merge), len(left))
        group, left = left[:end], left[end:]
        top = max(dict(curve)[s] for s in group)
        peak = next(s for s in group if dict(curve)[s] == top)
        events.append(Event(group[0], peak, rises[peak]))
    return Spikes(list(rises), events, judged[0] if judged else None)


def level(points: int = 100, at: float = 2.0) -> tuple[list[int], list[float | None]]:
    """Steps 1, 2, ... at one loss, so that the MAD is 0."""
    return list(range(1, points + 1)), [at] * points


def drifting(rng: np.random.Generator, points: int) -> np.ndarray:
    """Down from 7 to 4 nats, with a slow swing of 0.1 nats upon it."""
    steps = np.arange(points)
    return 4 + 3 * np.exp(-steps / 50) + 0.1 * np.sin(steps / 600 + rng.uniform(0, 2 * math.pi))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["heavy tails below the rise", "wide noise below the sigmas"])
def test_planted_spikes_are_found_and_nothing_else(seed: int, kind: str):
    rng = np.random.default_rng(seed)
    tails, wide = 0.03 * rng.standard_t(2, POINTS), 0.3 * rng.standard_normal(POINTS)
    noise = tails.clip(-0.17, 0.17) if kind.startswith("heavy") else wide.clip(-1, 1)
    steps, losses = rng.integers(1, 4, POINTS).cumsum().tolist(), drifting(rng, POINTS) + noise
    planted = [300, 305, 500, 790]
    size = 6 * np.abs(noise).max()
    for place, height in zip(planted, (1, 2, 3, 1.5), strict=True):
        losses[place] += height * size
    found = find_spikes(steps, losses.tolist(), SHORT)
    assert found.points == [steps[place] for place in planted]
    events = [(300, 305, 2), (500, 500, 3), (790, 790, 1.5)]
    assert [event[:2] for event in found.events] == [(steps[start], steps[peak]) for start, peak, _ in events]
    for event, (_, _, height) in zip(found.events, events, strict=True):
        assert event.rise == pytest.approx(height * size, abs=1.2 * np.abs(noise).max() + 0.05)


def test_it_agrees_with_the_rule_as_worded():
    rng, spiked, merged = random.Random(0), 0, 0
    for _ in range(150):
        width = rng.choice([1, 1, 9])
        steps = sorted(rng.sample(range(120 * width), 100))
        losses: list[float | None] = [rng.choice((2.0, 2.5, rng.gauss(2, 0.1))) for _ in steps]
        for place in rng.sample(range(100), 8):
            losses[place] = rng.choice((None, math.nan, math.inf, -math.inf, 3.0, 3.0, 4.0))
        limits: dict[str, Any] = {"window": rng.choice((25, 70, 300)), "skip": rng.choice((0, 40)), "merge": 7}
        spec = SpikeSpec(**limits, rise=rng.choice((0.2, 0.6)), sigmas=rng.choice((1.0, 3.0, 6.0)))
        found = find_spikes(steps, losses, spec)
        assert found == reference(steps, losses, spec)
        spiked, merged = spiked + len(found.points), merged + len(found.points) - len(found.events)
    assert spiked > 1000 and merged > 100


@pytest.mark.parametrize(("rise", "spikes"), [(0.1999, False), (0.2001, True)])
def test_more_than_the_rise(rise: float, spikes: bool):
    steps, losses = level()
    found = find_spikes([*steps, 101], [*losses, 2 + rise], AT_ONCE)
    assert found.points == [101] * spikes
    assert found.events == [(101, 101, pytest.approx(rise))] * spikes


def test_the_rise_itself_is_not_more():
    steps, losses = level()
    found = [find_spikes([*steps, 101], [*losses, x], replace(AT_ONCE, rise=0.25)) for x in (2.25, 2.2500001)]
    assert [spikes.points for spikes in found] == [[], [101]]


@pytest.mark.parametrize(("rise", "spikes"), [(2.2238, False), (2.2240, True)])
def test_more_than_six_sigmas(rise: float, spikes: bool):
    """Losses of 1.75 and 2.25 have the median 2 and the MAD 0.25, so the limit is 6 x 1.4826 x 0.25 = 2.2239."""
    losses = [1.75, 2.25] * 20
    assert find_spikes(range(1, 42), [*losses, 2 + rise], SpikeSpec(skip=40)).points == [41] * spikes


@pytest.mark.parametrize(("window", "spikes"), [(99, False), (100, True)])
def test_a_window_begins_with_the_step_that_lies_its_width_back(window: int, spikes: bool):
    found = find_spikes([*range(1, 21), 101], [2.0] * 20 + [5.0], SpikeSpec(window=window, skip=0))
    assert found == (([101], [Event(101, 101, 3)], 101) if spikes else ([], [], None))


def test_no_verdict_before_twenty_points():
    for before in (19, 20):
        steps, losses = level(before)
        found = find_spikes([*steps, before + 1], [*losses, 9.0], AT_ONCE)
        assert found.since == (before + 1 if before == 20 else None)
        assert found.points == [before + 1] * (before == 20)


def test_the_first_steps_are_skipped_but_count_as_past():
    steps, losses = level(70)
    losses[39] = losses[40] = 9.0
    found = find_spikes(steps, losses, SpikeSpec(skip=40))
    assert found == ([41], [Event(41, 41, 7)], 41)


@pytest.mark.parametrize(
    ("planted", "events"),
    [
        ([300, 500], [(300, 500)]),
        ([300, 501], [(300, 300), (501, 501)]),
        ([300, 500, 700], [(300, 700)]),
        ([300, 301, 502, 600], [(300, 301), (502, 600)]),
    ],
)
def test_events_end_where_no_spike_follows_within_200_steps(planted: list[int], events: list[tuple[int, int]]):
    steps, losses = level(800)
    for step in planted:
        losses[step - 1] = 3.0 + step / 1000
    found = find_spikes(steps, losses, AT_ONCE)
    assert found.points == planted
    assert found.events == [(start, peak, pytest.approx(1 + peak / 1000)) for start, peak in events]


def test_a_rise_that_stays_is_one_event_until_the_median_follows():
    steps, losses = level(400, 2.0)
    found = find_spikes(steps, losses[:200] + [5.0] * 200, SpikeSpec(window=100, skip=0))
    assert found.points == [*range(201, 251)]
    assert found.events == [Event(201, 201, 3)]


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_spikes_and_stays_out_of_windows(loss: float | None):
    steps, losses = level(30)
    losses[24] = loss
    found = find_spikes(steps, losses, AT_ONCE)
    assert found == ([25], [Event(25, 25, math.inf)], 21)
    assert find_spikes([3], [loss], AT_ONCE) == ([3], [Event(3, 3, math.inf)], 3)
    assert find_spikes([3], [loss], SpikeSpec(skip=3)) == ([], [], None)
    nineteen = find_spikes(range(1, 31), [2.0] * 19 + [loss] * 10 + [9.0], AT_ONCE)
    assert nineteen.points == [*range(20, 30)], "the last point has only 19 finite losses before it"


def test_the_peak_is_the_first_loss_that_was_not_finite():
    steps, losses = level(60)
    losses[49:54] = [4.0, None, 7.0, math.nan, 3.0]
    assert find_spikes(steps, losses, AT_ONCE).events == [Event(50, 51, math.inf)]


@pytest.mark.parametrize("steps", [[1, 2, 2], [1, 3, 2]])
def test_steps_out_of_order_are_refused(steps: list[int]):
    with pytest.raises(ValueError, match=f"step 2 comes after step {steps[1]}"):
        find_spikes(steps, [1.0, 1.0, 1.0], SpikeSpec())


def test_a_watch_says_at_once_what_spikes():
    watch = SpikeWatch(AT_ONCE)
    rises = [watch.see(step, 3.5 if step == 30 else 2.0) for step in range(1, 40)]
    assert rises == [0.0] * 29 + [1.5] + [0.0] * 9
    assert watch.since == 21


@pytest.mark.parametrize("limit", ["window", "skip", "rise", "sigmas", "merge"])
def test_limits_below_zero_are_refused(limit: str):
    wrong: dict[str, Any] = {limit: -type(getattr(SpikeSpec(), limit))(1)}
    with pytest.raises(ValueError, match=f"{limit}=-1"):
        SpikeSpec(**wrong)


def test_limits_that_are_no_number_are_refused():
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="sigmas="):
            SpikeSpec(sigmas=value)
