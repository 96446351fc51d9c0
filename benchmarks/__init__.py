"""Speed and memory, measured as ratios within one process; never part of the tests."""
